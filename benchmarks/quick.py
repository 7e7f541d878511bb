"""One or two figures of every layer of the system in a few minutes, compared with the last ones.

    make bench                       # or: python benchmarks/quick.py [--only NAME ...]
    make bench ARGS=--save           # also writes the file that is to be committed

Compares with benchmarks/results/quick-<kind of machine>.json: the kind is processor, cores and
version of torch. A figure is better or worse only beyond the spread of both (`figures.py`). Times
are of CPU, or ratios of things measured in turn, wherever that says the same, since others may use
the machine. Ends with 1 if a measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from figures import Figure, comparison_lines, figure, host_machine, kind_of, shuffled

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
SECONDS = 300
"""Limit of one measurement."""

Figures = dict[str, Figure]


# -- commands ---------------------------------------------------------------------------------


def _cpu_seconds(arguments: Sequence[str], rounds: int) -> list[float]:
    """CPU seconds of a command of the package, once to warm up and then so often."""
    taken = []
    for _ in range(rounds + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "axsparse", *arguments]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return taken[1:]


def commands() -> Figures:
    return {"answer of --help": figure("CPU s", _cpu_seconds(["--help"], 5))}


def planner() -> Figures:
    question = ["plan", "--config", "gpt3_2.7b.yaml", "--gpus", "512", "--cluster", "summit"]
    return {"plan of 2.7B on 512 GPUs": figure("CPU s", _cpu_seconds(question, 3))}


# -- in one process ---------------------------------------------------------------------------


def pruning() -> Figures:
    """Milliseconds of CPU to choose a tenth of the entries of a matrix by magnitude."""
    import torch

    from axsparse.pruning.criteria import Criterion

    torch.set_num_threads(1)
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1))
    taken = []
    for _ in range(8):
        began = time.process_time()
        Criterion("magnitude").mask("w", (2048, 2048), lambda: weight, weight.numel() // 10, None)
        taken.append(1e3 * (time.process_time() - began))
    return {"mask of 4.2 M entries": figure("ms of CPU", taken[2:])}


def encodings() -> Figures:
    """Gathering and scattering by mask, over int32 in the same round, of a tenth of 4.2 M entries.

    Eight tensors take turns, so that none is found in the cache: a layer's gradient is fresh from
    the matrix product, but its index was last read a microbatch ago.
    """
    import torch

    from axsparse.samo.index.base import make_index

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(2048 * 2048, generator=generator) < 0.1 for _ in range(8)]
    dense = [torch.randn(2048 * 2048, generator=generator).to(torch.bfloat16) for _ in masks]
    values = [values_D[mask] for values_D, mask in zip(dense, masks, strict=True)]
    indices = {kind: [make_index(mask, kind) for mask in masks] for kind in ("int32", "mask")}
    found = {}
    for operation in ("gather", "scatter"):
        taken: dict[str, list[float]] = {kind: [] for kind in indices}
        for number in range(-2, 16):  # two to warm up
            turn = number % len(masks)
            for kind in shuffled(indices, number):
                index = indices[kind][turn]
                began = time.perf_counter()
                if operation == "gather":
                    index.gather(dense[turn], 0, index.kept)
                else:
                    index.scatter(dense[turn], values[turn], 0)
                if number >= 0:
                    taken[kind].append(time.perf_counter() - began)
        pairs = zip(taken["mask"], taken["int32"], strict=True)
        found[f"{operation} by mask, numba"] = figure(
            "× int32", [own / other for own, other in pairs]
        )
    return found


def step() -> Figures:
    """A training step of one block in one process, SAMO and dense in turn."""
    import torch
    from step_time import DENSE, SHOWN, run

    torch.set_num_threads(1)
    rows = run(layers=1, rounds=5)
    dense, samo = rows[DENSE].cpu, rows["SAMO"].cpu
    found = {
        "step, dense": figure("CPU s", dense),
        "step, SAMO": figure("× dense", [a / b for a, b in zip(samo, dense, strict=True)]),
    }
    names = {"compress": "compression", "optimizer": "the optimizer"}
    for name, row in rows.items():
        for phase in SHOWN:
            pairs = zip(row.phases[phase], row.cpu, strict=True)
            found[f"share of {names[phase]} in a {name} step"] = figure(
                "%", [100 * part / whole for part, whole in pairs]
            )
    return found


def checkpoints() -> Figures:
    """Writing a checkpoint at once, over writing and syncing as many bytes."""
    import torch
    from step_time import config_of, trainer_of

    torch.set_num_threads(1)
    ratios = []
    with tempfile.TemporaryDirectory(prefix="axsparse-bench-", dir=FOLDER) as folder:
        every = {"every": 0, "keep_last": 1}
        config = config_of(4, 768, 16, checkpoint=every, run_dir=f"{folder}/run")
        trainer = trainer_of(config, quiet=False)
        for number in range(6):
            trainer.step()
            began = time.perf_counter()
            saved = trainer.save()
            taken = time.perf_counter() - began
            nbytes = sum(file.stat().st_size for file in saved.iterdir())
            began = time.perf_counter()
            with (Path(folder) / "plain").open("wb") as plain:
                plain.write(bytes(nbytes))
                os.fsync(plain.fileno())
            if number:  # the first warms up
                ratios.append(taken / (time.perf_counter() - began))
        trainer.close()
    return {"checkpoint, written": figure("× its bytes", ratios)}


# -- on several ranks -------------------------------------------------------------------------


def _on_ranks(*arguments: str) -> dict[str, Any]:
    """The result of one of the benchmarks of `on_ranks.py` on two ranks."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    command = [mpirun, "-n", "2", sys.executable, str(FOLDER / "on_ranks.py"), *arguments]
    done = subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def replicas() -> Figures:
    found = _on_ranks("sums")
    return {"sum of 17 MB over 2 replicas": figure("× MPI", found["to_mpi_allreduce"])}


