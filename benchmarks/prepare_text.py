"""Speed and memory of `axsparse data prepare` on one large text file.

    python benchmarks/prepare_text.py --folder /tmp/text --megabytes 300 --rounds 3

The text: the source files of Python's standard library in random order, over and over, in
one file. Each round prepares it by every variant in turn, as a command of its own: seconds
include the start of Python and of the workers, and everything down to the disk. Memory is
the sum of the proportional set sizes of all processes, sampled from outside, the pages of
shared libraries counted once. A tenth of the text shows what memory does not depend on.
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from peak_memory import field, tree

MEGABYTE = 1_000_000
SECONDS = 0.1
VARIANTS = {
    "bytes, one document": ["--validation-fraction", "0"],
    "bytes, a document a file": [
        *("--validation-fraction", "0.01", "--split-documents", "regex:^%% file "),
    ],
    "BPE of 8,192 words, one document": ["--validation-fraction", "0", "--tokenizer"],
}


def write_text(path: Path, size: int, seed: int) -> int:
    """Write at least `size` bytes; returns how many."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for name in sorted(root.rglob("*.py")):
        if "site-packages" not in name.parts:
            try:
                files.append(f"%% file {name.relative_to(root)}\n{name.read_text('utf-8')}\n")
            except UnicodeDecodeError:
                continue
    shuffle = random.Random(seed)  # noqa: S311 - no secret
    written = 0
    with path.open("wb") as file:
        while written < size:
            shuffle.shuffle(files)
            for text in files:
                written += file.write(text.encode())
                if written >= size:
                    break
    return written


def prepare(text: Path, out: Path, workers: int, options: list[str]) -> dict[str, Any]:
    """One run of the command: seconds, and the peak memory of all of its processes."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "axsparse", "data", "prepare", str(text), "--out", str(out)]
    began, used = time.monotonic(), cpu_seconds()
    process = subprocess.Popen(  # noqa: S603 - our own command
        [*command, "--workers", str(workers), *options], stdout=subprocess.DEVNULL
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(field(p, "smaps_rollup", "Pss") for p in tree(process.pid)))
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(process.returncode)
    sidecar = json.loads((out / "tokens.json").read_text())
    return {
        "seconds": seconds,
        "cpu": cpu_seconds() - used,
        "peak": peak,
        "sidecar": sidecar,
    }


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the text and the tokens")
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--machine", default="unnamed", help="how the result calls it")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/prepare_text.json"))
    arguments = parser.parse_args()
    folder, workers = arguments.folder, arguments.workers
    folder.mkdir(parents=True, exist_ok=True)
    text, tenth, out = folder / "text.txt", folder / "tenth.txt", folder / "tokens"
    size = write_text(text, arguments.megabytes * MEGABYTE, seed=1)
    small = write_text(tenth, arguments.megabytes * MEGABYTE // 10, seed=1)

    # The vocabulary is learnt once, by itself: its time does not grow with the text.
    learn = ["--validation-fraction", "0", "--train-bpe", "8192"]
    learnt = prepare(tenth, out, workers, learn)
    tokenizer = folder / "tokenizer.json"
    shutil.copy(out / "tokenizer.json", tokenizer)

    head = {
        "machine": arguments.machine,
        "load_at_the_start": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "tokenizers": version("tokenizers"),
        "workers": workers,
        "text_bytes": size,
        "tenth_bytes": small,
        "learning 8,192 words from the tenth, and preparing it": {
            "seconds": round(learnt["seconds"], 1),
            "cpu_seconds": round(learnt["cpu"], 1),
            "peak_pss_megabytes": round(learnt["peak"] / MEGABYTE, 1),
        },
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    smalls: dict[str, dict[str, Any]] = {}
    for number in range(arguments.rounds):
        for name, options in VARIANTS.items():
            extra = [str(tokenizer)] if options[-1] == "--tokenizer" else []
            runs[name].append(prepare(text, out, workers, [*options, *extra]))
            if number == 0:
                smalls[name] = prepare(tenth, out, workers, [*options, *extra])
            print(f"{number} {name}: {size / MEGABYTE / runs[name][-1]['seconds']:.1f} MB/s")
        # After each round, so that a long run can be stopped.
        done = {name: summary(size, runs[name], smalls[name]) for name in VARIANTS}
        result = {**head, "rounds": number + 1, "variants": done}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(arguments.json.read_text())


def summary(size: int, runs: list[dict[str, Any]], small: dict[str, Any]) -> dict[str, Any]:
    """What the runs of one variant come to."""
    sidecar = runs[0]["sidecar"]
    return {
        "megabytes_per_second": spread([size / MEGABYTE / run["seconds"] for run in runs]),
        "megabytes_per_cpu_second": spread([size / MEGABYTE / run["cpu"] for run in runs]),
        "seconds": spread([run["seconds"] for run in runs]),
        "cpu_seconds": spread([run["cpu"] for run in runs]),
        "peak_pss_megabytes": spread([run["peak"] / MEGABYTE for run in runs]),
        "peak_pss_megabytes_of_a_tenth": round(small["peak"] / MEGABYTE, 1),
        "documents": sidecar["train"]["documents"],
        "tokens": sidecar["train"]["tokens"],
        "dtype": sidecar["dtype"],
    }


if __name__ == "__main__":
    main()
