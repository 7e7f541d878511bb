"""The figures of all ranks arrive in metrics.jsonl and on rank 0's screen."""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import on_ranks
from torch import Tensor

from axsparse.observe.metrics import MetricsFile
from axsparse.observe.phases import PHASES
from axsparse.observe.recorder import Recorder, RunFigures, StepFigures
from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.runtime.communication import Op, Transport, Work
from axsparse.runtime.console import Console, Unit
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport

RUN = RunFigures(
    steps=12,
    log_every=5,
    tokens_per_step=1000,
    flops_per_step=6e9,
    peak_flops=1.2e10,
    unit="tokens",
)
MOST = {
    "model_state_bytes": 11,
    "gradient_bytes_sent": 22,
    "p2p_bytes_sent": 33,
    "peak_memory_bytes": 44,
}


@pytest.fixture(autouse=True)
def _three_seconds_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count(100.0, 3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks))


def figures(
    step: int, *, loss: float = 2.5, skip_reason: str | None = None, skipped_steps: int = 0
) -> StepFigures:
    return StepFigures(step, loss, 0.01, 1.25, 1.0, skip_reason, skipped_steps)


def seconds(step: float = 2.0) -> dict[str, float]:
    """The same time in every phase, but twice that in the bubble."""
    part = step / 9
    return {**dict.fromkeys(PHASES, part), "bubble": 2 * part, "step": step}


class Screen:
    """A recorder of one rank, its screen and its file."""

    def __init__(self, folder: Path, *, run: RunFigures = RUN) -> None:
        transport, self.stream = LocalTransport(), io.StringIO()
        self.path = folder / "metrics.jsonl"
        file, console = MetricsFile(self.path), Console(self.stream, bar=False)
        self.recorder = Recorder(transport.world, transport.backoff, run, file, console)

    def end(self) -> None:
        self.recorder.flush()
        self.recorder.close()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_after_five_steps_the_plan_is_held_against_what_was_measured(tmp_path: Path) -> None:
    run = replace(RUN, predicted_memory_bytes=40.0, predicted_step_seconds=1.8)
    screen = Screen(tmp_path, run=run)
    for step, length in enumerate([9.0, 2.0, 2.0, 2.0, 3.0, 2.0], 1):
        screen.recorder.step(figures(step), seconds(length), MOST)
    screen.end()

    [record] = [each for each in screen.records if "predicted_step_seconds" in each]
    assert record == {
        "step": 5,
        "predicted_peak_memory_bytes": 40.0,
        "measured_peak_memory_bytes": 44,
        "predicted_step_seconds": 1.8,
        "measured_step_seconds": 2.0,
    }
    assert screen.records.index(record) == 5
    [line] = [line for line in screen.lines if "predicted" in line]
    assert line.endswith("peak memory 44 B, predicted 40 B; 2 s a step, predicted 1.8")


def test_a_record_has_figures_phases_rates_and_bytes(tmp_path: Path) -> None:
    screen, began = Screen(tmp_path), time.time()
    screen.recorder.step(figures(3), seconds(2.0), MOST)
    screen.end()

    (record,) = screen.records
    assert began <= record.pop("time") <= time.time()
    phases = {name: record.pop(f"{name}_seconds") for name in PHASES}
    assert phases == {**dict.fromkeys(PHASES, 2 / 9), "bubble": 4 / 9}
    assert record == {
        "step": 3,
        "loss": 2.5,
        "learning_rate": 0.01,
        "grad_norm": 1.25,
        "weights_digest": None,
        "loss_scale": 1.0,
        "skipped": False,
        "skip_reason": None,
        "skipped_steps": 0,
        "tokens": 1000,
        "step_seconds": 2.0,
        "tokens_per_second": 500.0,
        "model_flops_per_second": 3e9,
        "mfu": 0.25,
        **MOST,
    }


@pytest.mark.parametrize(
    ("unit", "loss", "metrics", "record", "line"),
    [
        ("tokens", 0.0, {}, {"perplexity": 1.0}, "loss 0.0000  perplexity 1.000"),
        ("samples", 0.25, {"top1": 0.875}, {"top1": 0.875}, "loss 0.2500  top1 87.50 %"),
    ],
)
def test_an_evaluation_comes_after_the_steps_before_it(
    unit: Unit,
    loss: float,
    metrics: dict[str, float],
    record: dict[str, float],
    line: str,
    tmp_path: Path,
) -> None:
    screen = Screen(tmp_path, run=replace(RUN, unit=unit))
    screen.recorder.step(figures(5), seconds(), MOST)

    screen.recorder.evaluation(5, loss, metrics)
    screen.recorder.close()

    assert [each["step"] for each in screen.records] == [5, 5]
    assert screen.records[1] == {"step": 5, "eval_loss": loss, **record}
    assert f"500 {unit}/s" in screen.lines[0]
    assert screen.lines[-1] == f"step 5/12  validation {line}"


