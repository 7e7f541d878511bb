"""`axsparse bundle`, with a stand-in for pip; `behavior/test_wheel.py` has the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.commands import Axsparse, assert_one_line

PIP = """\
#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
case "$3" in {fails}) exit 1 ;; esac
printf 12345 > "$(dirname "{log}")/wheels/$3.whl"
"""


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes another Python, whose pip notes its words, and fails if a test names a step; where it
    notes them."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PIP.format(log=log, fails=getattr(request, "param", "nothing")))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return log


def test_the_wheels_are_of_the_tested_versions_and_for_the_machine_there(
    axsparse: Axsparse, tmp_path: Path, log: Path
) -> None:
    there = ("--python", "3.12", "--machine", "aarch64")

    said = axsparse("bundle", tmp_path / "wheels", "--extra", "mpich", *there)

    own, others = log.read_text().splitlines()
    root = Path(__file__).parents[2]
    assert own == f"-m pip wheel --quiet --no-deps --wheel-dir={tmp_path}/wheels {root}"
    words = others.split()
    assert f"--constraint={root}/constraints.txt" in words
    assert {"--only-binary=:all:", "--python-version=3.12", "axsparse[mpich]==0.1.0"} < {*words}
    platforms = [word for word in words if word.startswith("--platform=")]
    assert platforms[0] == "--platform=manylinux_2_28_aarch64"
    assert {"--platform=manylinux_2_17_aarch64", "--platform=manylinux2014_aarch64"} < {*platforms}
    assert said == (
        0,
        f"2 wheels, 10 B → {tmp_path}/wheels; where it is copied to:\n"
        "pip install --no-index --find-links wheels 'axsparse[mpich]==0.1.0'\n",
        "",
    )


def test_an_older_torch_is_left_to_pip(axsparse: Axsparse, tmp_path: Path, log: Path) -> None:
    assert axsparse("bundle", tmp_path / "wheels", "--extra", "cuda12")[0] == 0
    assert "--constraint" not in log.read_text() and "--platform" not in log.read_text()


def test_the_command_that_installs_has_the_name_of_the_folder(
    axsparse: Axsparse, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wheels", "my wheels"):  # where pip writes, and the one that is asked for
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "my wheels")

    assert "pip install --no-index --find-links 'my wheels' " in axsparse("bundle", ".")[1]


@pytest.mark.parametrize("log", ["wheel", "download"], indirect=True)
def test_what_pip_cannot_get_ends_it(axsparse: Axsparse, tmp_path: Path, log: Path) -> None:
    said = axsparse("bundle", tmp_path / "wheels")

    step = log.read_text().splitlines()[-1].split()[2]
    line = (
        f"pip {step}: failed, see its words above; run this where pip reaches an index, or name "
        "one in PIP_INDEX_URL"
    )
    assert_one_line(said, 66, line)
