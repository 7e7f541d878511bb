"""What `scripts/gpu_check.sh` does before it has a GPU: arguments, rows, JSON, exit codes, MPI."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.mpirun import LONGEST_SECONDS, TESTS

BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPT = TESTS.parent / "scripts" / "gpu_check.sh"
LIMIT = 1234.5
SEEN = {"missing": [], "device": "NVIDIA H200", "torch": "2.11", "MPI": "MPICH", "CuPy": "14"}
JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure message="no&#10;more"/></testcase>
<testcase name="c"><skipped message="too small"/></testcase>
</testsuite></testsuites>"""
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="scripts/ is not here")


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def check() -> ModuleType:
    return load("gpu_check")


def around(check: ModuleType, folder: Path, seconds: float = 100.0) -> Any:
    return check.Around(check.Host(), SEEN, time.monotonic() + seconds, folder)


class Late(subprocess.Popen[bytes]):
    """A command whose time is over once it has made a file."""

    begun: Path

    def wait(self, timeout: float | None = None) -> int:
        if timeout == LIMIT:
            while self.poll() is None:
                if self.begun.exists():
                    raise subprocess.TimeoutExpired(self.args, LIMIT)
                time.sleep(0.01)
        return super().wait(timeout)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that ends the time of commands with a `LIMIT`."""
    monkeypatch.setattr(Late, "begun", tmp_path / "begun", raising=False)
    monkeypatch.setattr(load("gpu_host").subprocess, "Popen", Late)
    return tmp_path / "begun"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(
        ["sh", str(SCRIPT), *words],
        env=own,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )


# -- the command ----------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_so_and_ends_with_69(tmp_path: Path) -> None:
    ended = run(OUT=str(tmp_path))

    assert ended.stdout == "gpu_check: no CUDA device is here; every part is skipped\n"
    assert ended.returncode == 69, ended.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--part", "kernels,all"], "--part all: no part; choose of kernels, step, transport"),
        (["--mpi-wheel", "nowhere.whl"], "nowhere.whl: no such file"),
        (["--merge", __file__], "--merge: say by --save where to"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    check: ModuleType, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(words)

    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_results_are_called_after_the_device(check: ModuleType) -> None:
    name = "gpu_check-nvidia-h200-nvl.json"

    assert check.result_path("NVIDIA H200 (NVL)", {"OUT": "/out"}) == Path("/out") / name
    assert check.result_path("NVIDIA H200 (NVL)", {}) == BENCHMARKS / "results" / name


def with_parts(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, str]
) -> None:
    """Parts that end as told, on a machine that is told of."""
    rows = {part: [check.Row(part, "x", outcome)] for part, outcome in outcomes.items()}
    for part, own in rows.items():
        monkeypatch.setitem(check.RUN, part, lambda _, own=own: (list(own), {"n": 1}))
    monkeypatch.setattr(check, "environment", lambda _: ([], None))
    monkeypatch.setattr(check.Host, "look", lambda _: dict(SEEN))


def test_parts_run_in_the_order_of_what_has_to_be_known_first(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_parts(check, monkeypatch, dict.fromkeys(check.PARTS, "pass"))
    began: list[str] = []

    def begin(part: str) -> tuple[list[Any], None]:
        began.append(part)
        return [], None

    for part in check.PARTS:
        monkeypatch.setitem(check.RUN, part, lambda _, part=part: begin(part))

    check.main(["--part", "big,speed,kernels,step", "--save", str(tmp_path / "a.json")])
    check.main(["--save", str(tmp_path / "b.json")])

    assert began[:4] == ["kernels", "step", "speed", "big"]
    assert began[4:] == list(check.PARTS)
    assert list(check.RUN) == list(check.PARTS)
    order = ["kernels", "step", "transport", "speed", "numerics", "compare", "big"]
    assert began[4:] == order


def test_the_environment_starts_nothing(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the first part would wait for it")

    monkeypatch.setattr(check.Host, "run", refuse)

    rows, _ = check.environment(around(check, tmp_path))

    assert ("device", "NVIDIA H200") in {(row.check, row.measured) for row in rows}


def test_a_check_that_fails_is_the_exit_code_and_calls_add_up(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "found.json"
    with_parts(check, monkeypatch, {"kernels": "fail", "speed": "pass"})

    first = check.main(["--part", "kernels", "--save", str(saved)])
    second = check.main(["--part", "speed", "--save", str(saved)])

    assert (first, second) == (1, 0)
    assert "fail  kernels" in capsys.readouterr().out
    found = json.loads(saved.read_text())
    assert found["measured on"]["device"] == "NVIDIA H200"
    assert [(row["part"], row["outcome"]) for row in found["checks"] if row["check"] == "x"] == [
        ("kernels", "fail"),
        ("speed", "pass"),
    ]
    assert found["details"] == {"kernels": {"n": 1}, "speed": {"n": 1}}


def test_a_part_that_breaks_is_a_row_and_the_others_run(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "found.json"
    with_parts(check, monkeypatch, {"kernels": "pass", "big": "pass"})
    nothing: dict[str, Any] = {}
    monkeypatch.setitem(check.RUN, "kernels", lambda _: nothing["compress, torch"])

    code = check.main(["--part", "kernels,big", "--save", str(saved)])

    rows = [row for row in json.loads(saved.read_text())["checks"] if row["check"] != "seconds"]
    assert code == 1
    assert [(row["part"], row["measured"]) for row in rows] == [
        ("kernels", "KeyError: 'compress, torch'"),
        ("big", ""),
    ]


def test_a_part_that_runs_again_is_replaced(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "found.json"
    for outcome in ("fail", "pass"):
        with_parts(check, monkeypatch, {"big": outcome})
        check.main(["--part", "big", "--save", str(saved)])

    rows = json.loads(saved.read_text())["checks"]
    assert [row["outcome"] for row in rows if row["check"] == "x"] == ["pass"]


def test_what_several_calls_saved_is_merged(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = []
    for part in ("kernels", "big"):
        with_parts(check, monkeypatch, {part: "pass"})
        files.append(str(tmp_path / f"{part}.json"))
        check.main(["--part", part, "--save", files[-1]])

    code = check.main(["--merge", *files, "--save", str(tmp_path / "all.json")])

    found = json.loads((tmp_path / "all.json").read_text())
    assert code == 0
    assert {row["part"] for row in found["checks"] if row["check"] == "x"} == {"kernels", "big"}
    assert found["measured on"]["device"] == "NVIDIA H200"


def test_a_part_without_time_is_skipped(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_parts(check, monkeypatch, {"kernels": "fail"})

    code = check.main(["--part", "kernels", "--seconds", "1", "--save", str(tmp_path / "a.json")])

    [row] = json.loads((tmp_path / "a.json").read_text())["checks"][-1:]
    assert (row["outcome"], row["measured"]) == ("skip", "no time left; name it by --part")
    assert code == 0


# -- what parts make of what they start -----------------------------------------------------


def test_tests_are_rows_with_their_failures_and_reasons(check: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(JUNIT)

    rows = check.outcomes("transport", "x", tmp_path / "x.xml")

    assert [(row.check, row.outcome, row.measured) for row in rows] == [
        ("x", "fail", "1 passed, 1 failed, 1 skipped"),
        ("b", "fail", "no"),
        ("x", "skip", "too small"),
    ]


@pytest.mark.exhaustive
def test_tests_are_started_and_those_without_a_gpu_are_skipped(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    rows, _ = check.pytest(around(check, tmp_path), "transport", ["test_nccl_shared_gpu"])

    assert [row.outcome for row in rows] == ["skip", "skip"]
    assert rows[1].measured == "no GPU is to be had here"


def test_tests_that_run_out_of_time_fail(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("gpu_host"), "GRACE", 0.0)
    late = around(check, tmp_path, seconds=0.0)

    [row], _ = check.pytest(late, "transport", ["test_nccl_shared_gpu"])

    assert (row.outcome, row.measured) == ("fail", "ran out of time")


def test_what_tests_had_found_when_time_ran_out_is_kept(
    check: ModuleType, tmp_path: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tmp_path / "tests" / "gpu"
    tests.mkdir(parents=True)
    (tests / "slow.py").write_text(
        "import time\n"
        "def test_good(): pass\n"
        "def test_bad(): assert not 'the reason\\nin two lines'\n"
        "def test_that_hangs():\n"
        f"    open({str(begun)!r}, 'w').close()\n"
        "    time.sleep(100)\n"
    )
    monkeypatch.setattr(load("gpu_host"), "ROOT", tmp_path)
    monkeypatch.setattr(load("gpu_host"), "GRACE", 100.0)
    monkeypatch.setattr(check.Around, "left", LIMIT)

    rows, said = check.pytest(around(check, tmp_path), "numerics", ["slow"])

    assert [(row.check, row.outcome) for row in rows] == [
        ("slow", "fail"),
        ("test_bad", "fail"),
        ("slow", "fail"),
    ]
    assert rows[2].measured.startswith("ran out of time")
    assert "1 failed, 1 passed" in rows[2].measured
    assert "in two lines" in said["test_bad"]


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As a shell starts what it does not wait for."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize(
    ("hears", "grace", "said"), [("print('ended')", 100.0, "ended\n"), ("wait()", 0.1, "")]
)
def test_a_command_that_runs_late_may_end_what_it_started(
    hears: str, grace: float, said: str, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("gpu_host"), "GRACE", grace)
    code = (
        "import time\n"
        "def wait():\n"
        "    try:\n"
        f"        open({str(begun)!r}, 'w').close()\n"
        "        time.sleep(100)\n"
        "    except KeyboardInterrupt:\n"
        f"        {hears}\n"
        "wait()\n"
    )

    found = load("gpu_host").Host().run([sys.executable, "-c", code], LIMIT)

    assert (found.late, found.stdout) == (True, said)


def test_what_another_part_saved_is_not_taken_for_this_ones(
    check: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "gpu_train.json").write_text('{"checks": []}')

    problem, details = around(check, tmp_path, seconds=0.0).script("gpu_train")

    assert (problem, details) == ("ran out of time", None)


def test_kernels_are_judged_by_the_copy_and_by_torch(check: ModuleType) -> None:
    def timed(ms: float, share: float) -> dict[str, list[float]]:
        return {"ms": [ms] * 3, "share of copy bandwidth": [share] * 3}

    shares = {
        "measured on": {"machine": "x"},
        "copy": timed(1, 1),
        "compress, int32": timed(2, 0.79),
        "AdamW, int32, master fp32": timed(3, 0.8),
        "compress, torch": timed(8, 0.2),
        "AdamW, torch": timed(2.9, 0.9),
    }

    rows = check.bandwidths("kernels", shares)

    assert [(row.check, row.outcome) for row in rows] == [
        ("compress, int32, of the copy's bandwidth", "fail"),
        ("AdamW, int32, master fp32, of the copy's bandwidth", "pass"),
        ("compress, int32, against torch", "pass"),
        ("AdamW, int32, master fp32, against torch", "fail"),
    ]


@pytest.mark.parametrize(
    ("nccl", "asked", "said"),
    [
        (None, True, ["this torch is built without it"]),
        ("2.28.9", True, ["NCCL 2.28.9, from 2.30 on only"]),
        ("2.30.7", False, ["not asked for; --shared-nccl"]),
        ("2.30.7", True, ["test_nccl_shared_gpu"]),
    ],
)
def test_ranks_share_a_gpu_over_nccl_when_it_can_and_is_asked_to(
    check: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nccl: str | None,
    asked: bool,
    said: list[str],
) -> None:
    monkeypatch.setattr(
        check, "pytest", lambda _, part, files: ([check.Row(part, "x", "pass", files[0])], None)
    )
    seen = {**SEEN, "NCCL": nccl}
    machine = check.Around(check.Host(), seen, time.monotonic() + 100, tmp_path, asked)

    rows, _ = check.transport(machine)

    assert [row.measured for row in rows] == ["test_transport_gpu", *said]


def test_of_figure_1_the_best_sparse_kernel_is_shown(check: ModuleType) -> None:
    figure = {
        "measured on": {"machine": "x"},
        "forward, bf16, 4096 x 4096": {
            "dense": {"ms": [1, 1, 1], "ratio": [1, 1, 1]},
            "csr": {"ms": [9, 9, 9], "ratio": [8, 9, 10]},
            "coo": {"not supported": "no"},
        },
    }

    [row] = check.figure1("kernels", figure)

    assert (row.outcome, row.measured) == ("info", "csr: 9 times the dense one's")


def test_trainings_report_their_rows_or_why_there_are_none(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = {
        "checks": [
            {"part": "13b", "check": "x", "outcome": "pass", "measured": "1", "aim": "2"},
        ],
        "details": {"13b": {}},
    }
    answers = iter([("", saved), ("exit code 1: torn", None), ("exit code -9: dead", saved)])
    monkeypatch.setattr(check.Around, "script", lambda *_: next(answers))

    (well, details), (torn, _), (dead, _) = (
        check.RUN["big"](around(check, tmp_path)) for _ in "123"
    )

    assert [(row.check, row.outcome, row.aim) for row in well] == [("13b: x", "pass", "2")]
    assert details == {"13b": {}}
    assert [(row.outcome, row.measured) for row in torn] == [("fail", "exit code 1: torn")]
    assert [row.outcome for row in dead] == ["pass", "fail"]


def test_the_environment_is_looked_at_and_doctor_is_asked(
    check: ModuleType, tmp_path: Path
) -> None:
    here = check.Host().look()
    machine = check.Around(check.Host(), here, time.monotonic() + 100, tmp_path)

    rows, nothing = check.environment(machine)
    checked, findings = check.doctor(machine)
    rows += checked

    assert nothing is None
    assert here["missing"] == []
    outcomes = {row.check: row.outcome for row in rows}
    assert outcomes["torch"] == "info"
    assert outcomes["axsparse doctor"] in ("pass", "fail")  # by what else this machine has
    assert {"MPI", "torch"} <= {finding["name"] for finding in findings}


# -- wheels ---------------------------------------------------------------------------------


def test_a_wheel_of_mpich_is_unpacked_beside_and_can_be_started(tmp_path: Path) -> None:
    host_module = load("gpu_host")
    wheel = tmp_path / "mpich-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mpich-9.9.data/data/bin/mpirun", "#!/bin/sh\necho started\n")
        file.writestr("mpich-9.9.data/data/lib/libmpi.so.12", "")
        file.writestr("other/__init__.py", "answer = 42\n")
    host = host_module.Host({"PATH": os.environ["PATH"]})

    host.add_wheel(wheel, tmp_path / "unpacked")
    again = host_module.Host({"PATH": os.environ["PATH"]})
    again.add_wheel(wheel, tmp_path / "unpacked")

    assert again.environment == host.environment
    home = tmp_path / "unpacked" / "mpich-9.9-py3-none-any"
    libraries = home / "mpich-9.9.data" / "data" / "lib"
    assert host.environment["MPI4PY_LIBMPI"] == str(libraries / "libmpi.so.12")
    assert host.environment["LD_LIBRARY_PATH"] == str(libraries)
    assert host.run(["sh", "-c", "mpirun"], 10).stdout == "started\n"
    asked = [sys.executable, "-c", "import other; print(other.answer)"]
    assert host.run(asked, 10).stdout == "42\n"


def test_what_is_no_wheel_is_refused(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "mpich.whl"
    wheel.write_text("nothing")

    assert check.main(["--mpi-wheel", str(wheel)]) == 1
    assert "mpich.whl: cannot be unpacked" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.Host, "look", lambda _: {"missing": ["xxhash"]})

    assert check.main([]) == 1
    assert "lacks xxhash; give --wheel" in capsys.readouterr().err
