"""All checks that need a GPU, in parts, as a table and as JSON; `scripts/gpu_check.sh` starts it.

    scripts/gpu_check.sh [--part step,kernels,bandwidth,speed,…] [--only NAMES] [--seconds 560]
        [--mpi-wheel mpich-5.0.2-….whl] [--wheel OTHER.whl] [--save FILE]
    scripts/gpu_check.sh --quarter 1|2|3 [--mpi-wheel …]
    scripts/gpu_check.sh --merge A.json B.json --save benchmarks/results/gpu_check-h200.json

    step         a training of one rank on the GPU against the same one on the CPU; doctor
    kernels      the kernels' contract
    bandwidth    the kernels' share of the copy's bandwidth; unfused torch in turn
    beside       GPT-3 2.7B next to plain torch and FSDP2, in turn (`gpu_beside.py`)
    speed        GPT-3 2.7B with microbatches of 1 and 4: steps, part of the matrix peak, memory,
                 a profile
    transport    staged links between ranks that share it; streams and phases; NCCL at size 1
    numerics     whole trainings of up to four ranks that share the GPU, against the oracle
    commands     what users type, on the GPU and on the CPU
    big          GPT-3 13B; dense 13B does not fit; the largest GPT that does

A quarter of an hour on a GPU takes three calls of at most 290 seconds, by --quarter: 1 is `beside`,
2 `big`, and 3 the least proven parts, `numerics` and `commands`. A repeated call
continues with the missing ones.

Parts run in this order, the most urgent first. None depends on what another has set up. Side by
side they are no faster, since processes that share a GPU take turns. Only `numerics`, and of
`transport` and `commands` a part, need an MPI library. Models are as large as the memory that is
there. Where an earlier call has saved, the parts that run are replaced and the others stay, so that
one machine's checks may be made in several calls. Without --save the file is
$OUT/gpu_check-<device>.json, or in benchmarks/results/ without $OUT.

A part that has no time left, or lacks something, is skipped with the reason. The exit code is 1 if
a check fails, 69 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_report import (
    EXIT_FAILED,
    EXIT_NO_DEVICE,
    Outcome,
    Report,
    Row,
    count,
    failed,
    judged,
    table,
)

HERE = Path(__file__).parent
PARTS = (
    *("step", "kernels", "bandwidth", "beside", "speed"),
    *("transport", "numerics", "commands", "big"),
)
QUARTERS = {1: ("beside",), 2: ("big",), 3: ("numerics", "commands")}
QUARTER_SECONDS = 290.0
SHARE_AIM = 0.8
SHARED_NCCL = (2, 30)
"""From where two ranks may share a GPU over NCCL."""
TRAININGS = {
    "speed": ("2.7b", "2.7b-4"),
    "big": ("largest", "13b", "dense-13b"),
}
FAILURE_TEXT = 4_000
"""Letters that are kept of what a test that failed said."""
EXPECTED_SECONDS = 20
"""A part is not begun with less time left."""


@dataclass(frozen=True)
class Around:
    """The environment of a part: the machine, its time and a folder."""

    host: Host
    seen: Mapping[str, Any]
    ends: float
    folder: Path
    only: str = ""
    """The names of the tests to run, as pytest's -k takes them; empty: all."""
    earlier: Mapping[str, Any] | None = None
    """The details that an earlier call has saved."""
    shared_nccl: bool = False
    """Whether to try NCCL between two ranks on one GPU, an experiment of NCCL's."""

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def script(
        self, name: str, *words: str, earlier: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """What a benchmark of this folder has saved, and its error, empty if there was none;
        `earlier` are details to which it adds."""
        saved = self.folder / f"{name}.json"
        saved.unlink(missing_ok=True)  # another run's
        if earlier:
            saved.write_text(json.dumps({"measured on": {}, "checks": [], "details": earlier}))
        command = [sys.executable, str(HERE / f"{name}.py"), *words, "--save", str(saved)]
        ended = self.host.run(command, self.left)
        print(ended.stdout, end="", flush=True)
        if ended.code != 0:
            print(ended.stderr[-FAILURE_TEXT:], file=sys.stderr, flush=True)
        details = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else None
        return "" if ended.code == 0 else ended.last_words, details


Found = tuple[list[Row], Any]


# -- environment ----------------------------------------------------------------------------


def environment(around: Around) -> Found:
    """The properties of the machine; nothing is started for them."""
    part, seen = "environment", around.seen
    rows = [
        Row(part, name, "info", str(seen[name]))
        for name in ("device", "driver", "torch", "CUDA", "NCCL", "CuPy", "MPI", "python", "cores")
        if seen.get(name) is not None
    ]
    for name, remedy in (
        ("CuPy", "install the extra cuda12 or cuda13"),
        ("MPI", "give --mpi-wheel, or load the site's module"),
    ):
        if name not in seen:
            rows.append(Row(part, name, "fail", f"cannot be imported; {remedy}"))
    if around.host.launcher() is None:
        rows.append(Row(part, "mpirun", "fail", "is not on PATH; give --mpi-wheel"))
    return rows, None


def doctor(around: Around) -> Found:
    part = "step"
    ended = around.host.run(
        [
            *(sys.executable, "-m", "axsparse", "doctor"),
            *("--run-dir", str(around.folder / "run")),
        ],
        min(120, around.left),
    )
    findings = ended.stdout.splitlines()
    if not findings:
        return [Row(part, "axsparse doctor", "fail", ended.last_words)], None
    wrong = [line for line in findings if line.startswith("✗")]
    said = "; ".join(wrong) or "nothing is wrong"
    return [judged(part, "axsparse doctor", said, "nothing wrong", good=not wrong)], findings


# -- tests ----------------------------------------------------------------------------------


def pytest(around: Around, part: str, files: Sequence[str], *words: str) -> Found:
    """A row for each file, and one for each test that failed; details are what these said."""
    rows: list[Row] = []
    said: dict[str, str] = {}
    for name in files:
        saved = around.folder / f"{name}.xml"
        ended = around.host.run(
            [
                *(sys.executable, "-m", "pytest", f"tests/gpu/{name}.py", "-v"),
                # Warnings of other versions than the ones developed with are no failures.
                *("-W", "default", "-p", "no:cacheprovider", f"--junitxml={saved}", *words),
                *(["-k", around.only] if around.only else []),
            ],
            around.left,
        )
        if saved.exists():
            rows += outcomes(part, name, saved)
            said |= failures(saved)
        if ended.late or not saved.exists():
            # The last line names the test that ran.
            lines = [ended.last_words, *ended.stdout.splitlines()[-1:]]
            rows.append(Row(part, name, "fail", "; ".join(lines)[:300]))
    return rows, said or None


def outcomes(part: str, name: str, saved: Path) -> list[Row]:
    """The outcomes in a JUnit file."""
    tests = list(ElementTree.parse(saved).iter("testcase"))  # noqa: S314  pytest wrote it just now
    bad = [test for test in tests if has(test, "failure") or has(test, "error")]
    skipped = [test for test in tests if has(test, "skipped")]
    passed = len(tests) - len(bad) - len(skipped)
    said = f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    whole: Outcome = "fail" if bad else "pass" if passed else "skip"
    if not tests:
        whole, said = "fail", "no test was found"
    rows = [Row(part, name, whole, said, "all pass")]
    for test in bad:
        found = test.find("failure")
        found = test.find("error") if found is None else found
        assert found is not None
        lines = (found.get("message") or "").splitlines() or ["no message"]
        rows.append(Row(part, str(test.get("name")), "fail", lines[0][:300]))
    reasons = {
        str(found.get("message")) for test in skipped if (found := test.find("skipped")) is not None
    }
    rows += [Row(part, name, "skip", reason[:300]) for reason in sorted(reasons)]
    return rows


def failures(saved: Path) -> dict[str, str]:
    """The end of the output of each failed test: tracebacks, and the output of its jobs."""
    tests = ElementTree.parse(saved).iter("testcase")  # noqa: S314  pytest wrote it just now
    return {
        f"{test.get('name')}": (found.text or "")[-FAILURE_TEXT:]
        for test in tests
        for found in (*test.iter("failure"), *test.iter("error"))
    }


def has(test: ElementTree.Element, what: str) -> bool:
    return test.find(what) is not None


# -- parts ----------------------------------------------------------------------------------


def tests(part: str, file: str) -> Callable[[Around], Found]:
    return lambda around: pytest(around, part, [file])


def bandwidth(around: Around) -> Found:
    part = "bandwidth"
    problem, shares = around.script("gpu_kernels")
    rows = [Row(part, "gpu_kernels", "fail", problem)] if problem else bandwidths(part, shares)
    return rows, {"gpu_kernels": shares}


def bandwidths(part: str, shares: Mapping[str, Any]) -> list[Row]:
    """Each kernel against the copy, and against torch that fuses nothing."""
    rows = []
    medians = {name: row["ms"][1] for name, row in shares.items() if "ms" in row}
    for name in medians:
        if name == "copy" or name.endswith("torch"):
            continue
        low, middle, high = shares[name]["share of copy bandwidth"]
        rows.append(
            judged(
                part,
                f"{name}, of the copy's bandwidth",
                f"{middle:.2f} [{low:.2f}, {high:.2f}], {medians[name]:.3g} ms",
                f">= {SHARE_AIM:.0%}",
                good=middle >= SHARE_AIM,
            )
        )
    for fused, name in (("compress, int32", "compress"), ("AdamW, int32", "AdamW")):
        times = medians[f"{name}, torch"] / medians[fused]
        said = f"{times:.2f} times as fast"
        rows.append(judged(part, f"{fused}, against torch", said, "> 1", good=times > 1))
    return rows


def step(around: Around) -> Found:
    rows, said = pytest(around, "step", ["test_first_steps_gpu"])
    checked, findings = doctor(around)
    return [*rows, *checked], {"tests": said, "doctor": findings}


def transport(around: Around) -> Found:
    part, what = "transport", "two ranks on one GPU by NCCL"
    version, skipped = around.seen.get("NCCL"), []
    if version is None:
        skipped = [Row(part, "NCCL", "skip", "this torch is built without it")]
    elif tuple(map(int, re.findall(r"\d+", version)[:2])) < SHARED_NCCL:
        skipped = [Row(part, what, "skip", f"NCCL {version}, from 2.30 on only")]
    elif not around.shared_nccl:
        skipped = [Row(part, what, "skip", "not asked for; --shared-nccl")]
    else:
        around.host.environment["AXSPARSE_NCCL_SHARED"] = "1"
    rows, details = pytest(around, part, ["test_transport_gpu"])
    return [*rows, *skipped], details


def beside(around: Around) -> Found:
    """`gpu_beside.py` adds to what an earlier call has saved."""
    seconds = str(max(1, int(around.left) - 5))
    problem, saved = around.script("gpu_beside", "--seconds", seconds, earlier=around.earlier)
    checks = [] if saved is None else saved["checks"]
    rows = [Row(**row) for row in checks]
    if problem or saved is None:
        rows.append(Row("beside", "gpu_beside", "fail", problem))
    return rows, saved and saved["details"].get("beside")


def trainings(part: str) -> Callable[[Around], Found]:
    def run(around: Around) -> Found:
        seconds = str(max(1, int(around.left) - 10))
        problem, saved = around.script("gpu_train", *TRAININGS[part], "--seconds", seconds)
        if saved is None:
            return [Row(part, "gpu_train", "fail", problem)], None
        rows = [
            Row(part, f"{row['part']}: {row['check']}", *(row[key] for key in KEYS))
            for row in saved["checks"]
        ]
        if problem and not failed(rows):
            rows.append(Row(part, "gpu_train", "fail", problem))
        return rows, saved["details"]

    return run


KEYS = ("outcome", "measured", "aim")
RUN: dict[str, Callable[[Around], Found]] = {
    "step": step,
    "kernels": tests("kernels", "test_kernels_on_gpu"),
    "transport": transport,
    "commands": tests("commands", "test_commands_gpu"),
    "numerics": tests("numerics", "test_training_gpu"),
    "bandwidth": bandwidth,
    "beside": beside,
    "speed": trainings("speed"),
    "big": trainings("big"),
}


# -- the command ----------------------------------------------------------------------------


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", default=",".join(PARTS), help="parts, with commas in between; all")
    add("--quarter", type=int, choices=tuple(QUARTERS), help="the parts of one of three calls")
    add("--seconds", type=float, default=560.0, help="for all parts together (default 560)")
    add("--mpi-wheel", type=Path, help="an mpich wheel, where no MPI library is installed")
    add("--wheel", type=Path, action="append", default=[], help="another missing package")
    add("--only", default="", metavar="NAMES", help="of the tests only these; pytest's -k")
    add("--shared-nccl", action="store_true", help="try NCCL between two ranks on one GPU")
    add("--save", type=Path, help="write JSON here")
    add("--merge", type=Path, nargs="+", metavar="JSON", help="only join these into --save")
    arguments = parser.parse_args(words)
    wanted = arguments.part.split(",")
    if arguments.quarter is not None:
        wanted = [*QUARTERS[arguments.quarter]]
        arguments.seconds = min(arguments.seconds, QUARTER_SECONDS)
    arguments.parts = [part for part in PARTS if part in wanted]
    for part in wanted:
        if part not in PARTS:
            parser.error(f"--part {part}: no part; choose of {', '.join(PARTS)}")
    wheels = [arguments.mpi_wheel] if arguments.mpi_wheel else []
    arguments.wheels = [*wheels, *arguments.wheel]
    for file in (*arguments.wheels, *(arguments.merge or ())):
        if not file.is_file():
            parser.error(f"{file}: no such file")
    if arguments.merge and arguments.save is None:
        parser.error("--merge: say by --save where to")
    return arguments


def result_path(device: str, environ: Mapping[str, str]) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    folder = Path(environ["OUT"]) if environ.get("OUT") else ROOT / "benchmarks" / "results"
    return folder / f"gpu_check-{name}.json"


def check(around: Around, parts: Sequence[str], report: Report) -> list[Row]:
    """Run the parts, save after each, and return what these say."""
    rows: list[Row] = []
    for part in ("environment", *parts):
        own, details = environment(around) if part == "environment" else part_of(part, around)
        report.put(part, own, details)
        print("\n".join(table(own)), flush=True)
        rows += own
    return rows


def part_of(part: str, around: Around) -> Found:
    """The findings of a part, and its seconds; one that breaks is a row as well."""
    if around.left < EXPECTED_SECONDS:
        return [Row(part, "all", "skip", "no time left; name it by --part")], None
    began = time.monotonic()
    try:
        rows, details = RUN[part](around)
    except Exception as error:  # the other parts continue
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        rows, details = [Row(part, "all", "fail", said[:300])], None
    rows.append(Row(part, "seconds", "info", f"{time.monotonic() - began:.0f}"))
    return rows, details


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    ends = time.monotonic() + arguments.seconds
    if arguments.merge:
        joined = Report(arguments.save, {}, [], {})
        for path in arguments.merge:
            joined.merge(Report.opened(path, {}))
        print("\n".join(table(joined.rows)))
        return EXIT_FAILED if failed(joined.rows) else 0
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Background processes of a shell ignore it, and so do their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    host = Host()
    try:
        for wheel in arguments.wheels:
            host.add_wheel(wheel)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return EXIT_FAILED
    seen = host.look()
    if seen.get("problem") or seen["missing"]:
        said = seen.get("problem") or f"lacks {', '.join(seen['missing'])}; give --wheel"
        print(f"gpu_check: {sys.executable}: {said}", file=sys.stderr)
        return EXIT_FAILED
    if "device" not in seen:
        print("gpu_check: no CUDA device is here; every part is skipped")
        return EXIT_NO_DEVICE
    report = Report.opened(arguments.save or result_path(seen["device"], os.environ), seen)
    with tempfile.TemporaryDirectory() as folder:
        around = Around(
            *(host, seen, ends, Path(folder), arguments.only),
            *(report.details, arguments.shared_nccl),
        )
        rows = check(around, arguments.parts, report)
    print(f"\n{count(rows)}; saved in {report.path}")
    return EXIT_FAILED if failed(rows) else 0


ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / "build" / "gpu_check"
"""The folder of unpacked wheels: next to the environment, which stays as it is."""
PACKAGES = ("torch", "numpy", "mpi4py", "yaml", "pydantic", "xxhash", "pytest")
MPICH = "libmpi.so.12"
GRACE = 10.0
"""Seconds beyond its limit in which a command may write what it has."""
LOOK = """
import importlib.util, json, os, platform
packages = {names!r}
missing = [name for name in packages if importlib.util.find_spec(name) is None]
found = {{"missing": missing, "python": platform.python_version(), "cores": os.cpu_count()}}
if "torch" not in missing:
    import torch
    found["torch"] = torch.__version__
    found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["memory"] = properties.total_memory
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    import cupy
    found["CuPy"] = cupy.__version__
except ImportError:
    pass
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    found["MPI"] = MPI.Get_library_version().splitlines()[0].strip()
except (ImportError, RuntimeError):
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Negative if it ran past its limit and was killed, or by a signal."""
    stdout: str
    stderr: str
    late: bool = False

    @property
    def last_words(self) -> str:
        """A line for a table."""
        if self.late:
            return "ran out of time"
        lines = [line for line in (self.stderr or self.stdout).splitlines() if line.strip()]
        return f"exit code {self.code}: {lines[-1].strip() if lines else 'nothing said'}"[:300]


class Host:
    """This machine, with what wheels add to it."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        own = dict(os.environ if environment is None else environment)
        own["OMP_NUM_THREADS"] = "1"
        own["PYTHONPATH"] = _joined(str(ROOT), own.get("PYTHONPATH"))
        self.environment = own

    def look(self) -> dict[str, Any]:
        """Versions and device, by a process that leaves nothing on the GPU."""
        ended = self.run([sys.executable, "-c", LOOK.format(names=PACKAGES)], 120)
        if ended.code != 0:
            return {"missing": [], "problem": ended.last_words}
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        found["driver"] = self._driver()
        return found

    def _driver(self) -> str | None:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if shutil.which(ask[0]) is None:
            return None
        ended = self.run(ask, 30)
        return ended.stdout.splitlines()[0].strip() if ended.code == 0 else None

    def launcher(self) -> str | None:
        """The mpirun that tests take."""
        beside = Path(sys.executable).parent / "mpirun"
        if beside.is_file():
            return str(beside)
        return shutil.which("mpirun", path=self.environment.get("PATH"))

    def run(self, command: Sequence[str], seconds: float) -> Ended:
        """In a group of processes that is killed when time is over."""
        # Files, since what outlives its parent would keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(  # noqa: S603  our own scripts
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=self.environment,
                cwd=ROOT,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(max(seconds, 0.0))
            except subprocess.TimeoutExpired:
                late = True
                # Tests report what they have, and end the jobs that they started in groups of
                # their own.
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            texts = []
            for file in (out, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return Ended(code, texts[0], texts[1], late)

    # -- wheels -------------------------------------------------------------------------------

    def add_wheel(self, wheel: Path, folder: Path = UNPACKED) -> None:
        """Add a wheel's modules, programs and libraries to the environment of commands; ValueError
        if it is none.

        `pip install --target` would leave out files that belong next to an environment's Python:
        the programs and libraries of an MPI wheel are in its `.data` folder.
        """
        home = folder / wheel.name.removesuffix(".whl")
        if not home.is_dir():
            partial = home.with_name(f"{home.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                with zipfile.ZipFile(wheel) as file:
                    file.extractall(partial)
            except (OSError, zipfile.BadZipFile) as reason:
                raise ValueError(f"{wheel}: cannot be unpacked ({reason})") from reason
            partial.rename(home)
        own = self.environment
        own["PYTHONPATH"] = _joined(str(home), own.get("PYTHONPATH"))
        for data in home.glob("*.data/data"):
            self._add_mpi(data)

    def _add_mpi(self, data: Path) -> None:
        programs, libraries = data / "bin", data / "lib"
        # A zip file unpacked by Python loses who may run what.
        for program in programs.iterdir() if programs.is_dir() else ():
            program.chmod(0o755)
        own = self.environment
        own["PATH"] = _joined(str(programs), own.get("PATH"))
        own["LD_LIBRARY_PATH"] = _joined(str(libraries), own.get("LD_LIBRARY_PATH"))
        if (libraries / MPICH).is_file():
            own["MPI4PY_LIBMPI"] = str(libraries / MPICH)


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))


if __name__ == "__main__":
    sys.exit(main())
