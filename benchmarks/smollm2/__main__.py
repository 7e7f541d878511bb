"""python -m smollm2: prune SmolLM2 135M by three methods, judge it, train it on, judge it again.

`make bench-smollm2` makes the environment and calls this. Finished cases are kept in the work
folder, so that the same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import host_machine

from smollm2.cases import (
    CALIBRATION_SAMPLES,
    COMMON,
    HEALING,
    HEALING_STEPS,
    METHODS,
    SPARSITIES,
    TRAINED_AT,
    TRAINING,
    Case,
    Study,
    all_cases,
)

TEXTS = ("english", "code", "GPL-3")
COLORS = {"magnitude": "#b3552f", "wanda": "#2f6fb3", "sparsegpt": "#2f9e5b", "dense": "#555555"}
Records = Mapping[Case, Mapping[str, Any]]
NOTE = (
    "Perplexity of transformers on the exported folder, in bf16, in windows of 1,024 tokens, eight "
    "of each text at most. Bytes of state are those of a run on one rank with AdamW in bf16. "
    "Compare lines with each other: the texts are short, and the model has certainly read Python's "
    "standard library before."
)


def write_report(records: Records, out: Path, name: str) -> None:
    """Write a table, the records and a plot into a folder: NAME.md, NAME.json and NAME.png."""
    out.mkdir(parents=True, exist_ok=True)
    known = {
        "machine": host_machine(),
        "calibration_samples": CALIBRATION_SAMPLES,
        "settings": [*COMMON, *TRAINING],
        "settings_of_blocks": HEALING,
        "note": NOTE,
        "cases": {case.name: dict(found) for case, found in records.items()},
    }
    (out / f"{name}.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    lines = ["# SmolLM2 135M, pruned and trained on", "", NOTE, "", *table(records), ""]
    lines += [*remarks(records), ""]
    (out / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines), flush=True)
    plot(records, out / f"{name}.png")


def table(records: Records) -> Iterator[str]:
    """Perplexities and bytes, a line a case that is done."""
    dense = records.get(Case("dense", 0), {}).get("state_bytes")
    yield "| pruned by | % | healed | English | code | GPL-3 | CPU | peak | state | of dense |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case, found in records.items():
        if "perplexity" not in found:
            continue
        steps = f"{len(found['losses'])} steps, {case.stages}×1" if case.stages else case.heal
        if case.heal in {"adapters", "train"}:
            steps += f", {HEALING_STEPS} steps"
        used = f"{found['cpu_seconds']:,.0f} s" if "cpu_seconds" in found else ""
        peak = f"{found['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in found else ""
        values = [_rounded(found["perplexity"].get(text)) for text in TEXTS]
        size = records.get(case.untrained, {}).get("state_bytes")
        share = f"{size / dense:.3f}" if size and dense else ""
        gigabytes = f"{size / 1e9:.3f} GB" if size else ""
        cells = (case.method, str(case.percent), steps, *values, used, peak, gigabytes, share)
        yield f"| {' | '.join(cells)} |"


def remarks(records: Records) -> Iterator[str]:
    """Whether the losses of the two layouts are equal, and what was not run."""
    for case, found in records.items():
        other = records.get(Case(case.method, case.percent, 2))
        if case.stages == 1 and other is not None:
            pairs = zip(found["losses"], other["losses"], strict=True)
            apart = [step for step, (one, two) in enumerate(pairs, 1) if one != two]
            count = len(found["losses"])
            if apart:
                yield f"Losses of {case.name} differ from those on two stages from step {apart[0]}."
            else:
                yield f"All {count} losses of {case.name} are the same numbers as on two stages."
    missing = [case.name for case in all_cases() if case not in records]
    if missing:
        yield f"Not run: {', '.join(missing)}."


def _rounded(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def plot(records: Records, path: Path) -> None:
    """Perplexity over sparsity, for English and for code; hollow where a model was trained on."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, text in zip(panels, TEXTS, strict=False):
        for method in METHODS:
            done = [case for p in SPARSITIES if (case := Case(method, p)) in records]
            values = [records[case]["perplexity"][text] for case in done]
            axes.plot(
                [case.percent for case in done],
                values,
                marker="o",
                color=COLORS[method],
                label=method,
            )
        for case, found in records.items():
            if case.stages and "perplexity" in found:
                axes.plot(
                    [case.percent or TRAINED_AT],
                    [found["perplexity"][text]],
                    marker="o",
                    fillstyle="none",
                    color=COLORS[case.method],
                )
        untouched = records.get(Case("dense", 0))
        if untouched is not None:
            axes.axhline(untouched["perplexity"][text], color=COLORS["dense"], linestyle=":")
        axes.set(xlabel="% of the blocks' matrices pruned", title=text, yscale="log")
        axes.set_xticks(SPARSITIES)
        axes.set_xlim(min(SPARSITIES) - 3, max(SPARSITIES) + 3)
    panels[0].set_ylabel("perplexity")
    panels[0].legend(fontsize=8, title="hollow: trained on; dotted: dense", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m smollm2", description=__doc__)
    add = arguments.add_argument
    add("--work", type=Path, default=CHECKOUT / ".bench-smollm2", help="model, texts, cases")
    add("--minutes", type=float, default=float("inf"), help="start no case after so many")
    add("--only", default="", help="regular expression on names of cases, such as wanda")
    add("--out", type=Path, default=CHECKOUT / "benchmarks" / "results")
    add("--name", default="smollm2", help="of the files there")
    options = arguments.parse_args()
    study = Study(options.work)
    end = time.monotonic() + 60 * options.minutes
    for case in all_cases():
        if study.record(case) is not None or not re.search(options.only, case.name):
            continue
        if time.monotonic() > end:
            print(f"not run: {case.name}", flush=True)
            continue
        study.prepare()
        study.run(case)
        print(f"{case.name}: {study.record(case)}", flush=True)
    records = {case: study.record(case) for case in all_cases()}
    done = {case: found for case, found in records.items() if found}
    write_report(done, options.out, options.name)


if __name__ == "__main__":
    main()
