"""Requests to `axsparse prune`: the choices that follow from them, and what is refused at once."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.hf import write_llama

from axsparse.cli.parser import reject_early
from axsparse.cli.prune_order import (
    ORDER,
    RULES,
    Heal,
    PruneOrder,
    Work,
    chosen,
    plan_lines,
    rising,
    rule_of,
    training_settings,
)
from axsparse.config.load import configure
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError, OutputError
from axsparse.runtime.files.run_folder import InUseError


def order_of(
    folder: Path, *settings: str, heal: Heal | None = "blocks", config: str = "prune_llama.yaml"
) -> PruneOrder:
    """An order for the folder `model` in a folder."""
    out = folder / "out"
    return PruneOrder(folder / "model", (Path("texts"),), (), out, config, settings, heal)


def settled(order: PruneOrder, *settings: str) -> None:
    order.work.mkdir(exist_ok=True)
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
    assert order.implied(config, 4) == [f"data.sequence_length={expected}"] * is_implied
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
    config = configure("quickstart.yaml", ["pruning.calibration_samples=9"])

    assert order_of(Path()).implied(config, 4)[0] == "train.eval_steps=3"


def test_one_process_at_a_time_has_the_work(tmp_path: Path) -> None:
    order = order_of(tmp_path)
    places = (".out", "out.run/.pruned", "out.run/.order.json", "out/.README.md")
    left = [tmp_path / f"{place}.unfinished-{number}" for place in places for number in range(2)]
    for folder in left:
        folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, tmp_path / "out" / "model.safetensors", {"files": "[]"})
    (tmp_path / "out.run" / "order.json").touch()
    other = tmp_path / ".outer.unfinished-1"
    other.mkdir()

    lock = order.take()

    assert not any(folder.exists() for folder in left), "what killed processes left is gone"
    assert other.exists()
    with pytest.raises(InUseError, match=r"out\.run: is in use by .*; .* choose another --out"):
        order.take()
    lock.release()
    order.take().release()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "out.run").touch()

    with pytest.raises(OutputError, match=r"^--out: the work in .*out\.run cannot be written"):
        order_of(tmp_path).take()


def test_a_folder_of_a_start_that_was_killed_before_its_page_is_written_again(
    tmp_path: Path,
) -> None:
    write_llama(tmp_path / "model")
    order = order_of(tmp_path)
    order.out.mkdir()
    save_file({"a": torch.ones(2)}, order.out / "model.safetensors", {"files": "[]"})
    with pytest.raises(ConfigError, match="is there already"):
        order.take()

    settled(order)

    order.take().release()
    for other in ("README.md", "mine.txt"):
        (order.out / other).touch()
        with pytest.raises(ConfigError, match="is there already"):
            order.take()
        (order.out / other).unlink()


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
    settled(order)  # Nothing was trained, so that this is what counts.
    (order.work / "run" / "checkpoints" / "step-3").mkdir(parents=True)

    settled(order, "layout.g_inter=1", "run_dir=x", "train.log_every=3")
    with pytest.raises(ConfigError) as rejected:
        settled(order, setting)
    with pytest.raises(ConfigError, match="--heal: 'none', but"):
        settled(replace(order, heal="none"))
    write_llama(tmp_path / "model", lambda _, tensor: tensor + 1)
    with pytest.raises(ConfigError, match=r"^weights of --from: .* but what is in"):
        settled(order)

    assert str(rejected.value).startswith(text)
    assert str(rejected.value).endswith(
        f"set it back, choose another --out, or remove {order.work}"
    )
    assert (order.work / ORDER).exists()


# -- defaults -------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path: Path) -> PruneOrder:
    write_llama(tmp_path / "model")
    return order_of(tmp_path, heal=None)


def with_settings(order: PruneOrder, *settings: str) -> PruneOrder:
    return replace(order, settings=settings)


@pytest.mark.parametrize(
    ("sparsity", "heal", "schedule", "method", "passes"),
    [
        (0.5, "blocks", "once", "wanda", 1),
        (0.55, "blocks", "once", "wanda", 1),
        (0.6, "train", "gradual", "wanda", 2),
        (0.8, "train", "gradual", "wanda", 4),
        (0.99, "train", "gradual", "wanda", 4),
    ],
)
def test_the_sparsity_alone_decides(
    sparsity: float, heal: str, schedule: str, method: str, passes: int, order: PruneOrder
) -> None:
    found = chosen(with_settings(order, f"pruning.sparsity={sparsity}"))

    config = found.configured()
    assert (found.heal, found.schedule, config.pruning.method) == (heal, schedule, method)
    assert config.pruning.heal == "blocks"
    assert config.train.teacher == (None if heal == "blocks" else str(order.source))
    assert rule_of(sparsity).passes == passes
    assert [rule.up_to for rule in RULES] == sorted(rule.up_to for rule in RULES)


def test_what_is_said_wins(order: PruneOrder, tmp_path: Path) -> None:
    untaught = with_settings(order, "pruning.sparsity=0.7", "train.teacher=null")
    assert chosen(untaught).configured().train.teacher is None
    assert chosen(with_settings(order, "train.steps=3")).heal == "train", "steps train"
    order = with_settings(order, "pruning.sparsity=0.7")
    assert chosen(replace(order, heal="train")).configured().train.teacher is None

    blocks = chosen(replace(order, heal="blocks"))
    assert blocks.configured().pruning.method == "sparsegpt", "blocks heal it better at 70 %"
    assert blocks.schedule == "once"
    once = chosen(replace(order, heal="train", schedule="once", method="magnitude"))
    assert (once.schedule, once.configured().pruning.method) == ("once", "magnitude")
    assert chosen(with_settings(order, "pruning.pattern=2:4")).heal == "blocks"
    bare = chosen(with_settings(replace(order, heal="train"), "pruning.heal=none"))
    assert bare.configured().pruning.heal == "none"
    own = tmp_path / "own.yaml"
    own.write_text("data: {source: tokens, path: x}\npruning: {method: random, sparsity: 0.7}\n")
    assert chosen(replace(order, config=str(own))).configured().pruning.method == "random"


@pytest.mark.parametrize(
    ("heal", "settings"),
    [
        ("blocks", ("pruning.sparsity=0.8",)),
        ("train", ("pruning.sparsity=0.5",)),
        ("train", ("pruning.pattern=1:4",)),
    ],
)
def test_a_mask_that_cannot_rise_is_refused(
    heal: Heal, settings: tuple[str, ...], order: PruneOrder
) -> None:
    order = replace(with_settings(order, *settings), heal=heal, schedule="gradual")

    with pytest.raises(ConfigError, match=r"^--schedule: gradual rises from 0\.5 while the"):
        chosen(order)


@pytest.mark.parametrize(
    "setting",
    ["pruning.distribution=global", "layout.g_tensor=2", "pruning.mask=x", "pruning.method=snip"],
)
def test_masks_that_need_the_full_model_are_refused(setting: str, order: PruneOrder) -> None:
    with pytest.raises(ConfigError) as rejected:
        chosen(with_settings(order, "pruning.sparsity=0.5", setting))

    assert str(rejected.value) == (
        "prune: each layer is pruned by itself, by magnitude, random, wanda, sparsegpt; leave "
        "pruning.distribution, pruning.mask and layout.g_tensor out, or prune by axsparse train "
        "with model.from, and export"
    )


def test_a_training_is_as_long_as_its_texts_and_as_fast_as_its_width(order: PruneOrder) -> None:
    config = with_settings(order, "pruning.sparsity=0.8").configured()

    few = list(training_settings(config, 1024, 571_000))
    many = list(training_settings(config, 1024, 10**12))

    assert few == [
        *("batch.global_batch_size=8", "train.steps=279", "optimizer.learning_rate=0.001"),
        *("schedule.warmup_steps=13", "train.eval_every=69", "checkpoint.every=34"),
    ]
    assert many[:2] == ["batch.global_batch_size=128", "train.steps=511"]
    wide = config.model.model_copy(update={"hf": {"text_config": {"hidden_size": 4096}}})
    wide_settings = training_settings(config.model_copy(update={"model": wide}), 1024, 10**6)
    assert "optimizer.learning_rate=4.9e-05" in wide_settings
    given = with_settings(order, "train.steps=7", "batch.global_batch_size=2").configured()
    assert not [s for s in training_settings(given, 64, 9) if s.startswith(("batch", "train.st"))]


def test_masks_rise_between_a_quarter_and_three_quarters_of_the_steps(order: PruneOrder) -> None:
    config = with_settings(order, "pruning.sparsity=0.8", "train.steps=400").configured()

    assert rising(config) == [
        *("pruning.method=gradual", "pruning.at_step=100", "pruning.until_step=300"),
        *("pruning.interval=12", "pruning.eval_steps=1"),
    ]
    given = ("pruning.interval=3", "pruning.until_step=399", "pruning.eval_steps=0")
    own = with_settings(order, "train.steps=400", *given).configured()
    assert rising(own) == ["pruning.method=gradual", "pruning.at_step=100"]
    with pytest.raises(ConfigError, match=r"^train\.steps: 1, in which no mask can rise; cho"):
        rising(with_settings(order, "train.steps=1").configured())


@pytest.mark.parametrize("setting", ["pruning.heal_batch=2", "pruning.interval=3"])
def test_a_setting_need_not_have_an_effect_in_each_run_of_the_command(
    setting: str, order: PruneOrder
) -> None:
    arguments, settings = Namespace(config=order.config), [f"model.from={order.source}", setting]

    reject_early(arguments, settings, is_part=True)
    check_config(with_settings(order, *settings).configured("pruning.heal=none"))

    with pytest.raises(SystemExit):
        reject_early(arguments, settings)


def test_it_says_what_it_does_how_long_and_how_good_it_was_elsewhere(order: PruneOrder) -> None:
    settings = ("pruning.sparsity=0.8", "train.steps=100", "batch.global_batch_size=8")
    order = chosen(with_settings(order, *settings, "data.sequence_length=1024"))
    work = Work(
        block_flops=1e9,
        blocks=10,
        model_flops=12e9,
        length=256,
        block_seconds=0.3,
        ranks=2,
    )
    config = order.configured("pruning.heal_passes=2", "optimizer.learning_rate=3e-4")

    first, second = plan_lines(order, config, work)
    # 13 forwards of 0.1 s for 128 samples in 10 layers, 5 for 3,200 in 12 on two ranks.
    assert first == (
        "wanda to 50 %; blocks are healed; 100 steps (819k tokens, learning rate 0.0003), rising "
        "to 80 %, taught by the dense model; about 3:07:44 on this machine"
    )
    assert second.startswith("not measured yet at 80 %; SmolLM2 135M had 1.24 at 50 %, 1.53 at 60")
    assert "taught" not in next(plan_lines(order, order.configured("train.teacher=null"), None))
    blocks = replace(order, heal="blocks", schedule="once")
    first, second = plan_lines(blocks, order.configured("pruning.sparsity=0.7"), None)
    assert first == "wanda to 70 %; blocks are healed"
    assert second == "SmolLM2 135M had 2.07 times the perplexity of dense after this at 70 %"
