"""A build's requests to a GPU, seen without one, and its findings about a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from support.devices import LateDevice
from support.images import image_config
from support.runs import job_alone, mlp, on_ranks, summed_loss, tiny_config, tiny_gpt, vector_data
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.models.layer import Model
from axsparse.models.sequential import from_sequential
from axsparse.pipeline.stage import Stage
from axsparse.runtime.communication import Transport
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.samo.backend import HOST, Backend
from axsparse.training.placement import GpuMemory, Placement
from axsparse.training.plan import RunPlan
from axsparse.training.trainer import Trainer, build


class OpenedError(Exception):
    """The data were to be opened."""


def opening(*_: object, pinned: bool, **__: object) -> NoReturn:
    raise OpenedError(pinned)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_gpus_copy_from_pinned_batches(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axsparse.training.trainer.open_data", opening)
    config, job = tiny_config(samo={"enabled": False}), job_alone()
    job.placement = Placement(job.transport, HOST)
    if has_gpu:
        backend, memory = Backend(torch.device("cuda", 0), None), GpuMemory(10**11, 10**11, "a")
        job.placement = Placement(job.transport, backend, LateDevice(), memory=memory)

    with pytest.raises(OpenedError) as asked:
        build(job, tiny_gpt(config), lambda: pytest.fail("too early"), config, quiet=True)

    assert asked.value.args == (has_gpu,)


# -- a model without an example -----------------------------------------------------------


class KeepsLarge(nn.Module):
    """Its output has as many zeros as a value says, which the meta device does not know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = int((x[:, 0] < 100.0).sum())
        kept: Tensor = self.linear(x)[:rows]
        return kept


def without_example(*modules: nn.Module) -> Model:
    torch.manual_seed(3)
    return from_sequential(list(modules), summed_loss)


def built(model: Model, ranks: int, data: ArrayDataset) -> tuple[list[RunPlan], list[int]]:
    """The runs of all ranks, and how often each has opened the data."""
    config = image_config(layout={"g_inter": "auto"}, pruning={"sparsity": 0.0})
    opened = [0] * ranks

    def on(transport: Transport) -> RunPlan:
        def open_datasets() -> Datasets:
            opened[transport.rank] += 1
            return Datasets(data, None)

        trainer = build(Job(transport), model, open_datasets, config, quiet=True)
        trainer.close()
        return trainer.plan

    return on_ranks(ranks, on), opened


@pytest.mark.parametrize("middle", [nn.Linear, lambda width, _: KeepsLarge(width)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_an_example_is_planned_by_its_first_microbatch(
    middle: Callable[[int, int], nn.Module], ranks: int
) -> None:
    model = without_example(nn.Linear(16, 8), middle(8, 8), nn.Linear(8, 5))

    runs, opened = built(model, ranks, vector_data())

    assert opened == [1] * ranks
    for run in runs:
        assert [layer.flops for layer in run.profile.layers] == [256.0, 128.0, 80.0]
        assert run.coords.grid == Grid(1, ranks)
        assert run.prediction is not None and run.prediction.memory_bytes > 0


@pytest.mark.parametrize("is_own", [True, False])
def test_a_loss_is_tried_unless_it_is_the_packages_own(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(Stage, "_reject_unfit", lambda *_: tried.append(None))
    config = tiny_config(train={"steps": 1, "eval_steps": 0}, model={"vocab_size": 256})
    model, data = ("gpt", None) if is_own else (mlp(), vector_data())

    Trainer(model, data, config, quiet=True).train()

    assert bool(tried) != is_own