def bubble() -> Figures:
    found = _on_ranks("bubble", "--rounds", "6")
    return {"bubble of 2 stages, 16 microbatches": figure("ms", found["bubble_ms"])}


LAYERS: Mapping[str, Callable[[], Figures]] = {
    found.__name__: found
    for found in (commands, planner, pruning, encodings, step, checkpoints, replicas, bubble)
}
"""Measurements by name, in the order in which they are taken."""


# -- all together -----------------------------------------------------------------------------


def measure(name: str) -> dict[str, Any]:
    """The figures of one layer, measured in a separate process; RuntimeError if it fails."""
    command = [sys.executable, str(FOLDER / "quick.py"), "--measure", name]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}\n{done.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--save", action="store_true", help="write the result, to be committed")
    parser.add_argument("--measure", choices=LAYERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        found = LAYERS[arguments.measure]()
        print(json.dumps({name: one.row() for name, one in found.items()}))
        return 0
    machine = host_machine()
    path = RESULTS / f"quick-{kind_of(machine)}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    old: dict[str, Any] = before["figures"] if before else {}
    new: dict[str, Any] = {}
    failed = False
    for name in arguments.only:
        began = time.monotonic()
        try:
            rows = measure(name)
        except RuntimeError as error:
            failed = True
            print(f"{name}: failed: {error}", file=sys.stderr)
            continue
        new |= rows
        lines = comparison_lines(rows, {one: old[one] for one in rows if one in old})
        print("\n".join(lines), f"  ({time.monotonic() - began:.0f} s)", flush=True)
    if not before:
        print(f"nothing to compare with: no results/{path.name} is there; --save writes it")
    elif set(arguments.only) == set(LAYERS):
        print("\n".join(comparison_lines({}, {n: row for n, row in old.items() if n not in new})))
    if arguments.save and not failed:
        saved = {**old, **new} if len(arguments.only) < len(LAYERS) else new
        load = [round(value, 2) for value in os.getloadavg()]
        result = {"machine": machine, "load_at_the_end": load, "figures": saved}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(path.relative_to(FOLDER.parent))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
