"""What a build asks of a GPU, seen without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch
from support.late_device import LateDevice
from support.runs import tiny_config, tiny_gpt, token_data

import axsparse.training.build
from axsparse.data.dataset import Datasets
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.backend import HOST, Backend
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.training.build import build
from axsparse.training.placement import MemoryRoom, Placement


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


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_gpu_copies_from_pinned_batches_and_its_blocks_are_written_down(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setitem(
        vars(axsparse.training.build), "record_history", lambda: heard.append("blocks")
    )
    monkeypatch.setitem(vars(axsparse.training.build), "open_data", opening)
    config = tiny_config(train={"memory_history": has_gpu})
    job = job_of_one(has_gpu=has_gpu)

    with pytest.raises(OpenedError) as asked:
        build(job, tiny_gpt(config), lambda: pytest.fail("too early"), config, quiet=True)

    assert asked.value.args == (has_gpu,)
    assert heard == ["blocks"] * has_gpu


@pytest.mark.parametrize(("gigabytes", "is_tight"), [(6e-4, True), (1.0, False), ("auto", False)])
def test_freed_memory_goes_back_at_once_while_building_and_on_where_there_is_little(
    gigabytes: float | str, is_tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    parts = vars(axsparse.training.build)
    whole_step = parts["whole_step"]

    def built(layers: Sequence[LayerState], optimizer: Optimizer) -> object:
        heard.append("built")
        return whole_step(layers, optimizer)

    monkeypatch.setitem(parts, "give_back_at_once", lambda: heard.append("back"))
    monkeypatch.setitem(parts, "keep_freed_blocks", lambda: heard.append("kept"))
    monkeypatch.setitem(parts, "whole_step", built)
    layout = {"g_inter": 1, "memory_per_rank": gigabytes}
    config = tiny_config(samo={"enabled": False}, layout=layout)
    job = Job(LocalTransport(LocalWorld(1), 0))

    build(job, tiny_gpt(config), lambda: Datasets(token_data(), None), config, quiet=True)

    assert heard == ["back", "built"] + ["kept"] * (not is_tight)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_products_in_half_precision_are_asked_for_on_cpus_alone(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[torch.dtype] = []
    parts = vars(axsparse.training.build)
    monkeypatch.setitem(parts, "multiply_in_fp32", heard.append)
    monkeypatch.setitem(parts, "open_data", opening)
    config = tiny_config(precision="bf16", samo={"enabled": False})
    job = job_of_one(has_gpu=has_gpu)

    with pytest.raises(OpenedError):
        build(job, tiny_gpt(config), lambda: pytest.fail("too early"), config, quiet=True)

    assert heard == [torch.bfloat16] * (not has_gpu)


def test_compiled_loops_are_loaded_before_the_memory_beside_the_state_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    def prepare(layers: Sequence[LayerState], optimizer: Optimizer) -> None:
        heard.append(f"{len(layers)} layers, {len(optimizer.moments)} moments")

    def measure(*_: object) -> NoReturn:
        raise OpenedError(*heard)

    monkeypatch.setitem(vars(axsparse.training.build), "whole_step", prepare)
    monkeypatch.setitem(vars(axsparse.training.build), "make_recorder", measure)
    config = tiny_config()
    job = Job(LocalTransport(LocalWorld(1), 0))

    with pytest.raises(OpenedError) as seen:
        build(job, tiny_gpt(config), lambda: Datasets(token_data(), None), config, quiet=True)

    assert seen.value.args == (f"{len(tiny_gpt(config).layers)} layers, 2 moments",)
