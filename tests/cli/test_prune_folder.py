"""`axsparse prune --from`: a folder of Hugging Face, pruned and healed, and a folder again."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exhaustive import by_default
from support.hf import (
    FAMILIES,
    gpt2_folder,
    saved_model,
    saved_with_pictures,
    small_gpt,
    write_folder,
    write_llama,
)
from support.mpirun import ENVIRONMENT, Finished, run_alone, run_mpirun
from support.runs import VOCABULARY, job_alone

from axsparse.cli import prune_folder
from axsparse.cli.prune_folder import Facts, card, own_options, reworded
from axsparse.cli.prune_order import FACTS, PRUNED, Heal, PruneOrder, Schedule
from axsparse.config.load import configure
from axsparse.data.dataset import TokenDataset
from axsparse.data.preparation import Request, prepare
from axsparse.data.sources import token_datasets
from axsparse.data.token_file import read_sidecar
from axsparse.data.tokenizers import ANOTHER_TOKENIZER
from axsparse.models.start_weights import FromFile, open_weights, unchanged
from axsparse.pruning.mask_file import open_masks
from axsparse.runtime.console import Console
from axsparse.runtime.errors import (
    EXIT_CONFIG,
    EXIT_SAVED,
    ConfigError,
    DataError,
    OutputError,
)
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR, RESUME_AUTO
from axsparse.training import build
from axsparse.training.checkpoint.verification import steps_in
from axsparse.training.export import export_folder

TEXTS = ("--data", "texts", "--validation", "held")
SMALL = (
    *("--from", "model", "--set", "precision=fp32", "--set", "batch.global_batch_size=4"),
    *("--set", "pruning.calibration_samples=8", "--set", "train.peak_flops=1e12"),
)
FEW = (*TEXTS, *SMALL)
JUDGED = ("--set", "train.eval_steps=1")
"""One batch is evaluated, which are fewer samples than calibrate."""
ALL = ("--set", "pruning.include=all", "--set", "pruning.exclude=[lm_head.weight]")


SETTINGS = tuple(word for word in FEW if "=" in word)


@pytest.fixture
def folder(transformers: Any, tmp_path: Path) -> Path:
    """A folder that has `model`, and its texts."""
    del transformers
    write_folder(tmp_path / "model")
    return tmp_path


def order_of(folder: Path, *settings: str, heal: Heal = "none") -> PruneOrder:
    """An order for the folder `model` in a folder."""
    paths = (folder / "model", (folder / "texts",), (folder / "held",), folder / "out")
    return PruneOrder(*paths, "prune_llama.yaml", settings, heal)


def pruned(
    cwd: Path, out: str, *more: str, ranks: int = 1, texts: tuple[str, ...] = TEXTS
) -> dict[str, torch.Tensor]:
    """The weights of the folder that the command writes."""
    words = ["-m", "axsparse", "prune", *texts, *SMALL, "--out", out, *more]
    done = run_alone(words, cwd=cwd) if ranks == 1 else run_mpirun(ranks, words, cwd=cwd)
    assert done.returncode == 0, done
    assert f"axsparse: wrote {out}" in done.stdout
    file = open_weights(cwd / out / "model.safetensors")
    return {name: file.read(name) for name in file.shapes}


def test_a_folder_becomes_a_pruned_and_healed_folder(transformers: Any, folder: Path) -> None:
    out = "texts/it's [out]: #1"

    found = pruned(folder, out)

    read = read_sidecar(folder / f"{out}.run" / "tokens", "--out").sources
    there = [path for name in ("texts", "held") for path in (folder / name).iterdir()]
    assert read.files == sum(path.is_file() for path in there), "what is written is not read"
    gates = "model.layers.1.mlp.gate_proj.weight"
    assert float((found[gates] == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / out)
    assert torch.equal(dict(model.named_parameters())[gates], found[gates])
    said = (folder / out / "README.md").read_text()
    assert re.search(r"\| 8 validation samples \| before \| after \|", said)
    assert re.search(r"\| perplexity \| \d+\.\d+ \| \d+\.\d+ \|", said)
    assert " --set batch.global_batch_size=4" in said.partition("axsparse train")[2]
    assert "model, pruned by axsparse: wanda to 50 %; blocks are healed.\n50.0 % of the" in said
    assert "Data: texts; 8 samples of calibration; seed 1234.\n" in said
    again = run_alone(["-m", "axsparse", "prune", *FEW, "--out", out], cwd=folder)
    assert again.returncode == EXIT_CONFIG
    assert f"--out: {out} is there already; move it away" in again.stderr


@pytest.mark.exhaustive
def test_a_word_for_padding_beyond_the_embedding_needs_no_row(
    transformers: Any, folder: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer.pad_token_id == VOCABULARY
    tokenizer.save_pretrained(folder / "model")

    found = pruned(folder, "out", "--heal", "none", *JUDGED)

    assert found["model.embed_tokens.weight"].shape[0] == VOCABULARY
    written = transformers.AutoTokenizer.from_pretrained(folder / "out")
    assert written.pad_token_id == VOCABULARY


def test_one_text_is_data_and_validation_and_need_not_fill_a_step(folder: Path) -> None:
    (folder / "book.txt").write_text("b c d " * 700)

    few = ("--set", "batch.global_batch_size=9999", *JUDGED)
    pruned(folder, "out", "--heal", "none", *few, texts=("--data", "book.txt"))

    found = read_sidecar(folder / "out.run" / "tokens", "--out")
    assert found.validation is not None
    assert (found.train.documents, found.validation.documents) == (1, 1)
    assert found.train.tokens + found.validation.tokens == 2101


def steps_of(heal: str) -> tuple[str, ...]:
    return ("--steps", "2") if heal == "train" else ()


EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "layers.1.mlp.experts.3.down_proj.weight",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "mixtral": (
        "layers.1.block_sparse_moe.experts.3.w2.weight",
        {**EXPERTS, "num_local_experts": 4, "intermediate_size": 24},
    ),
    "olmoe": (
        "layers.1.mlp.experts.3.down_proj.weight",
        {**EXPERTS, "num_experts": 4, "intermediate_size": 24, "pad_token_id": 1},
    ),
    "deepseek_v3": (
        "layers.1.mlp.experts.3.down_proj.weight",
        {
            **{**EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1},
            **{"topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
            **{"qk_nope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 48},
        },
    ),
    "gpt_neox": ("embed_out.weight", {"intermediate_size": 48}),
}
"""A name that a published folder of the family has, and settings of a small one."""


@pytest.mark.parametrize(
    ("family", "heal"),
    by_default(
        [("qwen3_moe", "none")],
        [
            *((family, "none") for family in OF_FAMILY),
            ("qwen3_moe", "train"),
            ("gpt_neox", "train"),
        ],
    ),
)
def test_a_folder_comes_out_as_it_went_in(
    family: str, heal: str, transformers: Any, tmp_path: Path
) -> None:
    """In bf16, with a matrix for each expert, and with the head under a name of its own."""
    write_folder(tmp_path / "texts_only")
    own, sizes = OF_FAMILY[family]
    settings = transformers.AutoConfig.for_model(
        family,
        **{"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
        **{"num_attention_heads": 4, "max_position_embeddings": 12},
        **{"bos_token_id": 1, "eos_token_id": 0},
        **sizes,
    )
    saved_model(transformers, settings, tmp_path / "model", torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "texts_only" / name, tmp_path / "model" / name)
    header, text = "---\nlicense: mit\n---\n", "# A model\n---\nof two layers\n"
    (tmp_path / "model" / "README.md").write_text(header + text)
    templates = "additional_chat_templates"
    (tmp_path / "model" / templates).mkdir()
    (tmp_path / "model" / templates / "tool_use.jinja").write_text("{{ tools }}")
    file = open_weights(tmp_path / "model" / "model.safetensors")
    assert any(name.endswith(own) for name in file.shapes)

    more = ("--separator", "c", "--heal", heal, *JUDGED, *steps_of(heal))
    found = pruned(tmp_path, "out", *more)

    assert read_sidecar(tmp_path / "out.run" / "tokens", "--out").settings["separator"] == "c"
    assert {name: (tuple(one.shape), one.dtype) for name, one in found.items()} == {
        name: (shape, file.dtype(name)) for name, shape in file.shapes.items()
    }
    same = [(tmp_path / folder / "config.json").read_bytes() for folder in ("model", "out")]
    assert same[0] == same[1]
    assert (tmp_path / "out" / templates / "tool_use.jinja").read_text() == "{{ tools }}"
    page = (tmp_path / "out" / "README.md").read_text()
    assert page.startswith(f"{header}# out\n")
    assert page.endswith(f"\n{text}")
    if heal == "none":
        for name, one in found.items():
            assert torch.equal(one[one != 0], file.read(name)[one != 0]), name
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if family == "gpt_neox":
        assert torch.equal(model.get_output_embeddings().weight, found[own])
    else:
        stack = model.model.layers[1].mlp.experts.down_proj[3]
        assert torch.equal(stack, found[f"model.{own}"])


@pytest.mark.parametrize(
    ("family", "heal", "ranks"),
    by_default(
        [("gemma3", "none", 1)],
        list(itertools.product(FAMILIES["pictures"], ("none", "blocks", "train"), (1, 2))),
    ),
)
def test_of_a_folder_with_pictures_the_text_model_is_pruned_and_the_rest_stays(
    family: str, heal: str, ranks: int, transformers: Any, tmp_path: Path
) -> None:
    write_folder(tmp_path / "texts_only")
    saved_with_pictures(transformers, family, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "texts_only" / name, tmp_path / "model" / name)
    # Without a class transformers takes the family's, whose special tokens are no letters here.
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said))
    (tmp_path / "model" / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    before = open_weights(tmp_path / "model" / "model.safetensors")

    more = ("--method", "magnitude", "--heal", heal, *JUDGED, *steps_of(heal))
    found = pruned(tmp_path, "out", *more, ranks=ranks)

    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        same = [(tmp_path / folder / name).read_bytes() for folder in ("model", "out")]
        assert same[0] == same[1], name
    assert {name: (tuple(one.shape), one.dtype) for name, one in found.items()} == {
        name: (shape, before.dtype(name)) for name, shape in before.shapes.items()
    }
    entries = zeros = 0
    for name, one in found.items():
        if re.search("vision|visual|projector", name):
            assert torch.equal(one, before.read(name)), name
        elif re.search(r"layers\.\d+\..*(proj|gate_up_proj|down_proj)(\.weight)?$", name):
            kept, was = one != 0, before.read(name)
            entries, zeros = entries + one.numel(), zeros + int((~kept).sum())
            assert was[kept].abs().min() >= was[~kept].abs().max() or one.dim() == 3, name
            assert heal != "none" or torch.equal(one[kept], was[kept]), name
    assert zeros / entries == pytest.approx(0.5, abs=0.01)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    written = open_weights(tmp_path / "out" / "model.safetensors").shapes
    model.save_pretrained(tmp_path / "again")
    again = open_weights(tmp_path / "again" / "model.safetensors")
    assert again.shapes == written
    assert all(torch.equal(again.read(name), one) for name, one in found.items())


@pytest.mark.exhaustive
def test_the_card_has_the_zeros_that_are_there_and_its_command_trains_them(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "model: {name: hf}\ndata: {source: tokens, path: none}\n"
        "pruning: {method: magnitude, sparsity: 0.5, heal: blocks, distribution: erk}\n"
    )
    erk = pruned(folder, "erk", "--config", "mine.yaml", "--sparsity", "0.5", *JUDGED, *ALL)
    assert any((value == 0).any() for value in erk.values())
    [command] = re.findall(
        r"^axsparse train .*$", (folder / "erk" / "README.md").read_text(), re.MULTILINE
    )
    for each in ("distribution=uniform", "heal=none", "include=all"):
        assert f"--set pruning.{each}" in command
    found = pruned(folder, "out", "--sparsity", "0.55", "--heal", "none", *JUDGED)

    matrices = [value for name, value in found.items() if "_proj" in name]
    zeros = sum(int((value == 0).sum()) for value in matrices)
    share = zeros / sum(value.numel() for value in matrices)
    said = (folder / "out" / "README.md").read_text()
    # Wanda removes whole entries of each row, which are 32 or 44 here.
    assert 0.52 < share < 0.549
    assert f"wanda to 55 %.\n{100 * share:.1f} % of the entries of the pruned matrices are" in said
    assert "| 4 validation samples | before | after |" in said
    [command] = re.findall(r"^axsparse train .*$", said, re.MULTILINE)
    few = ("precision=fp32", "batch.global_batch_size=4", "train.peak_flops=1e12", "train.steps=1")
    words = ["-m", *shlex.split(command), *(word for one in few for word in ("--set", one))]
    trained = run_alone(words, cwd=folder)
    assert trained.returncode == 0, trained
    assert f"of which {sum(v.numel() for v in matrices) - zeros:,} stay" in trained.stdout


@pytest.mark.parametrize(
    "asked",
    [
        ("pruning.pattern=2:4",),
        ("pruning.sparsity=0.6",),
        ("pruning.method=magnitude", "pruning.distribution=erk"),
    ],
)
def test_zeros_that_are_there_already_stay_and_need_not_be_as_many_as_asked(
    asked: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dead units of a model are pruned beside what is asked for."""
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    for name, value in tensors.items():
        if re.search("gate_proj|up_proj", name):
            value[: value.shape[0] * 3 // 4] = 0.0
    save_file(tensors, path)
    order = order_of(folder, *SETTINGS, "train.steps=2", "train.eval_steps=1", heal="train")
    rises = "sparsity" in asked[0]
    schedule: Schedule | None = "gradual" if rises else None
    order = replace(order, settings=(*order.settings, *asked), schedule=schedule)

    prune_folder.prune_folder(job_alone(), order)

    said = capsys.readouterr().out
    assert ("% is zero already, and masks do not rise" in said) == rises
    assert "rising" not in said.partition("# out")[2]
    file = open_weights(folder / "out" / "model.safetensors")
    pruned = [file.read(name) for name in file.shapes if "_proj" in name]
    zeros = sum(int((value == 0).sum()) for value in pruned) / sum(map(torch.numel, pruned))
    assert zeros > 0.57
    assert f"--set pruning.sparsity={zeros:.4f} " in said


@pytest.mark.exhaustive
def test_a_matrix_that_layers_adds_is_trained_with_its_zeros_and_written_without_checkpoints(
    folder: Path,
) -> None:
    more = ("--method", "magnitude", "--sparsity", "0.6", "--heal", "train", "--steps", "2")
    layers = ("--set", 'pruning.layers=["lm_head.weight=0.9"]')
    unsaved = ("--set", "checkpoint.every=0", "--set", "checkpoint.keep_every=3")
    found = pruned(folder, "out", *more, *layers, *unsaved, *JUDGED)

    zeros = {name: float((value == 0).float().mean()) for name, value in found.items()}
    assert zeros["lm_head.weight"] == pytest.approx(0.9, abs=0.02)
    assert zeros["model.layers.1.mlp.up_proj.weight"] == pytest.approx(0.6, abs=0.02)
    assert zeros["model.embed_tokens.weight"] == 0
    again = "--set pruning.include=all --set 'pruning.exclude=[\"model.embed_tokens.weight\"]'\n"
    assert again in (folder / "out" / "README.md").read_text()


def test_a_teacher_that_does_not_fit_is_rejected_before_layers_are_pruned(folder: Path) -> None:
    (folder / "words").mkdir()
    gpt2_folder(folder / "words", small_gpt().model_copy(update={"vocab_size": VOCABULARY + 1}))

    words = ["-m", "axsparse", "prune", *FEW, "--out", "out", "--steps", "2", "--teacher", "words"]
    done = run_alone(words, cwd=folder)

    assert done.returncode == EXIT_CONFIG
    assert f"'words' has a vocabulary of {VOCABULARY + 1}" in done.stderr
    assert not (folder / "out.run" / "layers").exists()


def test_a_training_that_does_not_fit_is_rejected_before_layers_are_pruned(folder: Path) -> None:
    words = ["-m", "axsparse", "prune", *FEW, "--out", "out", "--steps", "2"]
    done = run_alone([*words, "--set", "layout.memory_per_rank=0.1"], cwd=folder)

    assert done.returncode == EXIT_CONFIG
    assert "auto finds no number of stages of 1 rank that fits 100 MB a rank" in done.stderr
    assert not (folder / "out.run" / "layers").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("heal", ["none", "blocks", "train", "taught"])
def test_every_layout_writes_the_same_weights(heal: str, folder: Path) -> None:
    more = ["--heal", "train", "--teacher"] if heal == "taught" else ["--heal", heal]
    more += ["--steps", "2"] if heal in ("train", "taught") else []
    more += ["--set", "schedule.warmup_steps=1", "--set", "samo.gradient=exact"]
    more += ["--distribution", "owl"]
    more += ["--set", "batch.microbatch_size=2", "--set", "pruning.heal_batch=2", *JUDGED]

    alone = pruned(folder, "model #2", *more)
    staged = pruned(folder, "staged", *more, "--set", "layout.g_inter=2", ranks=2)
    replicas = pruned(folder, "replicas", *more, "--set", "layout.g_inter=1", ranks=2)
    # What has been done is found done: of the run, only the folder is written again.
    shutil.rmtree(folder / "staged")
    if heal == "train":
        shutil.rmtree(folder / "staged.run" / "pruned")
    if heal == "taught":  # As a start that was killed before its first saved step leaves it.
        shutil.rmtree(folder / "staged.run" / "run")
        shutil.rmtree(folder / "staged.run" / "layers")
    again = pruned(folder, "staged", *more, "--set", "layout.g_inter=1", ranks=2)

    assert heal != "taught" or not (folder / "staged.run" / "layers").exists(), "pruned once"
    for other in (staged, replicas, again):
        assert other.keys() == alone.keys()
        assert all(torch.equal(other[name], value) for name, value in alone.items())


RISING = (
    *("--sparsity", "0.8", "--schedule", "gradual", "--distribution", "owl"),
    *("--set", "train.steps=24", "--set", "checkpoint.every=3"),
    *("--set", "train.eval_steps=all", "--set", "train.log_every=1"),
)


def begun(cwd: Path, out: str, number: int, words: tuple[str, ...], step: int) -> Finished:
    """Start the command alone, and send it a signal once a step is saved."""
    command = [sys.executable, "-m", "axsparse", "prune", *FEW, "--out", out, *words]
    with (cwd / "said").open("w+") as said:
        process = subprocess.Popen(
            command, cwd=cwd, stdout=said, stderr=said, env={**os.environ, **ENVIRONMENT}
        )
        run = cwd / f"{out}.run" / "run"
        while not any(saved >= step for saved in steps_in(run)):
            assert process.poll() is None, (cwd / "said").read_text()
            time.sleep(0.01)
        process.send_signal(number)
        code = process.wait()
        return Finished(code, (cwd / "said").read_text(), "", 0.0)


@pytest.mark.exhaustive
def test_masks_rise_from_blocks_alike_on_two_ranks_and_after_stops(
    transformers: Any, folder: Path
) -> None:
    alone = pruned(folder, "alone", *RISING)
    stopped = begun(folder, "cut", signal.SIGINT, RISING, 3)
    later = max(steps_in(folder / "cut.run" / "run")) + 3
    killed = begun(folder, "cut", signal.SIGKILL, RISING, later)
    cut = pruned(folder, "cut", *RISING, "--set", "layout.g_inter=2", ranks=2)

    assert stopped.returncode == EXIT_SAVED and killed.returncode == -signal.SIGKILL
    assert re.search(
        r"^axsparse: stopped after step \d+, saved in cut\.run/run/checkpoints; the same command "
        "goes on$",
        stopped.stdout,
        re.MULTILINE,
    )
    assert re.search(
        "^axsparse: wanda to 50 %; sparsities by OWL; blocks are healed; 24 steps .*, rising to 80 "
        r"%, taught by model; about \d\d:\d\d on this machine$",
        stopped.stdout,
        re.MULTILINE,
    )
    assert "heal: " in stopped.stdout and "heal: " not in killed.stdout, "layers are done once"
    assert cut.keys() == alone.keys()
    assert all(torch.equal(cut[name], value) for name, value in alone.items())
    said = (folder / "alone" / "README.md").read_text()
    assert "80.0 % of the entries of the pruned matrices are zero" in said
    assert "rising to 80 %, taught by model.\n" in said
    sparsities = dict(
        entry.split("=")
        for entry in json.loads((folder / "alone.run" / "pruned.json").read_text())["layers"]
    )
    masks = open_masks(folder / "alone.run" / "run")
    first = open_weights(folder / "alone.run" / "pruned" / "model.safetensors")
    for name, kept in masks.kept.items():
        zeros = alone[name] == 0
        mask = masks.mask(name, tuple(zeros.shape), lambda: torch.empty(0))
        assert torch.equal(zeros, ~mask.view(zeros.shape)), name
        assert kept == zeros.numel() - round(float(sparsities.pop(name)) * zeros.numel())
        assert zeros[first.read(name) == 0].all(), "masks only shrink"
    assert not sparsities
    records = (folder / "cut.run" / "run" / "metrics.jsonl").read_text().splitlines()
    rises = [record for record in map(json.loads, records) if "masks" in record]
    assert [record["step"] for record in rises] == list(range(7, 19))
    assert all(record["loss_before"] != record["loss_after"] for record in rises[:6])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "alone")
    held_out = token_datasets(folder / "alone.run" / "tokens", 12)["validation"]
    (inputs,), targets = held_out.read(np.arange(len(held_out)))
    with torch.no_grad():
        logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    [printed] = re.findall(r"^\| perplexity \| .* \| .* \| (.*) \|$", said, re.MULTILINE)
    assert f"{loss.exp():.3f}" == printed


