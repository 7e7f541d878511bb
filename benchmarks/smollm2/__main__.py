"""python -m smollm2: prune SmolLM2 135M by three methods, evaluate it, train it on, evaluate it
again.

`make bench-smollm2` makes the environment and calls this. Finished cases are kept in the work
folder, so that the same command continues where it was cut off.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import host_machine

from smollm2.cases import (
    CALIBRATION_SAMPLES,
    COMMON,
    HEALING,
    HEALING_STEPS,
    TRAINING,
    Case,
    Study,
    all_cases,
)

TEXTS = ("english", "code", "GPL-3")
Records = Mapping[Case, Mapping[str, Any]]
NOTE = (
    "Perplexity of transformers on the exported folder, in bf16, in windows of 1,024 tokens, eight "
    "of each text at most. Bytes of state are those of a run on one rank with AdamW in bf16. "
    "Compare lines with each other: the texts are short, and the model has certainly read Python's "
    "standard library before."
)


def write_report(records: Records, out: Path, name: str) -> None:
    """Write a table and the records into a folder: NAME.md and NAME.json."""
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


CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m smollm2", description=__doc__)
    add = arguments.add_argument
    add("--work", type=Path, default=CHECKOUT / ".bench-smollm2", help="model, texts, cases")
    add("--only", default="", help="regular expression on names of cases, such as wanda")
    add("--out", type=Path, default=CHECKOUT / "benchmarks" / "results")
    add("--name", default="smollm2", help="of the files there")
    options = arguments.parse_args()
    study = Study(options.work)
    for case in all_cases():
        if study.record(case) is not None or not re.search(options.only, case.name):
            continue
        study.prepare()
        study.run(case)
        print(f"{case.name}: {study.record(case)}", flush=True)
    records = {case: study.record(case) for case in all_cases()}
    done = {case: found for case, found in records.items() if found}
    write_report(done, options.out, options.name)


if __name__ == "__main__":
    main()
