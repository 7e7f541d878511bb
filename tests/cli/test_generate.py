"""`axsparse generate` and `axsparse evaluate`: a model that knows a text by heart recites it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line
from support.preparing import LINE, run
from support.resuming import ran
from support.runs import tiny_config

from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets
from axsparse.runtime.errors import EXIT_DATA, EXIT_MISSING

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
    training, validation = token_datasets(home / "tokens", LENGTH, validate=True)
    ran((1, 1), config, home / "run", data=training, validation=validation)
    return home / "run"


def test_it_recites_what_it_has_learnt(recited: Path, axsparse: Axsparse) -> None:
    """The text becomes longer than what the model sees at a time."""
    code, screen, _ = axsparse("generate", recited, "--prompt", LINE + "The cat", "--tokens", 60)

    assert code == 0
    assert screen.startswith(LINE * 3)
    likeliest = axsparse(
        "generate", recited, "--prompt", LINE + "The cat", "--tokens", 60, "--top-k", 1
    )
    assert likeliest == (0, screen, "")


def test_a_seed_draws_the_same_text_again_and_another_seed_another(
    recited: Path, axsparse: Axsparse
) -> None:
    def drawn(*args: object) -> str:
        code, screen, _ = axsparse("generate", recited, "--prompt", "The", *args)
        assert code == 0 and screen.startswith("The")
        return screen

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


def test_what_is_missing_or_changed_is_named(
    recited: Path, axsparse: Axsparse, tmp_path: Path
) -> None:
    gone = axsparse("generate", tmp_path / "none", "--prompt", "x")
    assert_one_line(gone, EXIT_MISSING, "none: holds no checkpoint; name a run that")

    tokenizer = recited.parent / "tokens" / "tokenizer.json"
    text = tokenizer.read_text()
    try:
        tokenizer.write_text(text + "\n")
        said = axsparse("generate", recited, "--prompt", "x")
        assert_one_line(said, EXIT_DATA, "tokenizer.json is not the tokenizer that made")
        tokenizer.unlink()
        said = axsparse("generate", recited, "--prompt", "x")
        assert_one_line(said, EXIT_MISSING, "tokenizer.json cannot be read")
    finally:
        tokenizer.write_text(text)
