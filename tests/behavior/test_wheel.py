"""The wheel: whatever the package reads is in it, and it runs outside of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--set", "model.num_layers=2", "--set", "model.hidden_size=32", "--set", "train.steps=2"),
    *("--set", "train.eval_steps=1", "--set", "train.peak_flops=1e12"),
]
pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling: pip install 'axsparse[test]'")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True, timeout=LONGEST_SECONDS)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def axsparse(installed: Path, cwd: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "axsparse", *words],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_file_of_the_package_is_left_out(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())

    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "axsparse").rglob("*")}
    wanted = {path for path in own if "__pycache__" not in path and (ROOT / path).is_file()}
    wanted |= {f"axsparse/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    wanted |= {f"axsparse/launch/{path.name}" for path in (ROOT / "launch").glob("*.sh")}
    assert wanted <= packed
    assert {"axsparse/py.typed", "axsparse/configs/quickstart.yaml"} <= packed


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import axsparse; print(axsparse.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=True,
    )

    assert done.stdout.strip() == str(installed / "axsparse" / "__init__.py")


def test_it_trains_resumes_and_reports_far_from_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    train = ("train", "--config", "quickstart.yaml", *SMALL, "--set", "layout.g_inter=1")

    assert "step 2/2" in axsparse(installed, tmp_path, *train)
    more = axsparse(installed, tmp_path, *train, "--set", "train.steps=3", "--resume", "auto")
    assert "step 3/3" in more
    axsparse(installed, tmp_path, "report", "runs/quickstart")
    axsparse(
        installed, tmp_path, "export", "runs/quickstart", "--to", "torch", "--out", "w.safetensors"
    )
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()


def test_what_comes_along_is_found(installed: Path, tmp_path: Path) -> None:
    submit = ("submit", "--ranks", "2", "--time", "1:00:00", "--config", "quickstart.yaml")

    question = ("--config", "gpt3_xl.yaml", "--gpus", "64", "--cluster", "summit")
    assert "recommended" in axsparse(installed, tmp_path, "plan", *question)
    for scheduler, sign in (("slurm", "#SBATCH"), ("lsf", "#BSUB"), ("pbs", "#PBS")):
        assert sign in axsparse(installed, tmp_path, *submit, f"--{scheduler}")
    assert "#flux:" in axsparse(installed, tmp_path, *submit, "--flux")
