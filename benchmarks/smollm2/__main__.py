"""python -m smollm2: prune SmolLM2 135M by three methods, evaluate it, train it on, evaluate it
again.

`make bench-smollm2` makes the environment and calls this. Finished cases are kept in the work
folder, so that the same command continues where it was cut off; a training continues in its middle.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import host_machine

from smollm2.cases import (
    CALIBRATION_SAMPLES,
    COMMON,
    HEALING,
    HEALING_STEPS,
    RECOVERY_STEPS,
    TRAINING,
    Case,
    Study,
    all_cases,
    recoveries,
)

TEXTS = ("english", "code", "GPL-3")
Records = Mapping[Case, Mapping[str, Any]]
NOTE = (
    "Perplexity of transformers on the exported folder, in bf16, in windows of 1,024 tokens, eight "
    "of each text at most. Bytes of state are those of a run on one rank with AdamW in bf16. "
    "Compare lines with each other: the texts are short, and the model has certainly read Python's "
    "standard library before."
)


def write_report(records: Records, cases: Sequence[Case], out: Path, name: str) -> None:
    """Write a table and the records of cases into a folder: NAME.md and NAME.json."""
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
    lines += [*recovery_table(records), *remarks(records, cases), ""]
    (out / f"{name}.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines), flush=True)


def table(records: Records) -> Iterator[str]:
    """Perplexities and bytes, a line a case that is done."""
    dense = records.get(Case("dense", 0), {}).get("state_bytes")
    yield "| pruned by | % | healed | English | code | GPL-3 | CPU | peak | state | of dense |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case, found in records.items():
        if "perplexity" not in found or case.recovers:
            continue
        steps = f"{len(found['losses'])} steps, {case.stages}×1" if case.stages else case.heal
        if case.heal == "train":
            steps += f", {HEALING_STEPS} steps"
        used = f"{found['cpu_seconds']:,.0f} s" if "cpu_seconds" in found else ""
        peak = f"{found['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in found else ""
        values = [_rounded(found["perplexity"].get(text)) for text in TEXTS]
        size = records.get(case.untrained, {}).get("state_bytes")
        share = f"{size / dense:.3f}" if size and dense else ""
        gigabytes = f"{size / 1e9:.3f} GB" if size else ""
        cells = (case.method, str(case.percent), steps, *values, used, peak, gigabytes, share)
        yield f"| {' | '.join(cells)} |"


def recovery_table(records: Records) -> Iterator[str]:
    """Perplexities over the dense model's at each sparsity, with tokens and hours of two cores."""
    dense = records.get(Case("dense", 0), {}).get("perplexity")
    rows = [case for case in sorted(recoveries(), key=lambda case: case.percent) if case in records]
    if dense is None or not any(case.recovers for case in rows):
        return
    yield "## Until it speaks again\n"
    yield "Trained: after blocks; taught: with the dense model as the teacher; gradual: taught,"
    yield "while the mask rises from 50 %; mixed: taught, α = 0.5, rate 1e-3. Perplexity over"
    yield "dense, of the same texts; answers: right ones to 111 questions of BIG-bench, zero-shot"
    yield "(chance: 18 %); hours of training on two cores."
    yield ""
    yield "| % | healed | English | over dense | code | over dense | answers | tokens | hours |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in (Case("dense", 0), *rows):
        found = records[case]
        cells = [str(case.percent), case.heal]
        for text in TEXTS[:2]:
            value = found["perplexity"][text]
            cells += [_rounded(value), _rounded(value / found.get("dense", dense)[text])]
        cells.append(f"{found['accuracy']:.0%}" if "accuracy" in found else "")
        cells.append(f"{found['tokens'] / 1e6:.2f}M" if "tokens" in found else "")
        cells.append(f"{found['train_seconds'] / 3600:.2f}" if "tokens" in found else "")
        yield f"| {' | '.join(cells)} |"
    yield ""


def remarks(records: Records, cases: Sequence[Case]) -> Iterator[str]:
    """Whether the losses of the two layouts are equal, and what was not run."""
    for case, found in records.items():
        other = records.get(Case(case.method, case.percent, 2))
        if case.stages == 1 and other is not None:
            pairs = zip(found["losses"], other["losses"], strict=True)
            apart = [step for step, (one, two) in enumerate(pairs, 1) if one != two]
            same = f"differ from step {apart[0]} from those" if apart else "are the same numbers as"
            yield f"The {len(found['losses'])} losses of {case.name} {same} on two stages."
    missing = [case.name for case in cases if case not in records]
    if missing:
        yield f"Not run: {', '.join(missing)}."


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m smollm2", description=__doc__)
    add = arguments.add_argument
    add("--work", type=Path, default=CHECKOUT / ".bench-smollm2", help="model, texts, cases")
    add("--steps", type=int, default=RECOVERY_STEPS, help="of recoveries (default %(default)s)")
    add("--recoveries", action="store_true", help="run the cases of the table of recoveries alone")
    add("--only", default="", help="regular expression on names of cases, such as wanda")
    add("--out", type=Path, default=CHECKOUT / "benchmarks" / "results")
    add("--name", default="smollm2", help="of the files there")
    options = arguments.parse_args()
    study = Study(options.work, options.steps)
    cases = [Case("dense", 0), *recoveries()] if options.recoveries else [*all_cases()]
    for case in cases:
        if study.record(case) is not None or not re.search(options.only, case.name):
            continue
        study.prepare()
        study.run(case)
        print(f"{case.name}: {study.record(case)}", flush=True)
    records = {case: study.record(case) for case in cases}
    done = {case: found for case, found in records.items() if found}
    write_report(done, cases, options.out, options.name)


if __name__ == "__main__":
    main()
