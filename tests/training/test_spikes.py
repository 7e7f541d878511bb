"""Losses that jump: what counts as a spike, and a run that skips it or goes back before it."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.resuming import Ran, note_state, same_state
from support.runs import mlp, tiny_config, vector_data
from torch import Tensor

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config, SpikesConfig
from axsparse.config.validate import check_config
from axsparse.data import batches
from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.data.order import samples_of_step
from axsparse.data_parallel.agreement import Verdict
from axsparse.models.layer import Model
from axsparse.runtime.errors import ConfigError, MissingInputError, StoppedError, TrainingError
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.build import build
from axsparse.training.checkpoint.checkpoint_folder import saved_steps
from axsparse.training.checkpoint.manifest import Progress, SpikeHistory, read_manifest
from axsparse.training.run_training import run_training
from axsparse.training.spikes import RewindOrder, Spike, SpikeRule
from axsparse.training.trainer import Trainer

# -- the rule -------------------------------------------------------------------------------


def rule(history: Sequence[float] = (), **changes: Any) -> SpikeRule:
    """A rule that skips, with a window of four, after some good losses."""
    made = SpikeRule(SpikesConfig(**{"rule": "skip", "window": 4, **changes}))
    for loss in history:
        assert made.judge(1, loss) is None
    return made


def progress(step: int, **spikes: Any) -> Progress:
    return Progress(
        step=step,
        updates=step,
        schedule_start=0,
        masks_changed=None,
        evaluated=False,
        masked=True,
        loss_scale=1.0,
        good_steps=0,
        skipped_at_floor=0,
        spikes=SpikeHistory(**spikes),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    level=st.floats(-5, 12), ratio=st.floats(1.01, 50), beyond=st.sampled_from([-0.01, 0.01, 3.0])
)
def test_a_spike_is_a_perplexity_so_many_times_the_usual_one(
    level: float, ratio: float, beyond: float
) -> None:
    judge = rule([level] * 4, ratio=ratio).judge

    spike = judge(7, level + math.log(ratio) + beyond)

    assert (spike is not None) == (beyond > 0)


def test_the_usual_loss_is_the_median_of_the_last_good_steps() -> None:
    watching = rule([9.0, 9.0, 3.0, 1.0, 2.5, 1.5])

    assert watching.judge(7, 3.0) == Spike(7, 3.0, 2.0)


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    watching = rule([1.0, 1.0, 1.0])

    assert watching.judge(4, 100.0) is None
    assert watching.judge(5, 100.0) is not None


def test_a_spike_does_not_become_usual() -> None:
    watching = rule([1.0] * 4)

    assert all(watching.judge(step, 5.0) is not None for step in range(20))
    assert watching.in_a_row == 20
    assert watching.judge(21, 1.0) is None
    assert watching.in_a_row == 0


def test_without_a_rule_nothing_is_a_spike() -> None:
    assert rule([1.0] * 4, rule="none").judge(5, 100.0) is None


def test_what_was_usual_is_forgotten_with_the_masks() -> None:
    watching = rule([1.0] * 4)
    watching.forget()

    assert [watching.judge(step, 5.0) for step in range(4)] == [None] * 4


def test_a_rule_goes_on_from_its_history() -> None:
    first = rule([1.0, 2.0, 4.0, 3.0], rule="back")
    first.saved(8)
    second = rule(rule="back")

    second.restore(progress(9, **first.history().model_dump()))

    spike = Spike(10, 9.0, 2.5)
    assert second.judge(10, 9.0) == spike
    assert second.back(spike, batch=12) == RewindOrder(spike, base=8, first_batch=13, times=1)


def test_a_checkpoint_of_a_run_without_the_rule_is_one_to_go_back_to() -> None:
    before = rule(rule="none")
    before.saved(4)
    after = rule(rule="back")

    after.restore(progress(6, **before.history().model_dump()))

    found = after.back(Spike(7, 9.0, 1.0), batch=6)
    assert found is not None and found.base == 6


# -- runs -----------------------------------------------------------------------------------

STEPS, EVERY, SPIKE = 14, 4, 6
"""Steps of a run and between its checkpoints, and the batch that spikes."""
HEAVY = 100
"""Added to the class of a sample, which then counts 51 times."""
SAMPLES, BATCH = 300, 12


def weighted_loss(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets % HEAVY, reduction="none")
    return (losses * (1 + 50 * (targets // HEAVY))).sum()


def model() -> Model:
    layers = mlp()
    return Model(layers.layers, loss=weighted_loss, name="mlp")


def data(*spikes: int) -> ArrayDataset:
    """Points and classes, with a sample in each of these batches that makes the loss jump."""
    (inputs,), targets = vector_data(SAMPLES).read(np.arange(SAMPLES))
    assert targets is not None
    targets = targets.clone()
    for batch in spikes:
        targets[int(samples_of_step(SAMPLES, BATCH, batch, 11)[0])] += HEAVY
    return ArrayDataset(inputs, targets)


def config_of(rule: str = "back", **sections: Any) -> Config:
    return tiny_config(
        spikes={"rule": rule, "window": 3, **sections.pop("spikes", {})},
        **{
            "train": {"steps": STEPS, "log_every": 1},
            "checkpoint": {"every": EVERY, "keep_last": 1},
            **sections,
        },
    )


def run_here(
    config: Config,
    run_dir: Path,
    *spikes: int,
    layout: tuple[int, int] = (1, 1),
    resume: str | None = None,
    stop_after: int | None = None,
    dies_after: int | None = None,
    look: Callable[[int], None] = lambda step: None,
) -> Ran:
    """`run_training` in this process; a signal comes in the first step that ends at `stop_after`,
    or all ranks break off after the first that ends at `dies_after`."""
    world: LocalWorld[None] = LocalWorld(layout[0] * layout[1])
    config = config.model_copy(
        update={
            "run_dir": str(run_dir),
            "layout": config.layout.model_copy(update={"g_inter": layout[0]}),
        }
    )
    found = Ran()
    trainers: dict[int, Trainer] = {}

    def noted(job: Job, *arguments: Any, **settings: Any) -> Trainer:
        trainer = trainers[job.transport.rank] = build(job, *arguments, **settings)
        return trainer

    def body(rank: int) -> None:
        job = Job(LocalTransport(world, rank))
        if stop_after == 1 and rank == world.size - 1:
            job.stop.hear(signal.SIGUSR1)

        def note(step: int, verdict: Verdict) -> None:
            found.losses[step] = verdict.loss
            if rank == 0:
                look(step)
            if step == dies_after:
                raise InterruptedError
            if stop_after is not None and step == stop_after - 1 and rank == world.size - 1:
                job.stop.hear(signal.SIGUSR1)
            if step == config.train.steps and trainers[rank].rewind_order is None:
                note_state(found, trainers[rank])

        try:
            run_training(
                job,
                model(),
                lambda: Datasets(data(*spikes), None),
                LoadedConfig(config, "tiny", {}),
                resume=resume,
                on_step=note,
            )
        except StoppedError as stopped:
            found.stopped = str(stopped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axsparse.training.run_training.build", noted)
        world.run(body)
    return found


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in records_of(run) if "loss" in record]


def test_a_spike_is_skipped_by_all_ranks_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = run_here(config_of("none"), tmp_path / "blind", SPIKE)

    ours = run_here(config_of("skip"), tmp_path / "run", SPIKE, layout=(2, 2))

    steps = steps_of(tmp_path / "run")
    bad = SPIKE + 1
    assert [record["step"] for record in steps if record["skipped"]] == [bad]
    assert [record["skipped_steps"] for record in steps] == [0] * SPIKE + [1] * (STEPS - SPIKE)
    assert steps[SPIKE]["skip_reason"].startswith(f"spike: the loss is {ours.losses[bad]:.4g}, the")
    assert ours.losses[bad] == pytest.approx(blind.losses[bad], rel=1e-5)
    assert ours.losses[bad + 1] != pytest.approx(blind.losses[bad + 1], rel=1e-5)
    assert ours.progress is not None
    assert (ours.progress.spiked, ours.progress.updates) == (1, STEPS - 1)
    assert ours.progress.good_steps == STEPS - 1
    shown = capsys.readouterr().out.splitlines()
    assert any(f"step {bad}: spike: the loss is" in line for line in shown)
    assert shown[-2] == f"of {STEPS} steps: 1 skipped for a spike of the loss"
    assert shown[-1].startswith("saved in ")


def test_a_run_that_goes_back_is_one_that_never_saw_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run_here(config_of(), tmp_path / "run", SPIKE)
    told = capsys.readouterr().out.splitlines()

    jumped = SPIKE + 1 - EVERY
    order = samples_of_step

    def without(num_samples: int, size: int, step: int, seed: int) -> Any:
        return order(num_samples, size, step + (jumped if step >= EVERY else 0), seed)

    monkeypatch.setattr(batches, "samples_of_step", without)
    reference = run_here(config_of("none"), tmp_path / "reference", SPIKE)
    assert ours.losses == reference.losses
    same_state(ours, reference)
    steps = steps_of(tmp_path / "run")
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert not any(record["skipped"] for record in steps)
    [event] = [record for record in records_of(tmp_path / "run") if "spike_loss" in record]
    assert (event["step"], event["spike_step"], event["jumped"]) == (EVERY, SPIKE + 1, jumped)
    assert event["spike_loss"] > event["usual_loss"] + math.log(2)
    data_entry = read_manifest(tmp_path / "run" / "checkpoints" / f"step-{STEPS}").data
    assert data_entry.position == (STEPS + jumped) * BATCH
    assert any(f"goes back to step {EVERY} and jumps over the data since" in line for line in told)
    sums = [line for line in told if line.startswith("of ")]
    assert sums == [f"of {STEPS} steps: batches jumped over: {jumped}"]


@pytest.mark.parametrize(
    ("rule", "layout", "stops"),
    [
        pytest.param("skip", (1, 1), [SPIKE, SPIKE + 1], marks=pytest.mark.exhaustive),
        ("skip", (2, 2), [SPIKE]),
        ("back", (1, 1), [2, 4, 5, SPIKE, SPIKE + 1, 9]),
        pytest.param("back", (2, 1), [5], marks=pytest.mark.exhaustive),
        ("back", (2, 2), [SPIKE]),
    ],
    ids=str,
)
def test_stopped_and_resumed_it_is_the_uninterrupted_run(
    tmp_path: Path, rule: str, layout: tuple[int, int], stops: Sequence[int]
) -> None:
    config = config_of(rule)
    whole = run_here(config, tmp_path / "whole", SPIKE, layout=layout)

    for stop in stops:
        run = tmp_path / f"stop-{stop}"
        first = run_here(config, run, SPIKE, layout=layout, stop_after=stop)
        second = run_here(config, run, SPIKE, layout=layout, resume="auto")

        assert first.stopped is not None
        assert {**first.losses, **second.losses} == whole.losses
        assert second.progress == whole.progress
        same_state(second, whole)
        for name in ("loss", "skip_reason", "skipped_steps"):
            expected = [record[name] for record in steps_of(tmp_path / "whole")]
            assert [record[name] for record in steps_of(run)] == expected


@pytest.mark.parametrize("dies_after", [5, SPIKE + 1, 10])
def test_a_run_that_was_killed_goes_back_once_more(tmp_path: Path, dies_after: int) -> None:
    whole = run_here(config_of(), tmp_path / "whole", SPIKE)
    with pytest.raises(InterruptedError):
        run_here(config_of(), tmp_path / "run", SPIKE, dies_after=dies_after)

    second = run_here(config_of(), tmp_path / "run", SPIKE, resume="auto")

    same_state(second, whole)
    assert second.progress == whole.progress
    events = [
        [record for record in records_of(run) if "spike_loss" in record]
        for run in (tmp_path / "run", tmp_path / "whole")
    ]
    assert events[0] == events[1]


def test_two_spikes_after_one_checkpoint_leave_two_records(tmp_path: Path) -> None:
    ours = run_here(config_of(), tmp_path, SPIKE, SPIKE + 2)

    events = [record for record in records_of(tmp_path) if "spike_loss" in record]
    assert [(event["step"], event["jumped"]) for event in events] == [(EVERY, 3), (EVERY, 5)]
    assert ours.progress is not None and ours.progress.jumped == 5


def test_a_search_for_masks_goes_back_with_the_run(tmp_path: Path) -> None:
    search = {"method": "early-bird", "interval": 2, "until_step": 12, "undrawn": "draw"}

    ours = run_here(config_of(pruning=search), tmp_path, SPIKE)

    assert ours.progress is not None and ours.progress.jumped == 3
    assert ours.progress.masks_changed == 12


def test_what_was_saved_on_the_way_to_a_spike_is_left_behind(tmp_path: Path) -> None:
    run_here(config_of(), tmp_path, SPIKE, stop_after=SPIKE)
    assert saved_steps(tmp_path / "checkpoints") == [SPIKE, EVERY]
    seen: dict[int, list[int]] = {}

    def look(step: int) -> None:
        seen[step] = saved_steps(tmp_path / "checkpoints")

    run_here(config_of(), tmp_path, SPIKE, resume="auto", look=look)

    assert seen[EVERY + 1] == [EVERY]


@pytest.mark.parametrize("rule", ["skip", "back"])
def test_other_checkpoints_are_told_of_where_the_run_goes_back_to_them(
    rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(config_of(rule), tmp_path, stop_after=2)

    run_here(config_of(rule, checkpoint={"every": 3}), tmp_path, resume="auto", stop_after=4)

    told = "axsparse: checkpoint.every is now 3, before it was 4" in capsys.readouterr().out
    assert told == (rule == "back")


def test_before_the_first_checkpoint_a_spike_is_skipped(tmp_path: Path) -> None:
    config = config_of(checkpoint={"every": 10})

    ours = run_here(config, tmp_path, SPIKE)

    assert ours.progress is not None and (ours.progress.spiked, ours.progress.jumped) == (1, 0)
    reason = steps_of(tmp_path)[SPIKE]["skip_reason"]
    assert reason.endswith("; there is no checkpoint to go back to yet")


def test_another_run_does_not_go_back_to_the_one_it_came_from(tmp_path: Path) -> None:
    run_here(config_of(), tmp_path / "one", SPIKE, stop_after=EVERY)

    there = str(tmp_path / "one" / "checkpoints" / f"step-{EVERY}")
    ours = run_here(config_of(), tmp_path / "two", SPIKE, resume=there)

    assert ours.progress is not None and (ours.progress.spiked, ours.progress.jumped) == (1, 0)


def test_the_usual_loss_begins_anew_with_new_masks(tmp_path: Path) -> None:
    pruned = {"method": "magnitude", "at_step": SPIKE}

    run_here(
        config_of("skip", pruning=pruned, checkpoint={"every": SPIKE + 1, "keep_last": 3}), tmp_path
    )

    saved = read_manifest(tmp_path / "checkpoints" / f"step-{SPIKE + 1}").progress
    assert saved.masks_changed == SPIKE
    assert saved.spikes.losses == (steps_of(tmp_path)[SPIKE]["loss"],)


# -- where it ends --------------------------------------------------------------------------


def test_spikes_that_do_not_end_end_the_run(tmp_path: Path) -> None:
    config = config_of("skip", spikes={"patience": 3})

    with pytest.raises(
        TrainingError,
        match=rf"^step {SPIKE + 3}: spike: the loss is .*, the usual one .*, and 3 steps in a row "
        r"were skipped for that \(spikes.patience\); lower optimizer.learning_rate, or look at",
    ):
        run_here(config, tmp_path, *range(SPIKE, 20), layout=(2, 1))


def test_a_run_that_goes_back_in_vain_ends(tmp_path: Path) -> None:
    config = config_of(spikes={"patience": 2})

    with pytest.raises(
        TrainingError,
        match=rf"^step {EVERY + 1}: spike: .*, and the run went back to step {EVERY} 2 times and "
        r"spiked again before its next checkpoint \(spikes.patience\)",
    ):
        run_here(config, tmp_path, *range(SPIKE, 20))


def test_going_back_needs_checkpoints() -> None:
    config = config_of(checkpoint={"every": 0})

    with pytest.raises(
        ConfigError, match=r"spikes.rule .*back goes back to the last checkpoint, and checkpoint.ev"
    ):
        check_config(LoadedConfig(config, "tiny", {}))


def test_a_quiet_run_has_nothing_to_go_back_to() -> None:
    world: LocalWorld[Trainer] = LocalWorld(1)

    with pytest.raises(
        ConfigError, match=r"spikes.rule .*back goes back to a checkpoint, and quie"
    ):
        world.run(
            lambda rank: build(
                Job(LocalTransport(world, rank)),
                model(),
                lambda: Datasets(data(), None),
                config_of(),
                quiet=True,
            )
        )


def test_a_checkpoint_that_somebody_took_away_is_missed(tmp_path: Path) -> None:
    run_here(config_of(), tmp_path, stop_after=SPIKE)
    shutil.rmtree(tmp_path / "checkpoints" / f"step-{EVERY}")
    world: LocalWorld[Trainer] = LocalWorld(1)
    order = RewindOrder(Spike(SPIKE + 1, 9.0, 1.0), base=EVERY, first_batch=SPIKE + 1, times=1)

    with pytest.raises(
        MissingInputError, match=rf"its checkpoint step-{EVERY}, to go back to after a spike of th"
    ):
        world.run(
            lambda rank: build(
                Job(LocalTransport(world, rank)),
                model(),
                lambda: Datasets(data(), None),
                config_of(),
                resume=str(tmp_path),
                order=order,
            )
        )

    assert saved_steps(tmp_path / "checkpoints") == [SPIKE]
