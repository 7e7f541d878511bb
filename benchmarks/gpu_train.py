"""GPT-3 on one GPU: step time, part of the matrix peak, memory, and SAMO against dense.

    python benchmarks/gpu_train.py [2.7b] [2.7b-4] [13b] [dense-13b] [largest]
        [--seconds 540] [--save benchmarks/results/gpu_train.json]

    2.7b, 13b    trains at 90 %: seconds, tokens/s, percentage of the matrix product that this GPU
                 does fastest, live bytes by category and the peak against the plan. 2.7b has
                 microbatches of 1 and a profile of one more step, 2.7b-4 has microbatches of 4
    dense-13b    does not fit: the plan says so, and an attempt ends with one line
    largest      the most layers of 13B's width that the plan lets fit, confirmed by three steps

Other microbatches are as large as the plan lets fit without recomputing activations, else 1 with.
Masks are a file of random positions, the same tenth over and over; start values see
`gpu_worker.py`. Medians; brackets hold the quartiles. The exit code is 1 if a check fails, 69
without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from gpu_plan import SIZES, Training, batches, chosen, mask_file, planned
from gpu_report import (
    EXIT_FAILED,
    EXIT_NO_DEVICE,
    Report,
    Row,
    failed,
    judged,
    spread,
    table,
)

from axsparse.planner.stage_memory import StageMemory
from axsparse.runtime.errors import ConfigError

HERE = Path(__file__).parent
RUNS = ("2.7b", "2.7b-4", "13b", "dense-13b", "largest")
CONFIGS = {"2.7b": "gpt3_2.7b.yaml", "2.7b-4": "gpt3_2.7b.yaml", "13b": "gpt3_13b.yaml"}
MICROBATCH = {"2.7b": (1,), "2.7b-4": (4,), "13b": (1,)}
"""The microbatch sizes of a run; of all others the largest that fits."""
PEAK_AIMS = {"2.7b": 0.4}
"""The part of the matrix peak that a run has to reach; `PEAK_AIM` where it is not named."""
PROFILED = ("2.7b",)
PEAK_AIM, MEMORY_AIM = 0.5, 1.1
PART_OF_PEAK = "part of the measured matrix peak"
ROOM = 0.94
"""Part of the device that a plan may fill: torch's allocator does not fill every hole."""
STEPS, WARM = 6, 2
FEWER = {"13b": 3}
"""Steps of a run that is to show that it trains."""


@dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: int
    peak_flops: float
    """Of the fastest bf16 matrix product."""


# -- runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCoords:
    """Where runs run, and how long they may."""

    device: Device
    folder: Path
    ends: float
    """On the clock of `time.monotonic`."""

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    @property
    def room(self) -> float:
        return ROOM * self.device.memory_bytes


Found = tuple[list[Row], dict[str, Any]]


def pruned(training: Training, place: RankCoords) -> Training:
    return training.with_(f"pruning.mask={mask_file(training, place.folder)}")


def alone(name: str, training: Training, place: RankCoords) -> Found:
    """One training by itself, against its plan; the step that is profiled comes on top."""
    plan = planned(training, "samo")
    profiled = name in PROFILED
    told = training.with_(steps=training.steps + profiled)
    with Worker(told, place.folder, place.left, profile=profiled) as worker:
        built = worker.event("built")
        steps = [worker.step() for _ in range(training.steps)]
        profile = worker.step()["profile"] if profiled else None
        done = worker.event("done")
        records = worker.records()
    warm = min(WARM, len(steps) - 1)
    seconds = [step["seconds"] for step in steps[warm:]]
    middle = statistics.median(seconds)
    part = plan.all_flops / middle / place.device.peak_flops
    aim = PEAK_AIMS.get(name, PEAK_AIM)
    without = plan.model_flops / middle / place.device.peak_flops
    state = asdict(plan.state)
    rows = [
        Row(
            name,
            "seconds a step",
            "info",
            f"{spread(seconds, 's')}; the planner says {plan.seconds:.4g} s",
        ),
        Row(name, "tokens a second", "info", f"{plan.tokens / middle:,.0f}"),
        judged(
            name,
            PART_OF_PEAK,
            f"{part:.1%} (without what is computed again {without:.1%})",
            f">= {aim:.0%}",
            good=part >= aim,
        ),
        judged(
            name,
            "every loss is a number",
            f"{steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}",
            "all steps",
            good=all(step["finite"] for step in steps),
        ),
        judged(
            name,
            "live state has the planned bytes",
            ", ".join(f"{key} {value / 1e9:.2f} GB" for key, value in built["state"].items()),
            "equal",
            good=built["state"] == state,
        ),
    ]
    if done["peak"]:
        rows.append(peak_row(name, done["peak"]["allocated"], plan.memory))
    if profile is not None:
        rows += profile_rows(name, profile, told.microbatches)
    detail = {
        "settings": training.all(),
        "parameters": plan.parameters,
        "tokens a step": plan.tokens,
        "step seconds": [step["seconds"] for step in steps],
        "planned step seconds": plan.seconds,
        "profile": profile,
        "losses": [step["loss"] for step in steps],
        "phases, medians": phases(records[warm:]),
        "building seconds": built["seconds"],
        "building peak": built["peak"],
        "peak": done["peak"],
        "live state": built["state"],
        "planned": asdict(plan.memory),
    }
    return rows, detail


