"""The choices of `axsparse prune`, and its lines about them before it begins."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from support.hf import write_llama

from axsparse.cli import prune
from axsparse.cli.parser import reject_early
from axsparse.cli.prune_defaults import (
    RECIPES,
    RULES,
    Work,
    chosen,
    plan_lines,
    rising,
    rule_of,
    training_settings,
)
from axsparse.cli.prune_order import PruneOrder
from axsparse.config.load import bundled_source, packaged_folder
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError


@pytest.fixture
def order(tmp_path: Path) -> PruneOrder:
    write_llama(tmp_path / "model")
    given = (tmp_path / "model", (tmp_path / "texts",), (), tmp_path / "out", "prune_llama.yaml")
    return PruneOrder(*given, (), None)


def with_settings(order: PruneOrder, *settings: str) -> PruneOrder:
    return replace(order, settings=settings)


@pytest.mark.parametrize(
    ("sparsity", "heal", "method", "passes", "distribution"),
    [
        (0.55, "blocks", "wanda", 1, "uniform"),
        (0.65, "train", "wanda", 2, "uniform"),
        (0.66, "train", "sparsegpt", 4, "owl"),
        (0.99, "train", "sparsegpt", 4, "owl"),
    ],
)
def test_the_sparsity_alone_decides(
    sparsity: float, heal: str, method: str, passes: int, distribution: str, order: PruneOrder
) -> None:
    found = chosen(with_settings(order, f"pruning.sparsity={sparsity}"))

    config = found.configured()
    assert (found.heal, found.schedule, config.pruning.method) == (heal, "once", method)
    assert (found.distribution, config.pruning.heal) == (distribution, "blocks")
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
    named = with_settings(order, *order.settings, "pruning.method=magnitude")
    assert chosen(named).configured().pruning.method == "magnitude"
    assert chosen(with_settings(order, "pruning.pattern=2:4")).heal == "blocks"
    bare = chosen(with_settings(replace(order, heal="train"), "pruning.heal=none"))
    assert bare.configured().pruning.heal == "none"
    own = tmp_path / "own.yaml"
    own.write_text("data: {source: tokens, path: x}\npruning: {method: random, sparsity: 0.7}\n")
    assert chosen(replace(order, config=str(own))).configured().pruning.method == "random"


def test_a_file_that_has_the_name_of_the_bundled_one_is_the_users_own(
    order: PruneOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, from its folder as well; without --config, it is not read."""
    text = (packaged_folder("configs") / "prune_llama.yaml").read_text()
    assert bundled_source() == "prune_llama.yaml"
    usual = chosen(order).configured()
    implied = order.implied(usual)
    monkeypatch.chdir(tmp_path)
    own = Path("prune_llama.yaml")
    own.write_text(text.replace("method: magnitude", "method: random"))
    for source in (own, own.absolute()):
        config = chosen(replace(order, config=str(source))).configured()
        assert config.pruning.method == "random"
        assert config.where("pruning.method").startswith(f"pruning.method ({source.parent}/prune_l")
        assert not replace(order, config=str(source), heal="train").implied(config)

    asked: list[str] = []
    monkeypatch.setattr(prune, "reject_early", lambda given, *_, **__: asked.append(given.config))
    monkeypatch.setattr("axsparse.runtime.job.run", lambda _: sys.exit(0))
    with pytest.raises(SystemExit):
        prune.main(["--from", "model", "--data", "texts", "--out", "out"])

    hidden = replace(order, config=asked[0])

    assert chosen(hidden).configured() == usual
    assert hidden.implied(usual) == implied


