"""The wheel: whatever the package reads is in it, and it runs outside of the checkout."""

from __future__ import annotations

import os
import shlex
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


def ran(cwd: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(installed: Path, cwd: Path, *words: str) -> str:
    return ran(cwd, sys.executable, *words, PYTHONPATH=str(installed))


def axsparse(installed: Path, cwd: Path, *words: str) -> str:
    return python(installed, cwd, "-m", "axsparse", *words)


def test_no_file_of_the_package_is_left_out(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())

    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "axsparse").rglob("*")}
    wanted = {path for path in own if "__pycache__" not in path and (ROOT / path).is_file()}
    wanted |= {f"axsparse/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    for name in ("launch", "examples"):
        files = (path for path in (ROOT / name).rglob("*") if "__pycache__" not in path.parts)
        wanted |= {f"axsparse/{path.relative_to(ROOT)}" for path in files if path.is_file()}
    wanted.add("axsparse/constraints.txt")
    assert wanted <= packed
    assert {"axsparse/py.typed", "axsparse/configs/quickstart.yaml"} <= packed


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that was installed from a bundle, with no index to ask."""
    folder = tmp_path_factory.mktemp("bundled")
    bundle = [sys.executable, "-m", "axsparse", "bundle", str(folder / "wheels")]
    done = subprocess.run(
        [*bundle, "--extra", "mpich"], capture_output=True, text=True, timeout=900, check=False
    )
    if "pip download: failed" in done.stderr:
        pytest.skip("pip reaches no index of packages")
    assert done.returncode == 0, done.stderr
    said = shlex.split(done.stdout.splitlines()[-1])
    assert said[:5] == ["pip", "install", "--no-index", "--find-links", "wheels"]
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=300)
    pip = [str(folder / "env" / "bin" / "python"), "-m", *said, "--quiet"]
    subprocess.run(pip, cwd=folder, check=True, timeout=900)
    return folder / "env" / "bin"


def test_a_bundle_installs_without_a_network_and_trains_on_two_ranks(
    bundled: Path, tmp_path: Path
) -> None:
    train = ["axsparse", "train", "--config", "quickstart.yaml", *SMALL]
    path = f"{bundled}{os.pathsep}{os.environ['PATH']}"

    said = ran(tmp_path, "mpirun", "-n", "2", *train, PATH=path, PYTHONPATH="")

    assert "2 ranks = 2 stages × 1 replica" in said
    assert "step 2/2" in said


def test_it_trains_resumes_and_reports_far_from_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    train = ("train", "--config", "quickstart.yaml", *SMALL, "--set", "layout.g_inter=1")

    where = python(installed, tmp_path, "-c", "import axsparse; print(axsparse.__file__)")
    assert where.strip() == str(installed / "axsparse" / "__init__.py")
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
    assert "#SBATCH" in axsparse(installed, tmp_path, *submit, "--slurm")


def test_both_containers_are_made_by_the_same_steps() -> None:
    definition = (ROOT / "launch" / "apptainer.def").read_text()
    file = (ROOT / "launch" / "Containerfile").read_text()

    steps = definition.partition("%post\n")[2].partition("\n\n")[0].splitlines()
    run = file.partition("RUN ")[2].partition("\nENV ")[0].split(" && \\\n")
    assert [step.strip() for step in steps] == [step.strip() for step in run]
    [base] = [line.removeprefix("From: ") for line in definition.splitlines() if "From:" in line]
    assert f"FROM {base}\n" in file
