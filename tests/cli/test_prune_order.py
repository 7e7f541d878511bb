"""Requests to `axsparse prune`, and its refusals before any work is done."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.hf import write_llama

from axsparse.cli.prune_order import FACTS, ORDER, Heal, PruneOrder
from axsparse.config.load import configure
from axsparse.data.preparation import Request, prepare
from axsparse.runtime.console import Console
from axsparse.runtime.errors import ConfigError, InUseError


def order_of(
    folder: Path, *settings: str, heal: Heal = "blocks", config: str = "prune_llama.yaml"
) -> PruneOrder:
    """An order for the folder `model` in a folder."""
    out = folder / "out"
    return PruneOrder(folder / "model", (Path("texts"),), (), out, config, settings, heal)


def settled(order: PruneOrder, *settings: str, text: str = "words " * 50) -> None:
    order.take().release()
    shutil.rmtree(order.work / "tokens", ignore_errors=True)
    (order.work / "text.txt").write_text(text)
    request = Request((order.work / "text.txt",), order.work / "tokens")
    prepare(request, 1, Console(io.StringIO(), bar=False))
    order.adopt(configure("quickstart.yaml", ["pruning.sparsity=0.5", *settings]))


@pytest.mark.parametrize(
    ("heal", "longest", "given", "expected"),
    [
        ("blocks", 4096, "auto", 256),
        ("none", 64, "auto", 64),
        ("blocks", 4096, "1024", 1024),
        ("train", 600, "auto", 600),
        ("train", 4096, "auto", 1024),
        ("train", 4096, "2048", 2048),
    ],
)
def test_samples_are_shorter_than_the_longest_unless_it_is_said(
    heal: Heal, longest: int, given: str, expected: int
) -> None:
    settings = [f"model.sequence_length={longest}", f"data.sequence_length={given}"]
    config = configure("quickstart.yaml", settings)
    order = order_of(Path(), heal=heal, config="own.yaml")

    assert order.length(config) == expected
    # A training and the layers before it have samples of different lengths.
    is_implied = given == "auto" and heal != "train"
    assert order.implied(config) == [f"data.sequence_length={expected}"] * is_implied
    short = min(longest, 256) if given == "auto" else None
    assert order.of_layers(config) == [f"data.sequence_length={n}" for n in (short,) if n]


def test_layers_are_pruned_half_before_masks_rise_and_named_ones_by_the_same_share() -> None:
    settings = ["pruning.sparsity=0.8", "data.sequence_length=64", 'pruning.layers=["*.fc1*=0.4"]']
    config = configure("quickstart.yaml", settings)
    order = order_of(Path(), heal="train")

    assert order.of_layers(config) == []
    assert replace(order, schedule="gradual").of_layers(config) == [
        "pruning.sparsity=0.5",
        'pruning.layers=["*.fc1*=0.2500"]',
    ]


def test_as_many_are_judged_as_calibrate_unless_a_configuration_says_it() -> None:
    settings = ["pruning.calibration_samples=9", "batch.global_batch_size=4"]
    config = configure("quickstart.yaml", settings)

    assert order_of(Path()).implied(config)[0] == "train.eval_steps=3"


def test_one_process_at_a_time_has_the_work(tmp_path: Path) -> None:
    order = order_of(tmp_path)
    order.take().release()
    places = (".out", "out.run/.pruned", "out.run/.order.json")
    left = [tmp_path / f"{place}.unfinished-{number}" for place in places for number in range(2)]
    for folder in left:
        folder.mkdir(parents=True)
    other = tmp_path / ".outer.unfinished-1"
    other.mkdir()

    lock = order.take()

    assert not any(folder.exists() for folder in left), "what killed processes left is gone"
    assert other.exists()
    with pytest.raises(InUseError, match=r"out\.run: is in use by .*; .* choose another --out"):
        order.take()
    lock.release()
    order.take().release()


def test_only_what_is_new_or_bears_the_mark_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(tmp_path)
    order.take().release()
    order.take().release()
    order.out.mkdir()
    (order.out / "mine.txt").touch()
    with pytest.raises(ConfigError, match="is there already"):
        order.take()
    shutil.rmtree(order.out)
    order.out.symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="is there already"):
        order.take()
    (tmp_path / "disk").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        order.take()
    with pytest.raises(ConfigError, match="is the data itself; choose another place"):
        replace(order, data=(tmp_path / "disk",)).take()
    monkeypatch.chdir(tmp_path / "disk")
    with pytest.raises(ConfigError, match=r"^--out: \. is no place for a new folder"):
        replace(order, out=Path()).take()

    other = replace(order, out=tmp_path / "other")
    for name in ("pruned.json", ORDER):  # A copy without the mark, and another program's file.
        other.work.mkdir(exist_ok=True)
        (other.work / name).write_text('{"customer": 42}')
        before = {path: path.read_bytes() for path in other.work.iterdir()}
        with pytest.raises(ConfigError, match=r"has (order|pruned)\.json, and no"):
            other.take()
        assert {path: path.read_bytes() for path in other.work.iterdir()} == before


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("pruning.calibration_samples=9", "pruning.calibration_samples: 9, but what is in"),
        ("data.sequence_length=9", "data.sequence_length: 9, but"),
        ("train.steps=9", "train.steps: 9, but"),
        ("precision=fp32", "precision: 'fp32', but"),
    ],
)
def test_work_of_another_order_is_refused(setting: str, text: str, tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    order = order_of(tmp_path, heal="train")
    settled(order, setting)
    (order.work / FACTS).touch()
    settled(order, setting)
    assert (order.work / FACTS).exists(), "a folder by the same settings and tokens is kept"
    (order.work / ORDER).write_text('{"axsparse prune": 1, "damaged')
    settled(order)  # Nothing was trained, so that this is what counts.
    assert not (order.work / FACTS).exists(), "the folder is of other settings"
    (order.work / FACTS).touch()
    settled(order, text="letters " * 50)
    assert not (order.work / FACTS).exists(), "the folder is of other tokens"
    settled(order)
    (order.work / "run" / "checkpoints" / "step-3").mkdir(parents=True)

    settled(order, "layout.g_inter=1", "run_dir=x", "train.log_every=3")
    with pytest.raises(ConfigError) as rejected:
        settled(order, setting)
    with pytest.raises(ConfigError, match=r"^train.steps: 9, but"):
        settled(order, "train.steps=9", "schedule.warmup_steps=3")  # which follows from the steps
    with pytest.raises(ConfigError, match="--heal: 'none', but"):
        settled(replace(order, heal="none"))
    with pytest.raises(ConfigError, match=r"^pruning.sparsity: 0\.9, but"):
        settled(replace(order, distribution="owl"), "pruning.sparsity=0.9")  # which chooses it
    with pytest.raises(ConfigError, match=r"^train tokens: '.*', but what is in"):
        settled(order, text="letters " * 50)
    write_llama(tmp_path / "model", lambda _, tensor: tensor + 1)
    with pytest.raises(ConfigError, match=r"^weights of --from: .* but what is in"):
        settled(order)

    assert str(rejected.value).startswith(text)
    assert str(rejected.value).endswith(
        f"set it back, choose another --out, or remove {order.work}"
    )
    assert (order.work / ORDER).exists()