def profile_rows(name: str, profile: dict[str, Any], microbatches: int) -> list[Row]:
    """Whether the host keeps its GPU busy, and how many kernels that takes."""
    seconds, busy = profile["seconds"], profile["device_busy_seconds"]
    said = {
        "kernels a microbatch": f"{profile['kernels'] / microbatches:.0f}",
        "the GPU is busy": f"{busy:.4g} s of a step of {seconds:.4g} ({busy / seconds:.1%})",
        "the host enqueues a step in": f"{profile['enqueue_seconds']:.4g} s",
    }
    return [Row(name, check, "info", text) for check, text in said.items()]


def peak_row(name: str, allocated: int, memory: StageMemory) -> Row:
    """Torch's peak against the plan, of which libraries are no part."""
    expected = memory.total - memory.overhead
    return judged(
        name,
        "peak memory against the plan",
        f"{allocated / 1e9:.1f} GB of {expected / 1e9:.1f} planned ({allocated / expected:.3f})",
        f"<= {MEMORY_AIM:.0%}",
        good=allocated <= MEMORY_AIM * expected,
    )


def phases(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase of a step."""
    names = [key for key in (records[0] if records else {}) if key.endswith("_seconds")]
    return {key: statistics.median(record[key] for record in records) for key in names}


def size(name: str, place: RankCoords) -> Found:
    start = pruned(Training(CONFIGS[name], (), FEWER.get(name, STEPS)), place)
    wanted = MICROBATCH.get(name, SIZES)
    return alone(name, chosen(start, place.room, wanted), place)


def does_not_fit(training: Training, place: RankCoords) -> Found:
    """The plan of a dense training needs more than there is, and trying it says so in a line."""
    name = "dense-13b"
    least = training.with_(*batches(1), "pipeline.checkpoint_activations=1", "samo.enabled=false")
    need = planned(least, "dense").memory.total
    rows = [
        judged(
            name,
            "the plan needs more than the device has",
            f"{need / 1e9:.0f} GB of {place.device.memory_bytes / 1e9:.0f}",
            "no fit",
            good=need > place.device.memory_bytes,
        )
    ]
    said = ""
    try:
        with Worker(least, place.folder, place.left) as worker:
            worker.event("built")
            worker.step()
    except WorkerFailedError as error:
        said = str(error)
    clear = said.startswith("axsparse: error:") and "memory" in said
    rows.append(
        judged(
            name,
            "an attempt ends with one clear line",
            said[:300] or "it trained",
            "names memory",
            good=clear,
        )
    )
    return rows, {"settings": least.all(), "planned": need, "said": said}


def most_layers(training: Training, room: float) -> int:
    """The most blocks that fit by the plan; 0 if not even one does."""

    @cache
    def need(layers: int) -> float:
        return planned(with_layers(training, layers), "samo").memory.total

    # Every block adds the same; looking at a deep model takes long.
    layers = max(0, 1 + int((room - need(1)) / (need(2) - need(1))))
    while layers > 0 and need(layers) > room:
        layers -= 1
    while need(layers + 1) <= room:
        layers += 1
    return layers


def with_layers(training: Training, layers: int) -> Training:
    return training.with_(f"model.num_layers={layers}")


def largest(training: Training, place: RankCoords) -> Found:
    """By the plan, then by three steps; with fewer layers if these do not run after all."""
    name = "largest"
    start = training.with_(
        "batch.microbatch_size=1",
        "batch.global_batch_size=1",
        "pipeline.checkpoint_activations=1",
        "samo.index=mask",
        steps=3,
    )
    layers = most_layers(start, place.room)
    tries: list[dict[str, Any]] = []
    while layers > 0:
        tried = with_layers(start, layers)
        plan = planned(tried, "samo")
        attempt = {"layers": layers, "parameters": plan.parameters, "said": "trained"}
        tries.append(attempt)
        try:
            rows, detail = alone(name, pruned(tried, place), place)
        except WorkerFailedError as error:
            attempt["said"] = str(error)
            if "memory" not in str(error):
                raise
            layers -= max(1, layers // 20)
            continue
        rows = [row for row in rows if row.check != PART_OF_PEAK]  # nobody asks for speed here
        right = len(tries) == 1
        top = judged(
            name,
            "the plan's most layers train",
            f"{layers} layers, {plan.parameters / 1e9:.1f}e9 parameters"
            + ("" if right else f", after {len(tries) - 1} that did not fit"),
            "at once",
            good=right,
        )
        return [top, *rows], {**detail, "tries": tries}
    raise ConfigError(f"{training.config}: not a single layer of it fits; take a larger device")


def run_one(name: str, place: RankCoords) -> Found:
    if name == "dense-13b":
        return does_not_fit(Training(CONFIGS["13b"], (), 1), place)
    if name == "largest":
        return largest(Training(CONFIGS["13b"], (), 3), place)
    return size(name, place)


def judge_runs(names: Sequence[str], place: RankCoords) -> Iterator[tuple[str, Found]]:
    """Each run's rows; one that fails is a row as well, and one without time is skipped."""
    for name in names:
        if place.left <= 0:
            yield name, ([Row(name, "training", "skip", "no time left; name fewer runs")], {})
            continue
        try:
            yield name, run_one(name, place)
        except Exception as error:  # the other runs continue
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            yield name, ([Row(name, "training", "fail", said[:300])], {})


# -- the device -----------------------------------------------------------------------------


def probe(sizes: Sequence[int] = (8192, 16384)) -> Device:
    """The properties and speeds of this process's GPU; torch's memory of it stays taken until it
    ends."""
    peak = 0.0
    for edge in sizes:
        left, right = (torch.randn(edge, edge, device="cuda").bfloat16() for _ in range(2))
        times = []
        for number in range(25):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.mm(left, right)
            ended.record()
            ended.synchronize()
            if number >= 5:
                times.append(began.elapsed_time(ended) / 1e3)
        peak = max(peak, 2 * edge**3 / statistics.median(times))
    properties = torch.cuda.get_device_properties(0)
    return Device(properties.name, properties.total_memory, peak)


def probe_apart() -> Device:
    """The same by a process that gives the memory back."""
    code = (
        "import json, gpu_train, dataclasses as d; print(json.dumps(d.asdict(gpu_train.probe())))"
    )
    said = subprocess.run(  # noqa: S603  our own script
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True
    )
    return Device(**json.loads(said.stdout.splitlines()[-1]))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; all")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all runs together")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args(words)
    for name in arguments.runs:
        if name not in RUNS:
            parser.error(f"{name}: no run; choose of {', '.join(RUNS)}")
    arguments.runs = arguments.runs or list(RUNS)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    ends = time.monotonic() + arguments.seconds
    if not torch.cuda.is_available():
        print("gpu_train: no CUDA device is here, and there is nothing else to measure")
        return EXIT_NO_DEVICE
    device = probe_apart()
    report = Report.opened(arguments.save, {**asdict(device), "torch": torch.__version__})
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        place = RankCoords(device, Path(folder), ends)
        for name, (own, detail) in judge_runs(arguments.runs, place):
            report.put(name, own, detail)
            print("\n".join(table(own)), flush=True)
            rows += own
    return EXIT_FAILED if failed(rows) else 0


