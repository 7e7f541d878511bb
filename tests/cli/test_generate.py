"""`axsparse generate` and `evaluate` of a run: a model that knows a text by heart recites it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.commands import Axsparse
from support.preparing import LINE, run
from support.resuming import ran
from support.runs import tiny_config

from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets
from axsparse.data.tokenizers import SEPARATOR
from axsparse.models.layer import as_tuple
from axsparse.training.evaluation import open_saved_model

pytest.importorskip("transformers", reason="pip install 'axsparse[test]'")

LENGTH = 25
"""No multiple of the tokens of a line, so that each sample begins elsewhere in it."""


@pytest.fixture(scope="module")
def recited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one line, again and again, in the words of a vocabulary that was learnt from it."""
    home = tmp_path_factory.mktemp("recited")
    (home / "text.txt").write_text(LINE * 300)
    (home / "validation.txt").write_text(LINE * 30)
    run(
        Request(
            inputs=(home / "text.txt",),
            validation=(home / "validation.txt",),
            out=home / "tokens",
            train_bpe=290,
        )
    )
    config = tiny_config(
        model={"sequence_length": LENGTH, "vocab_size": 290},
        data={"source": "tokens", "path": str(home / "tokens")},
        train={"steps": 80, "eval_every": 80, "eval_steps": "all"},
        batch={"global_batch_size": 12, "microbatch_size": 12},
        pruning={"sparsity": 0.5},
    )
    parts = token_datasets(home / "tokens", LENGTH)
    training, validation = parts["train"], parts["validation"]
    ran((1, 1), config, home / "run", data=training, validation=validation)
    return home / "run"


@torch.no_grad()
def likeliest(run: Path, prompt: str, room: int = LENGTH) -> str:
    """The text that a run's own modules continue in fp32, each token computed from all before."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'axsparse[text]'")
    words = tokenizers.Tokenizer.from_file(str(run.parent / "tokens" / "tokenizer.json"))
    saved, ids = open_saved_model(run, None), words.encode(prompt).ids
    while len(ids) < room:
        outputs: tuple[torch.Tensor, ...] = (torch.tensor([ids]),)
        for layer, module in zip(saved.model.layers, saved.modules, strict=True):
            outputs = as_tuple(layer.name, module(*outputs))
        hidden, weight = outputs
        ids.append(int((hidden[0, -1] @ weight.T).argmax()))
    text: str = words.decode(ids)
    return text


def test_it_recites_what_it_has_learnt(recited: Path, axsparse: Axsparse) -> None:
    """With the tokens of the run's own modules, until the model has room for no more."""
    code, screen, _ = axsparse("generate", recited, "--prompt", "The cat", "--compare")

    assert code == 0
    text = likeliest(recited, "The cat")
    assert text.startswith(LINE)
    said, dense = screen.split(text)[1:]
    assert " tokens (the model has room for no more), " in said
    held, whole = (float(one.split("weights ")[1].split()[0]) for one in (said, dense))
    assert held < whole
    one = axsparse("generate", recited, "--prompt", "The cat", "--top-k", 1)
    assert one[1].startswith(text)


def test_no_prompt_is_the_end_of_a_document(recited: Path, axsparse: Axsparse) -> None:
    texts = [
        axsparse("generate", recited, "--prompt", prompt, "--tokens", 5)[1].splitlines()[0]
        for prompt in ("", SEPARATOR)
    ]
    assert texts[0] and texts[1] == SEPARATOR + texts[0]


def test_a_seed_draws_the_same_text_again_and_another_seed_another(
    recited: Path, axsparse: Axsparse
) -> None:
    def drawn(*args: object) -> str:
        code, screen, _ = axsparse("generate", recited, "--prompt", "The", *args)
        assert code == 0 and screen.startswith("The")
        return screen.partition(" tokens")[0]

    hot = ("--temperature", 5, "--tokens", 20)
    assert drawn(*hot, "--seed", 1) == drawn(*hot, "--seed", 1)
    assert drawn(*hot, "--seed", 1) != drawn(*hot, "--seed", 2)
    assert drawn("--temperature", 1e-9, "--tokens", 20) == drawn("--tokens", 20)


def test_it_evaluates_to_what_the_run_reported(recited: Path, axsparse: Axsparse) -> None:
    lines = (recited / "metrics.jsonl").read_text().splitlines()
    [said] = [record for line in lines if "eval_loss" in (record := json.loads(line))]

    code, screen, _ = axsparse("evaluate", recited)

    assert code == 0
    assert f"step 80: validation loss {said['eval_loss']:.6g}  perplexity " in screen
    assert f"{said['perplexity']:.6g}  (" in screen
