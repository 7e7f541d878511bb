"""TensorBoard and Weights & Biases get copies of the records, and never end or hold up a run."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.resuming import ran
from support.runs import mlp, tiny_config, vector_data

from axsparse.config.load import made_in_python
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.observe import sinks
from axsparse.observe.metrics import EvalRecord
from axsparse.observe.sinks import Sink, SinkThread, curves_of, refuse_missing_packages
from axsparse.runtime.errors import ConfigError

CALLS: list[tuple[Any, ...]] = []


class Writer:
    """What torch.utils.tensorboard has, noting its calls."""

    def __init__(self, folder: str, purge_step: int) -> None:
        CALLS.append(("open", Path(folder).name, purge_step))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        CALLS.append((name, value, step))

    def close(self) -> None:
        CALLS.append(("close",))


class FailingWriter(Writer):
    """Fails at the third number."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        super().add_scalar(name, value, step)
        if len(CALLS) == 4:
            raise OSError("no space\nleft on device")


class WandbRun:
    """What wandb.init gives, noting its calls."""

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        CALLS.append(("define", name, step_metric))

    def log(self, curves: Mapping[str, float]) -> None:
        CALLS.append(("log", dict(curves)))

    def finish(self) -> None:
        CALLS.append(("finish",))


def wandb_init(**settings: Any) -> WandbRun:
    CALLS.append(("init", settings))
    return WandbRun()


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both packages, as far as they are used; none of them needs to be installed."""
    CALLS.clear()
    board = types.ModuleType("torch.utils.tensorboard")
    vars(board)["SummaryWriter"] = Writer
    wandb = types.ModuleType("wandb")
    vars(wandb)["init"] = wandb_init
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(sinks, "find_spec", lambda name: name)
    yield
    left = [thread for thread in threading.enumerate() if "observe." in thread.name]
    assert not left, "a sink's thread has outlived its run"


def config_of(**observe: Any) -> Config:
    return tiny_config(
        train={"steps": 4, "eval_every": 2, "eval_steps": 1},
        observe=observe,
    )


def train(config: Config, run: Path, **how: Any) -> list[dict[str, Any]]:
    def model(config: Config) -> Model:
        del config
        return mlp()

    ran((2, 1), config, run, model=model, data=vector_data(), validation=vector_data(), **how)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_gets_every_number_of_every_record(tmp_path: Path) -> None:
    records = train(config_of(tensorboard=True), tmp_path / "run")

    assert CALLS[0] == ("open", "tensorboard", 1)
    assert CALLS[-1] == ("close",)
    for record in records:
        kind = "validation" if "eval_loss" in record else "train"
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                assert (f"{kind}/{name}", value, record["step"]) in CALLS, name
    assert sum(call[0] == "train/loss" for call in CALLS) == 4


def test_a_run_that_resumes_replaces_later_curves_and_stays_one_run(tmp_path: Path) -> None:
    config = config_of(tensorboard=True, wandb="digits")
    train(config, tmp_path / "run", stop_after=3)
    first = [call[1] for call in CALLS if call[0] == "init"]
    CALLS.clear()

    train(config, tmp_path / "run", resume="auto")

    second = [call[1] for call in CALLS if call[0] == "init"]
    assert ("open", "tensorboard", 3) in CALLS
    assert len(first) == len(second) == 1
    assert first[0]["id"] == second[0]["id"]
    assert (first[0]["project"], first[0]["name"], first[0]["resume"]) == ("digits", "run", "allow")
    assert first[0]["config"]["optimizer"]["learning_rate"] == 0.01
    logged = [call[1] for call in CALLS if call[0] == "log"]
    assert [one["step"] for one in logged if "train/loss" in one] == [3, 4]
    assert CALLS[-1] in (("finish",), ("close",))


def test_a_sink_that_fails_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["torch.utils.tensorboard"], "SummaryWriter", FailingWriter)

    records = train(config_of(tensorboard=True), tmp_path / "run")

    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    warnings = [line for line in capfd.readouterr().err.splitlines() if "observe." in line]
    assert warnings == [
        "axsparse: warning: observe.tensorboard: OSError: no space left on device; the run goes on "
        "without it"
    ]


@pytest.mark.parametrize("failure", [SystemExit(1), RuntimeError()])
def test_a_sink_that_cannot_be_opened_is_one_warning(
    failure: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    def open_sink(step: int) -> Sink:
        raise failure

    thread = SinkThread("observe.wandb", open_sink)
    for step in range(3):
        thread.write(EvalRecord(step, 1.0, {}))
    thread.close()

    assert capfd.readouterr().err.count("warning: observe.wandb: ") == 1


def test_a_sink_that_hangs_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sinks, "WAITING", 3)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.01)
    goes_on = threading.Event()

    def open_sink(step: int) -> Sink:
        goes_on.wait()
        raise OSError("at last")

    thread = SinkThread("observe.wandb", open_sink)
    for step in range(9):
        thread.write(EvalRecord(step, 1.0, {}))
    thread.close()

    told = capfd.readouterr().err
    goes_on.set()
    thread.close()  # now it is read
    assert told == (
        "axsparse: warning: observe.wandb: is 3 records behind; the run goes on without it\n"
    )


def test_only_finite_numbers_are_curves() -> None:
    record = EvalRecord(3, float("nan"), {"top1": 0.5, "perplexity": float("inf")})

    assert curves_of(record) == {"validation/top1": 0.5}


@pytest.mark.parametrize(
    ("observe", "message"),
    [
        ({"tensorboard": True}, r"observe.tensorboard \(configure\): True, but the package tensor"),
        ({"wandb": "mine"}, r"mine, but the package wandb is not installed; pip install 'axsparse"),
    ],
)
def test_a_missing_package_is_told_before_anything_begins(
    observe: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    config = config_of(**observe)

    with pytest.raises(ConfigError, match=message):
        refuse_missing_packages(made_in_python(config, "tiny"))
    with pytest.raises(ConfigError, match="is not installed"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard_itself_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    records = train(config_of(tensorboard=True), tmp_path / "run")

    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    wanted = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert losses == pytest.approx(wanted, rel=1e-6)