def test_the_work_is_held_while_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "model")
    monkeypatch.setattr(prune_folder, "_prepare", lambda again: again.take())

    job = job_alone()
    with pytest.raises(OutputError, match=r"out\.run: is in use by"):
        prune_folder.prune_folder(job, order_of(tmp_path))
    assert job.reworded(f"hangs; {RESUME_AUTO} goes on") == "hangs; the same command goes on"


def test_damaged_results_of_the_layers_are_to_be_removed(tmp_path: Path) -> None:
    order = order_of(tmp_path, heal="train")
    (order.work / PRUNED).mkdir(parents=True)
    (order.work / FACTS).write_text("{", encoding="utf-8")

    with pytest.raises(DataError, match=r"pruned\.json: cannot be read as JSON .*; remove it$"):
        prune_folder._trained(job_alone(), order, configure(None))


@pytest.mark.exhaustive
def test_output_that_cannot_be_written_ends_it_in_one_line_before_the_work(folder: Path) -> None:
    command = [sys.executable, "-m", "axsparse", "prune", *FEW, "--out", "out", "--heal", "none"]

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, check=False
        )

    assert done.returncode == 74, done.stderr
    assert done.stderr.startswith("axsparse: error: stdout: cannot be written (No space left on")
    assert done.stderr.count("\n") == 1
    assert not (folder / "out").exists()


