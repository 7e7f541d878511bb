"""What `gpu_check.py` needs of a machine: packages, an MPI library, and commands that end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / "build" / "gpu_check"
"""Where wheels go: beside the environment, which stays as it is."""
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
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # What a shell starts in the background ignores it, and hands that on.
            signal.signal(signal.SIGINT, signal.default_int_handler)
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
        """Make a wheel's modules, programs and libraries those of commands; ValueError if it is
        none.

        `pip install --target` would leave out what belongs beside an environment's Python: the
        programs and libraries of an MPI wheel are in its `.data` folder.
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
