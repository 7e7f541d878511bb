"""python -m smollm2: prune SmolLM2 135M by three methods, judge it, train it on, judge it again.

`make bench-smollm2` makes the environment and calls this. Finished cases are kept in the work
folder, so that the same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from smollm2.cases import Study, all_cases
from smollm2.report import write_report

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