class WorkerFailedError(Exception):
    """The last output of the worker, in one line."""


class Worker:
    """A training in a separate process, which takes a step on request."""

    def __init__(
        self,
        training: Training,
        folder: Path,
        seconds: float,
        *,
        profile: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Ends by itself after `seconds`. `profile`: the last step is profiled, and slower.
        `environment` is added to this process's."""
        run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
        spec = {
            "config": training.config,
            "overrides": training.all(f"run_dir={run_dir}"),
            "profile": profile,
        }
        self.metrics = run_dir / "metrics.jsonl"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603  our own script
            [sys.executable, str(HERE / "gpu_worker.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._late = False
        self._timer = threading.Timer(max(seconds, 0.0), self._end_late)
        self._timer.start()

    def event(self, name: str) -> dict[str, Any]:
        """The next one, which has to be that; WorkerFailedError if the process ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                assert found["event"] == name, f"{found['event']} instead of {name}"
                return found
        self._process.wait()
        if self._late:
            raise WorkerFailedError("ran out of time; give more by --seconds")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("axsparse: error:")] or lines[-1:]
        code = self._process.returncode
        kept = self.metrics.with_name("traceback-rank-0.txt")  # in a folder that goes with us
        lines += kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        print("\n".join(lines[-40:]), flush=True)
        raise WorkerFailedError(said[-1] if said else f"ended with {code} and said nothing")

    def step(self) -> dict[str, Any]:
        """Take one."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `event` says why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.event("step")

    def records(self) -> list[dict[str, Any]]:
        """The steps of its metrics.jsonl."""
        if not self.metrics.exists():
            return []
        lines = map(json.loads, self.metrics.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if "step_seconds" in line]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if kind is not None or self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if kind is not None else 60)
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _end_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        self._process.kill()


if __name__ == "__main__":
    sys.exit(main())
