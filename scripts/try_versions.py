"""Tries a Python and a torch: installs a wheel in a new environment, and uses it as a user would.

    python scripts/try_versions.py --python python3.11 --torch 2.13.0
    python scripts/try_versions.py --python python3.13 --without-torch
    python scripts/try_versions.py --torch 2.4.1 --tests tests/samo tests/pipeline

The second installs all but torch, and tries what does without it: settings, schema, job
scripts. The third runs these tests of the checkout as well. Where the package index offers
torch with CUDA only, an environment takes gigabytes. Ends with the code of the first step that
fails; the environment is removed, unless --keep names a folder for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUICK = "not exhaustive and not fault"
"""The tests that `make test` has."""
RUNS_WITHOUT_TORCH = ("numpy", "mpi4py", "pyyaml", "pydantic", "xxhash")
"""The dependencies of the package, but for torch and numba."""
SMALL = ("--set", "model.num_layers=2", "--set", "model.hidden_size=32", "--set", "train.steps=2")
TRAIN = ("train", "--config", "quickstart.yaml", *SMALL, "--set", "train.eval_steps=1")
WITHOUT_TORCH = (
    ("--version",),
    ("config", "show", "--config", "quickstart.yaml"),
    ("config", "schema"),
    ("train", "--help"),
)
WITH_TORCH = (
    *WITHOUT_TORCH,
    TRAIN,
    (*TRAIN, "--set", "train.steps=3", "--resume", "auto"),
    ("report", "runs/quickstart"),
    ("evaluate", "runs/quickstart"),
    ("export", "runs/quickstart", "--to", "torch", "--out", "weights.safetensors"),
    ("plan", "--config", "gpt3_xl.yaml", "--gpus", "64", "--cluster", "summit"),
)


def main() -> int:
    """Try one combination; returns 0 if all of it works."""
    asked = question()
    with tempfile.TemporaryDirectory() as coords:
        folder = Path(coords)
        environment = asked.keep or folder / "env"
        run(asked.python, "-m", "venv", environment)
        python = environment / "bin" / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        [wheel] = folder.glob("*.whl")
        if asked.without_torch:
            run(*pip, *RUNS_WITHOUT_TORCH)
            run(*pip, "--no-deps", wheel)
        else:
            extras = "mpich,text,test" if asked.tests else "mpich"
            run(*pip, f"torch=={asked.torch}", f"{wheel}[{extras}]")
        tried = WITHOUT_TORCH if asked.without_torch else WITH_TORCH
        for words in tried:
            run(python, "-m", "axsparse", *words, cwd=folder)
            print(f"works: axsparse {' '.join(words)}", flush=True)
        if not asked.without_torch:
            mpirun = environment / "bin" / "mpirun"
            run(mpirun, "-n", "4", python, "-m", "axsparse", *TRAIN, "--run-dir=four", cwd=folder)
            print("works: the same on four ranks", flush=True)
        if asked.tests:
            told = run(python, "-m", "pytest", "-q", "-m", QUICK, *asked.tests, cwd=ROOT)
            print(f"works: {' '.join(asked.tests)}: {told.splitlines()[-1]}", flush=True)
        said = run(python, "-c", "import platform; print(platform.python_version())")
    with_torch = "without torch" if asked.without_torch else f"torch {asked.torch}"
    print(f"Python {said.strip()}, {with_torch}: everything that was tried works")
    return 0


def question() -> argparse.Namespace:
    """The arguments of the command line."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--python", default=sys.executable, help="an interpreter")
    which = arguments.add_mutually_exclusive_group(required=True)
    which.add_argument("--torch", help="the version of torch, such as 2.4.1")
    which.add_argument("--without-torch", action="store_true")
    arguments.add_argument("--tests", nargs="+", default=[], help="folders and files of tests")
    arguments.add_argument("--keep", type=Path, help="where the environment is to stay")
    asked = arguments.parse_args()
    if asked.tests and asked.without_torch:
        arguments.error("--tests: the tests need torch; take --torch VERSION")
    return asked


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command; returns what it said, and SystemExit with its code if it fails."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603 - no shell
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"fails: {' '.join(map(str, command))}\n{done.stdout}", file=sys.stderr)
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
