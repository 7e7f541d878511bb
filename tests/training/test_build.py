"""What a build asks of a GPU, seen without one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from support.late_device import LateDevice
from support.resuming import Ran, note_state, ran, records_of, same_state, settings
from support.runs import tiny_config, tiny_gpt, token_data

import axsparse.training.build
import axsparse.training.parts
from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.layer_state import StateTypes
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.training.build import build, run_training
from axsparse.training.placement import MemoryRoom, Placement
from axsparse.training.trainer import Trainer


class OpenedError(Exception):
    """The data were to be opened."""


def opening(*_: object, pinned: bool, **__: object) -> NoReturn:
    raise OpenedError(pinned)


def job_of_one(*, has_gpu: bool) -> Job:
    job = Job(LocalTransport(LocalWorld(1), 0))
    job.placement = Placement(job.transport, HOST)
    if has_gpu:
        backend = Backend(torch.device("cuda", 0), None)
        job.placement = Placement(
            job.transport, backend, LateDevice(), room=MemoryRoom(10**11, "a")
        )
    return job


def build_quietly(config: Config, job: Job, datasets: Datasets | None = None) -> Trainer:
    def open_datasets() -> Datasets:
        assert datasets is not None, "too early"
        return datasets

    return build(job, tiny_gpt(config), open_datasets, config, quiet=True)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_gpus_copy_from_pinned_batches_and_cpus_alone_ask_for_products_in_fp32(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    parts = vars(axsparse.training.build)
    monkeypatch.setitem(parts, "record_history", lambda: heard.append("blocks"))
    monkeypatch.setitem(parts, "multiply_in_fp32", heard.append)
    monkeypatch.setitem(parts, "open_data", opening)
    train = {"memory_history": has_gpu}
    config = tiny_config(train=train, precision="bf16", samo={"enabled": False})

    with pytest.raises(OpenedError) as asked:
        build_quietly(config, job_of_one(has_gpu=has_gpu))

    assert asked.value.args == (has_gpu,)
    assert heard == (["blocks"] if has_gpu else [torch.bfloat16])


@pytest.mark.parametrize(("gigabytes", "is_tight"), [(6e-4, True), (1.0, False), ("auto", False)])
def test_the_order_in_which_memory_is_given_back_loops_are_loaded_and_memory_is_measured(
    gigabytes: float | str, is_tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed memory goes back at once while building, and for good where there is little. Compiled
    loops are loaded before the memory beside the state is measured."""
    heard: list[str] = []

    def note(module: ModuleType, name: str) -> None:
        real = vars(module)[name]

        def noting(*arguments: Any, **how: Any) -> Any:
            heard.append(name)
            return real(*arguments, **how)

        monkeypatch.setitem(vars(module), name, noting)

    for name in ("give_back_at_once", "_wait_for_loops", "keep_freed_blocks"):
        note(axsparse.training.build, name)
    note(axsparse.training.parts, "make_recorder")
    layout = {"g_inter": 1, "memory_per_rank": gigabytes}
    config = tiny_config(samo={"enabled": False}, layout=layout)

    build_quietly(config, job_of_one(has_gpu=False), Datasets(token_data(), None))

    kept = [] if is_tight else ["keep_freed_blocks"]
    assert heard == ["give_back_at_once", "_wait_for_loops", "make_recorder", *kept]


class Loops:
    """A thread that has compiled once it has been waited for long enough."""

    def __init__(self) -> None:
        self.joined: list[float | None] = []

    def join(self, seconds: float | None = None) -> None:
        self.joined.append(seconds)

    def is_alive(self) -> bool:
        return None not in self.joined


