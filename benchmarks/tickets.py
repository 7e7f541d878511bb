"""How well pruned networks train: masks of every method against the dense network.

    python benchmarks/tickets.py --runs DIR --minutes 60            # trains what is missing
    python benchmarks/tickets.py --runs DIR --save benchmarks/results/tickets.json --plot

A byte-level GPT on the standard library's source files, three blocks of the width in the
run's name, 1,000 steps of 8 × 256 bytes, warm-up over 100, cosine to a tenth; evaluations over
49,152 bytes every 100 steps. All arms see the same batches of a seed in the same order.

The learning rate of every method is tuned on seed 1 at 90 % in three trials: 1e-3, 2e-3, and
then beyond the better of them, 5e-4 or 3e-3. The best final validation loss wins; the 80 % arms,
the other seeds and widths take the method's best. `rewound` arms start anew from the ticket of
the `early-bird` run of the same seed, learning rate and width; the search comes on top.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMON = (
    *("model.num_layers=3", "model.sequence_length=256"),
    *("batch.global_batch_size=8", "batch.microbatch_size=4"),
    *("schedule.warmup_steps=100", "train.steps=1000", "train.eval_every=100"),
    *("train.eval_steps=24", "train.log_every=100", "train.peak_flops=1e12"),
)
METHODS: dict[str, tuple[str, ...]] = {
    "dense": ("samo.enabled=false",),
    "early-bird": (
        *("pruning.method=early-bird", "pruning.interval=20", "pruning.until_step=600"),
    ),
    "rewound": (),
    "gradual": (
        *("pruning.method=gradual", "pruning.at_step=100"),
        *("pruning.interval=25", "pruning.until_step=600"),
    ),
    "rigl": ("pruning.method=rigl", "pruning.interval=50"),
    "set": ("pruning.method=set", "pruning.interval=50"),
    "magnitude": ("pruning.method=magnitude",),
    "random": ("pruning.method=random",),
}
FIRST_RATES = ("1e-3", "2e-3")
BEYOND = {"1e-3": "5e-4", "2e-3": "3e-3"}
"""The third trial, on the side of the better of the first two."""
WIDTHS = (96, 192, 384, 768)
MAIN_WIDTH = 384
SEEDS = (1, 2)
ACROSS_WIDTHS = ("dense", "rewound", "gradual")


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: str
    sparsity: int
    """Percent."""
    rate: str
    seed: int
    width: int

    @property
    def name(self) -> str:
        arm = self.method if self.method == "dense" else f"{self.method}-{self.sparsity}"
        return f"{arm}-w{self.width}-lr{self.rate}-s{self.seed}"

    @property
    def search(self) -> Run:
        """The run whose ticket a rewound run starts from."""
        return Run("early-bird", self.sparsity, self.rate, self.seed, self.width)

    def command(self, runs: Path) -> list[str]:
        """What a user would type."""
        settings = [
            *COMMON,
            f"model.hidden_size={self.width}",
            f"model.num_heads={max(2, self.width // 128)}",
            *METHODS[self.method],
            f"optimizer.learning_rate={self.rate}",
            f"seed={self.seed}",
        ]
        if self.method != "dense":
            settings.append(f"pruning.sparsity={self.sparsity / 100}")
        if self.method == "rewound":
            settings.append(f"pruning.ticket={runs / self.search.name / 'ticket.safetensors'}")
        parts = [part for setting in settings for part in ("--set", setting)]
        return [sys.executable, "-m", "axsparse.train", *parts, "--run-dir", str(runs / self.name)]


def curve(run: Run, runs: Path) -> dict[str, Any] | None:
    """What a finished run left: validation losses by step, and changes of the masks; None where
    it is not finished."""
    path = runs / run.name / "metrics.jsonl"
    if not path.is_file():
        return None
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    if 1000 not in losses:
        return None
    steps = [record for record in records if "loss" in record]
    drawn = [r["step"] for r in records if r.get("masks", "").startswith("early-bird draws")]
    return {
        **asdict(run),
        "eval_loss": losses,
        "perplexity": math.exp(losses[1000]),
        "drawn_at": drawn[0] if drawn else None,
        "seconds": sum(record["step_seconds"] for record in steps),
        "model_state_bytes": [steps[0]["model_state_bytes"], steps[-1]["model_state_bytes"]],
    }


def best_rate(method: str, runs: Path) -> str | None:
    """The learning rate of lowest final loss among the trials; None while some are missing."""
    first = _better(method, FIRST_RATES, runs)
    return first and _better(method, (*FIRST_RATES, BEYOND[first]), runs)


def _better(method: str, rates: Sequence[str], runs: Path) -> str | None:
    found = [(curve(Run(method, 90, rate, 1, MAIN_WIDTH), runs), rate) for rate in rates]
    if any(record is None for record, _ in found):
        return None
    return min((record["eval_loss"][1000], rate) for record, rate in found if record)[1]


def wanted(runs: Path) -> Iterator[Run]:
    """All runs that can be named by now, the more telling ones first."""
    for rate in reversed(FIRST_RATES):
        yield from (Run(method, 90, rate, 1, MAIN_WIDTH) for method in METHODS)
    for method in METHODS:
        first = _better(method, FIRST_RATES, runs)
        if first is not None:
            yield Run(method, 90, BEYOND[first], 1, MAIN_WIDTH)
    rates = {method: best_rate(method, runs) for method in METHODS}
    known = [(method, rate) for method, rate in rates.items() if rate is not None]
    for seed in SEEDS[1:]:
        yield from (Run(method, 90, rate, seed, MAIN_WIDTH) for method, rate in known)
    others = [width for width in WIDTHS if width != MAIN_WIDTH]
    across = [(method, rate) for method, rate in known if method in ACROSS_WIDTHS]
    for width in (width for width in others if width < MAIN_WIDTH):
        yield from (Run(method, 90, rate, 1, width) for method, rate in across)
    pruned = [(method, rate) for method, rate in known if method != "dense"]
    for seed in SEEDS:
        yield from (Run(method, 80, rate, seed, MAIN_WIDTH) for method, rate in pruned)
    for width in (width for width in others if width > MAIN_WIDTH):
        yield from (Run(method, 90, rate, 1, width) for method, rate in across)


def missing(runs: Path) -> Run | None:
    """The next run that has not been begun; the search of a rewound run comes before it."""
    for run in wanted(runs):
        searched = run.method != "rewound" or curve(run.search, runs) is not None
        needed = run if searched else run.search
        if not (runs / needed.name).exists():
            return needed
    return None


def train(runs: Path, minutes: float) -> None:
    """Make missing runs, one after the other, and start none after so many minutes."""
    runs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        run = missing(runs)
        if run is None:
            print("nothing is missing", flush=True)
            return
        print(run.name, flush=True)
        with (runs / f"{run.name}.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(  # noqa: S603 - this package
                run.command(runs),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        if done.returncode:
            print(f"{run.name}: exit code {done.returncode}", flush=True)


def gathered(runs: Path) -> list[dict[str, Any]]:
    """All finished runs that are part of the study."""
    records = (curve(run, runs) for run in wanted(runs))
    return [record for record in records if record is not None]


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Final perplexities at each method's best learning rate, mean and spread over seeds."""
    yield "| width | sparsity | method | learning rate | perplexity, seeds | mean | over dense |"
    yield "|---|---|---|---|---|---|---|"
    arms: dict[tuple[int, int, str], dict[str, list[dict[str, Any]]]] = {}
    for r in records:
        sparsity = 0 if r["method"] == "dense" else r["sparsity"]
        by_rate = arms.setdefault((r["width"], sparsity, r["method"]), {})
        by_rate.setdefault(r["rate"], []).append(r)
    means: dict[int, float] = {}
    for (width, sparsity, method), by_rate in sorted(arms.items()):
        rate = min(by_rate, key=lambda rate: min(r["eval_loss"][1000] for r in by_rate[rate]))
        values = [r["perplexity"] for r in by_rate[rate]]
        mean = statistics.fmean(values)
        if method == "dense":
            means[width] = mean
        over = f"{mean / means[width]:.3f}" if width in means else ""
        each = ", ".join(f"{value:.3f}" for value in values)
        yield f"| {width} | {sparsity} % | {method} | {rate} | {each} | {mean:.3f} | {over} |"


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation perplexity over steps, one line an arm, at the main width and 90 %."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for method in METHODS:
        runs = [
            r
            for r in records
            if r["method"] == method
            and r["width"] == MAIN_WIDTH
            and r["seed"] == SEEDS[0]
            and (r["sparsity"] == 90 or method == "dense")
        ]
        if not runs:
            continue
        best = min(runs, key=lambda r: r["eval_loss"][1000])
        steps = sorted(best["eval_loss"])
        values = [math.exp(best["eval_loss"][step]) for step in steps]
        axes.plot(steps, values, label=f"{method} ({values[-1]:.2f})", linewidth=1.2)
    axes.set(
        xlabel="step",
        ylabel="validation perplexity (bytes)",
        title=f"width {MAIN_WIDTH}, 90 % pruned, seed {SEEDS[0]}, best of three learning rates",
        yscale="log",
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    arguments.add_argument("--minutes", type=float, default=0.0, help="start runs for so long")
    arguments.add_argument("--save", type=Path, help="write curves and commands as JSON")
    arguments.add_argument("--plot", action="store_true", help="draw them beside it")
    arguments.add_argument("--machine", default="", help="said in the JSON")
    options = arguments.parse_args()
    train(options.runs, options.minutes)
    records = gathered(options.runs)
    print("\n".join(table(records)))
    if options.save is not None:
        commands = {
            run.name: " ".join(["python", *run.command(Path("runs"))[1:]])
            for run in wanted(options.runs)
        }
        known = {"machine": options.machine, "runs": records, "commands": commands}
        options.save.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        if options.plot:
            plot(records, options.save.with_suffix(".png"))


if __name__ == "__main__":
    main()