def test_the_first_the_last_and_every_tenth_step_are_shown(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for step in range(1, 13):
        screen.recorder.step(figures(step), seconds(), MOST)
    screen.end()

    assert [line.split()[1] for line in screen.lines] == ["1/12", "5/12", "10/12", "12/12"]
    # The first step compiles. Those after it took 3 s each, and seven are left.
    figures_of_a_step = "loss 2.500  grad norm 1.25  bubble 22 %  500 tokens/s  eta"
    assert screen.lines[0] == (
        f"step 1/12  {figures_of_a_step} after the next steps: the first one also compiles"
    )
    assert screen.lines[1] == f"step 5/12  {figures_of_a_step} 00:21"
    assert screen.lines[-1].endswith("eta 00:00")


def test_a_skipped_step_is_always_told_and_counted(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    bad = figures(
        4, loss=float("nan"), skip_reason="rank 1: the loss is not finite", skipped_steps=2
    )
    screen.recorder.step(bad, seconds(), MOST)
    screen.recorder.step(figures(5, skipped_steps=2), seconds(), MOST)
    screen.end()

    told, step = screen.lines
    assert told == "step 4: rank 1: the loss is not finite; no rank updated its weights"
    assert step.startswith("step 5/12") and step.endswith("  skipped 2")
    first, second = screen.records
    assert (first["loss"], first["skipped"], first["skipped_steps"]) == (None, True, 2)
    assert first["skip_reason"] == "rank 1: the loss is not finite"
    assert (second["skipped"], second["skip_reason"], second["skipped_steps"]) == (False, None, 2)


# -- several ranks --------------------------------------------------------------------------


class Late:
    """The world of rank 0 of two, whose other rank joins a sum when it is waited for."""

    rank, size, bytes_sent, pauses = 0, 2, 0, 0

    def __init__(self, other: Sequence[float]) -> None:
        self.other = other
        """The buffer of rank 1."""
        self.waits = 0

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        assert (op, buffer.dtype, bounds) == (Op.ALL_REDUCE, torch.float64, None)
        self.buffer, self.is_here = buffer, False
        return self

    def poll(self) -> bool:
        return self.is_here

    def pause(self) -> None:
        self.buffer += torch.tensor(self.other, dtype=torch.float64)
        self.waits, self.is_here = self.waits + 1, True

    def reset(self) -> None:
        pass


def test_a_rank_waits_for_others_only_at_its_next_step(tmp_path: Path) -> None:
    path, largest = tmp_path / "metrics.jsonl", 2**53 - 1
    of_rank_1 = [4 / 9] * 8 + [8.0] + [0.0] * 5 + [11.0, largest, 33.0, 44.0, 4 / 9]
    world = Late(of_rank_1)
    recorder = Recorder(world, world, RUN, MetricsFile(path), None)

    recorder.step(figures(1), {**dict.fromkeys(PHASES, 2 / 9), "step": 2.0}, MOST)
    assert world.waits == 0
    recorder.step(figures(2), seconds(), {**MOST, "p2p_bytes_sent": 34})
    assert world.waits == 1
    recorder.flush()
    recorder.flush()
    recorder.close()

    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["step_seconds"], first["compute_seconds"]) == (5.0, 1 / 3)
    assert first["gradient_bytes_sent"] == largest, "integers stay exact"
    assert [one["p2p_bytes_sent"] for one in (first, second)] == [33, 34]
    assert world.waits == 2


def test_ranks_without_screen_and_file_take_part_and_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    heard: list[list[float]] = []

    class Slow(SlowRanks):
        def add(self, step: int, compute: Sequence[float]) -> str | None:
            heard.append([*compute])
            return None

    def main(transport: Transport) -> None:
        rank = transport.rank
        file = MetricsFile(path) if rank == 0 else None
        slow = Slow(Grid(2, 1), [1.0, 1.0], ["here"] * 2, ratio=2.0, steps=1) if file else None
        recorder = Recorder(transport.world, transport.backoff, RUN, file, None, slow)
        most = {name: value + 100 * rank for name, value in MOST.items()}
        recorder.step(figures(1), seconds(2.25 + 2.25 * rank), most)
        recorder.evaluation(1, 1.0, {})
        recorder.say("nobody hears this")
        recorder.close()

    on_ranks(2, main)

    step, evaluation = [json.loads(line) for line in path.read_text().splitlines()]
    assert step["step_seconds"] == 3.375
    assert step["model_state_bytes"] == 111
    assert evaluation["eval_loss"] == 1.0
    assert heard == [[0.25, 0.5]], "in rank order"