def test_layers_and_tensors_that_are_done_are_progress_for_the_watchdog(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def counted(task: str, *_: object, **__: object) -> Iterator[Callable[[], None]]:
        noted: list[None] = []
        yield lambda: noted.append(None)
        beats.append((task, len(noted)))

    for module in (build, prune_folder):
        monkeypatch.setattr(module, "watched", counted)
    more = ("train.steps=1", "train.eval_steps=1")
    prune_folder.prune_folder(job_alone(), order_of(folder, *SETTINGS, *more, heal="train"))

    tensors = len(open_weights(folder / "out" / "model.safetensors").shapes)
    assert [task for task, _ in beats] == ["calibration", "writing", "writing"]
    layers, samples = 5, 8
    assert beats[0][1] >= layers * samples
    assert min(count for _, count in beats[1:]) >= tensors


HANGS = """
import sys, threading, time
from mpi4py import MPI
from axsparse.__main__ import main
from axsparse.cli import prune_folder
from axsparse.pruning.calibration import Calibration

def wait(of, *_, **__):
    if isinstance(of, Calibration):  # the others wait by then, and have been quiet for longer
        time.sleep(1)
        of.beats()
    threading.Event().wait()

name, rank, *words = sys.argv[1:]
if MPI.COMM_WORLD.rank == int(rank):
    setattr(prune_folder if name.startswith("export") else Calibration, name, wait)
main(words)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("where", "rank", "ranks", "more"),
    [
        *(("_pass", ranks - 1, ranks, ()) for ranks in (1, 2)),
        ("outlier_shares", 1, 2, ("--distribution", "owl")),
        *(("export_folder", 0, ranks, ()) for ranks in (1, 2)),
        ("export", 0, 2, ("--heal", "train", "--steps", "2")),
    ],
)
def test_what_hangs_ends_the_job_and_the_same_command_goes_on(
    where: str, rank: int, ranks: int, more: tuple[str, ...], folder: Path
) -> None:
    """A layer, or the disk of the folder that is written."""
    heal = () if "--heal" in more else ("--heal", "none")
    more = (*heal, *JUDGED, *more, "--set", f"layout.g_inter={ranks}")
    words = ["prune", *FEW, "--out", "out", *more, "--set", "watchdog.timeout=0.5"]

    job = run_mpirun(ranks, ["-c", HANGS, where, str(rank), *words], cwd=folder, timeout=200)

    said = job.error(70)
    what = "writing" if where.startswith("export") else "calibration"
    assert said.startswith(f"rank {rank} (stage {rank}, replica 0): hangs in {what}, no progress")
    assert "are in out.run/hang-report.txt; the same command goes on, and a larger watch" in said
    assert ", in wait\n" in (folder / "out.run" / "hang-report.txt").read_text()
    assert not (folder / "out").exists()
    pruned(folder, "out", *more, ranks=ranks)


def test_what_came_to_the_place_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*given: Any, **how: Any) -> int:
        export_folder(*given, **how)
        return export_folder(*given, **how)

    monkeypatch.setattr(prune_folder, "export_folder", twice)
    with pytest.raises(OutputError, match="is there already; move it away, and repeat the command"):
        prune_folder.prune_folder(job_alone(), order_of(folder, *SETTINGS))


def test_layers_that_do_not_run_are_refused_before_tokens_are_prepared(
    transformers: Any, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    kinds = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "vocab_size": 64}
    jetmoe = transformers.AutoConfig.for_model("jetmoe", intermediate_size=44, **sizes, **kinds)
    saved_model(transformers, jetmoe, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^layer model.layers.0: .*; choose another model$"):
        prune_folder.prune_folder(job_alone(), order_of(tmp_path, "precision=fp32"))


def test_weights_of_eight_bits_are_refused_before_anything_is_pruned(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)

    with pytest.raises(DataError, match=r"'lm_head.weight' is float8_e4m3fn, and a pruned folder"):
        prune_folder.prune_folder(job_alone(), order_of(folder, *SETTINGS))
    save_file({"norm": torch.ones(4).to(torch.float8_e4m3fn)}, path)  # which nothing multiplies
    start = FromFile(open_weights(path), {"norm": "norm"}, unchanged, "", {"norm": True})
    prune_folder._reject_eight_bits(start)


def test_the_card_says_how_it_was_pruned_and_the_losses() -> None:
    facts = Facts(before=2.0, after=2.5, held_out=7, entries=1000, kept=400, layers=(), pruned=2.2)

    said = card(order_of(Path(), heal="train"), configure(None), facts)

    assert "model, pruned by axsparse: magnitude to 90 %; 100 steps (" in said
    assert "\n60.0 % of the entries of the pruned matrices are zero.\n" in said
    assert "| 7 validation samples | before | before training | after |\n|---|" in said
    assert "| perplexity | 7.389 | 9.025 | 12.182 |\n" in said
    assert replace(facts, entries=100_000, kept=1).zeros == 0.9999, "1 is refused"


def test_errors_of_training_name_the_options_of_this_command(tmp_path: Path) -> None:
    other = "`axsparse data prepare --tokenizer t`"
    of_training = {
        f"--tokenizer: full; choose {ANOTHER_RUN_DIR}, {other}, or {RESUME_AUTO}": (
            f"--from: full; choose another --out, {other}, or the same command"
        ),
        "good up to step 3: go on from there by --resume run/checkpoints/step-3 (in Python resume=)"
        f" in {ANOTHER_RUN_DIR}": "good up to step 3: repeat the command with another --out",
        f"--tokenizer: m has none; {ANOTHER_TOKENIZER}": (
            "--from: m has none; put its tokenizer's files next to its weights"
        ),
        "data.sequence_length (tokens): 9, but …; bring more of both": (
            "data.sequence_length (tokens): 9, but …; bring more texts, more by --validation FILES,"
            " and choose another --out"
        ),
    }
    assert {line: reworded(line) for line in of_training} == of_training
    save_file({"w": torch.full((2, 2), torch.nan)}, tmp_path / "w.safetensors")
    file = open_weights(tmp_path / "w.safetensors")
    start = FromFile(file, {"a.w": "w"}, unchanged, "", {"a.w": True})
    with pytest.raises(DataError, match=r"has NaN or infinities; correct the file$"), own_options():
        start.read("a.w")
    changed = pytest.raises(OutputError, match=r"bring those back, or choose another --out$")
    for place in ("a", "b"):
        (tmp_path / "text.txt").write_text(place)
        request = Request((tmp_path / "text.txt",), tmp_path / "tokens")
        with contextlib.nullcontext() if place == "a" else changed, own_options():
            prepare(request, 1, Console(io.StringIO(), bar=False))
    begins = (
        r"^data\.sequence_length \(a{}\): 8, but there are 8 tokens; {}, and choose another --out$"
    )
    ways = {"": "bring more texts", " validation": "name more by --validation FILES"}
    for split, way in ways.items():
        with pytest.raises(DataError, match=begins.format(split, way)), own_options():
            TokenDataset(f"a{split}", "f", 256, np.zeros(8, np.uint8), 8)