def test_loops_are_compiled_while_data_are_read_and_before_memory_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    loops, parts = Loops(), vars(axsparse.training.build)
    open_data = parts["open_data"]

    def prepare(dtype: torch.dtype, types: StateTypes, optimizer: Optimizer) -> Loops:
        heard.append(f"prepare {len(types.moments)} moments")
        return loops

    def opened(*arguments: Any, **settings: Any) -> object:
        heard.append("open data")
        return open_data(*arguments, **settings)

    def measure(*_: object) -> NoReturn:
        raise OpenedError(*heard, loops.is_alive())

    monkeypatch.setitem(parts, "FEW", 0)
    monkeypatch.setitem(parts, "prepare_loops", prepare)
    monkeypatch.setitem(parts, "open_data", opened)
    monkeypatch.setitem(vars(axsparse.training.parts), "make_recorder", measure)
    config = tiny_config()
    job = Job(LocalTransport(LocalWorld(1), 0))

    with pytest.raises(OpenedError) as seen:
        build_quietly(config, job, Datasets(token_data(), None))

    assert seen.value.args == ("prepare 2 moments", "open data", False)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_start_that_waits_for_loops_says_so(
    is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    axsparse.training.build._wait_for_loops(Loops(), is_told=is_told)  # type: ignore[arg-type]

    said = capsys.readouterr().out
    assert said.startswith("axsparse: machine code for this processor is being") is is_told


DRAWN = 4
"""Steps done when the last masks are drawn."""
METHODS: dict[str, dict[str, Any]] = {
    "once": {"method": "magnitude", "at_step": DRAWN},
    "rewound": {"method": "iterative", "interval": 2, "until_step": DRAWN},
    "early-bird": {"method": "early-bird", "interval": 1, "until_step": 6, "threshold": 0.9},
}


def config_of(method: str = "once", **sections: Any) -> Config:
    sections.setdefault("layout", {"g_inter": 4, "g_inter_pruned": 2})
    return tiny_config(
        pruning=METHODS[method],
        schedule={"warmup_steps": 0},
        **{"train": {"steps": 8}, "checkpoint": {"every": 3}, **sections},
    )


def run_here(
    config: Config,
    run_dir: Path,
    *,
    ranks: int = 4,
    resume: str | None = None,
    look: Callable[[Trainer], None] = lambda trainer: None,
    fails_after: int | None = None,
    origins: Mapping[str, str] | None = None,
) -> Ran:
    """`run_training` on all ranks of a world; `look` sees every trainer that is built."""
    world: LocalWorld[None] = LocalWorld(ranks)
    found = Ran()
    loaded = LoadedConfig(
        config.model_copy(update={"run_dir": str(run_dir)}), "tiny", origins or {}
    )
    trainers: dict[int, weakref.ref[Trainer]] = {}
    branch = Job.branch

    def alone(job: Job) -> Transport:
        opened = branch(job)
        before = trainers.get(job.transport.rank)
        assert before is None or before() is None, "two trainers of a rank at once"
        return opened

    def noted(job: Job, *arguments: Any, **settings: Any) -> Trainer:
        trainer = build(job, *arguments, **settings)
        trainers[job.transport.rank] = weakref.ref(trainer)
        look(trainer)
        return trainer

    def body(rank: int) -> None:
        def note(step: int, verdict: Verdict) -> None:
            found.losses[step] = verdict.loss
            if step == fails_after:
                raise InterruptedError
            if step == config.train.steps:
                trainer = trainers[rank]()
                assert trainer is not None
                note_state(found, trainer)

        run_training(
            Job(LocalTransport(world, rank)),
            tiny_gpt(config),
            lambda: Datasets(token_data(), None),
            loaded,
            resume=resume,
            on_step=note,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axsparse.training.build.build", noted)
        patch.setattr(Job, "branch", alone)
        world.run(body)
    return found


def grids(seen: list[str]) -> Callable[[Trainer], None]:
    def look(trainer: Trainer) -> None:
        if trainer.parts.place.rank == 0:
            seen.append(str(trainer.parts.place.grid))

    return look


@pytest.mark.parametrize("method", METHODS)
def test_one_command_is_the_two_jobs_that_stop_and_resume(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was dense is freed before the second layout connects: `run_here` sees to it that a rank
    never has two trainers, and what torch keeps of freed memory is of no use to NCCL."""
    seen: list[str] = []
    happened: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: happened.append("given back"))

    def look(trainer: Trainer) -> None:
        happened.append("built")
        grids(seen)(trainer)

    whole = run_here(config_of(method), tmp_path / "whole", look=look)

    assert happened == ["built"] * 4 + ["given back"] * 4 + ["built"] * 4
    change = records_of(tmp_path / "whole", "masks")[-1]
    assert change["model_state_bytes"] < change["model_state_bytes_before"]
    assert (tmp_path / "whole" / "ticket.safetensors").is_file()
    steps = [record["step"] for record in records_of(tmp_path / "whole", "loss")]
    assert steps == list(range(1, 9))
    config = config_of(method, layout={}, checkpoint={"every": 5})
    first = ran((4, 1), config, tmp_path / "jobs", stop_after=change["step"])
    second = ran((2, 2), config, tmp_path / "jobs", resume="auto")
    assert first.stopped is not None
    assert whole.losses == {**first.losses, **second.losses}
    same_state(whole, second)
    assert seen == ["4 stages × 1 replica", "2 stages × 2 replicas"]


def test_a_run_that_broke_off_goes_on_under_the_layout_it_had_reached(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(InterruptedError):
        run_here(config_of(), tmp_path, fails_after=DRAWN - 1)
    with pytest.raises(InterruptedError):
        run_here(config_of(), tmp_path, resume="auto", look=grids(seen), fails_after=DRAWN + 2)

    run_here(config_of(), tmp_path, resume="auto", look=grids(seen))

    assert seen == ["4 stages × 1 replica", "2 stages × 2 replicas", "2 stages × 2 replicas"]


def test_the_first_layout_is_planned_dense_and_the_second_with_what_is_kept(
    tmp_path: Path,
) -> None:
    seen: list[str] = []
    # kB of the fullest rank: dense 358 with 2 stages, 350 with 4; pruned 354 with one.
    layout = {"g_inter_pruned": "auto", "memory_per_rank": 356e-6}

    # Nothing is saved but at the draw, so that no copies count.
    run_here(config_of(layout=layout, checkpoint={"every": 0}), tmp_path, look=grids(seen))

    assert seen == ["4 stages × 1 replica", "1 stage × 4 replicas"]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"pruning": {"sparsity": 0.0}}, r"2, but nothing is pruned; leave it out, or set prun"),
        ({"pruning": {"at_step": 0}}, r"2, but this run is pruned from the start .*magnitude"),
        ({"pruning": {"method": "rigl", "at_step": 0}}, "pruned from the start .*method rigl"),
        ({"layout": {"g_inter": 4, "g_inter_pruned": 3}}, r"by layout.g_inter_pruned, --set\): 3"),
        ({"batch": {"global_batch_size": 3}}, "batch.global_batch_size .*3 does not divide"),
    ],
)
def test_a_second_layout_that_cannot_be_is_refused_before_the_first_step(
    sections: dict[str, Any], text: str, tmp_path: Path
) -> None:
    origins = {"layout.g_inter_pruned": "--set"}

    with pytest.raises(ConfigError, match=text):
        run_here(settings(config_of(), **sections), tmp_path / "run", origins=origins)

    assert not (tmp_path / "run").exists()


def test_a_quiet_run_has_no_place_to_save_what_goes_on() -> None:
    config = config_of(layout={"g_inter": 1, "g_inter_pruned": 1})

    with pytest.raises(ConfigError, match=r"g_inter_pruned .*goes on from a checkpoint, and quiet"):
        build_quietly(config, job_of_one(has_gpu=False))


@pytest.mark.parametrize(
    ("resume", "why"),
    [
        (None, "overwrite begins a run_dir anew, and run_dir is auto, a new one; leave one of th"),
        ("auto", "overwrite begins a run_dir anew, and resume goes on with a run; leave one of th"),
    ],
)
def test_what_overwrites_names_a_run_that_begins_anew(resume: str | None, why: str) -> None:
    config = tiny_config()

    with pytest.raises(ConfigError, match=f"^build: {why}"):
        build(
            job_of_one(has_gpu=False),
            tiny_gpt(config),
            lambda: Datasets(token_data(), None),
            config,
            resume=resume,
            overwrite=True,
        )