def test_the_early_checks_know_that_masks_are_drawn_at_once(
    order: PruneOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("pruning: {method: magnitude, at_step: 60}\n")
    monkeypatch.setattr("axsparse.runtime.job.run", lambda _: sys.exit(0))
    words = ["--from", str(order.source), "--data", "texts", "--out", "out"]

    with pytest.raises(SystemExit) as left:
        prune.main([*words, "--config", str(own), "--method", "wanda"])

    assert left.value.code == 0


def test_outliers_spread_what_inputs_decide_and_no_other_setting_spreads(order: PruneOrder) -> None:
    others = with_settings(order, "pruning.sparsity=0.9", "pruning.layers=[a=0.5]")
    order = with_settings(order, "pruning.sparsity=0.9")

    assert chosen(order).distribution == "owl"
    assert chosen(others).distribution == "uniform"
    unseen = with_settings(order, *order.settings, "pruning.method=magnitude")
    assert chosen(unseen).distribution == "uniform"
    assert chosen(replace(unseen, distribution="owl")).distribution == "owl"
    with pytest.raises(
        ConfigError, match=r"^--distribution: owl .*, and so does pruning\.layers; leave"
    ):
        chosen(replace(others, distribution="owl"))
    with pytest.raises(ConfigError, match=r"^model\.new .*: a pruned folder has all weights"):
        chosen(with_settings(order, 'model.new=["lm_head*"]'))


def test_a_training_is_as_long_as_its_texts_and_as_fast_as_its_width(order: PruneOrder) -> None:
    config = with_settings(order, "pruning.sparsity=0.7").configured()

    few = training_settings(config, 1024, 571_000)
    many = training_settings(config, 1024, 10**12)

    assert few == [
        *("batch.global_batch_size=8", "train.steps=279", "optimizer.learning_rate=0.001"),
        *("schedule.warmup_steps=13", "train.eval_every=69", "checkpoint.every=34"),
    ]
    assert many[:2] == ["batch.global_batch_size=128", "train.steps=511"]
    wide = config.with_values({"model.hf": {"text_config": {"hidden_size": 4096}}})
    denser = training_settings(wide.with_values({"pruning.sparsity": 0.6}), 1024, 10**6)
    assert "optimizer.learning_rate=4.9e-05" in denser
    taught = wide.with_values({"pruning.sparsity": 0.9, "train.teacher": "model"})
    found = {*training_settings(taught, 1024, 10**6)}
    assert {"optimizer.learning_rate=0.00014", "train.distillation_weight=0.5"} <= found
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
    order = with_settings(order, *settings, "data.sequence_length=1024")
    order = chosen(replace(order, schedule="gradual"))
    work = Work(layers=10, size=12.0, seconds=0.1, length=256, ranks=2)
    config = order.configured("pruning.heal_passes=2", "optimizer.learning_rate=3e-4")

    first, second = plan_lines(order, config, work)
    # 13 forwards of 0.1 s for 128 samples in 10 layers, 5 for 3,200 in 12 on two ranks.
    assert first == (
        "wanda to 50 %; sparsities by OWL; blocks are healed; 100 steps (819k tokens, learning "
        "rate 0.0003), rising to 80 %, taught by model; about 3:07:44 on this machine"
    )
    had = "SmolLM2 135M had {} times the perplexity of dense at {} % after {}".format
    risen = "blocks at 50 %, and 393,000 tokens with a teacher, 3.64 after blocks alone"
    assert second == had(41.7, 80, risen)
    once = replace(order, schedule="once")
    measured = {
        0.65: (1.61, 70, RECIPES["train"]),
        0.7: (1.29, 70, RECIPES["mixed"]),
        0.8: (1.67, 80, RECIPES["mixed"]),
        0.9: (2.89, 90, RECIPES["mixed"]),
    }
    for sparsity, figures in measured.items():
        _, second = plan_lines(once, order.configured(f"pruning.sparsity={sparsity}"), None)
        assert second == had(*figures)
    _, second = plan_lines(order, order.configured("pruning.sparsity=0.98"), None)
    assert second.startswith("not measured yet at 98 %; SmolLM2 135M had 1.24 at 50 %, 1.53 at 60")
    assert "taught" not in next(plan_lines(order, order.configured("train.teacher=null"), None))
    blocks = replace(once, heal="blocks")
    first, second = plan_lines(blocks, order.configured("pruning.sparsity=0.7"), None)
    assert first == "wanda to 70 %; sparsities by OWL; blocks are healed"
    assert second == had(2.07, 70, "blocks alone")
