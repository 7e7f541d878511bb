"""Small models and data, and runs of them: in this process, or on the ranks of an MPI job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from support.local_world import LocalWorld, WorldTransport
from support.oracle import Trace
from torch import Tensor, nn

from axsparse.config.model_config import Family, GptConfig
from axsparse.config.schema import Config, PruningConfig
from axsparse.data.dataset import ArrayDataset, Dataset, Datasets, TokenDataset
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.models.zoo.gpt import gpt
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import ScoredMasks
from axsparse.pruning.targets import find_targets, kept_entries
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.layer_construction import full_weights
from axsparse.training.placement import Placement
from axsparse.training.trainer import Trainer, build

VOCABULARY = 64
T = TypeVar("T")


def on_ranks(size: int, body: Callable[[Transport], T], order: int | None = None) -> list[T]:
    """The results of `body` on every rank of a world in this process; `order` draws an arrival
    order."""
    world: LocalWorld[T] = LocalWorld(size, seed=order)
    return world.run(lambda rank: body(WorldTransport(world, rank)))


def all_here(transport: Transport) -> None:
    """Return once all ranks have called this."""
    here = torch.zeros(1, dtype=torch.float64)
    wait(transport.world.start(Op.ALL_REDUCE, here), transport.backoff)


def job_alone() -> Job:
    return Job(LocalTransport())


def alone(
    model: Model, config: Config, data: Dataset, validation: Dataset | None = None, **own: Any
) -> Trainer:
    """A trainer of this process by itself, which is quiet unless `own`, for `build`, says not."""
    datasets = Datasets(data, validation)
    return build(job_alone(), model, lambda: datasets, config, **{"quiet": True, **own})


def with_layout(config: Config, grid: Grid) -> Config:
    """The configuration of a run in this layout."""
    axes = ("g_inter", "g_data", "g_tensor")
    return config.with_values({f"layout.{axis}": getattr(grid, axis) for axis in axes})


def tiny_config(**sections: Any) -> Config:
    """A GPT of four layers in fp32; keyword arguments override keys of entire sections."""
    settings: dict[str, Any] = {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "sequence_length": 12,
            "vocab_size": VOCABULARY,
        },
        "batch": {"global_batch_size": 12, "microbatch_size": 1},
        "precision": "fp32",
        "pruning": {"sparsity": 0.8},
        "optimizer": {"learning_rate": 1e-2, "clip_norm": 0.5},
        "schedule": {"warmup_steps": 2},
        "train": {"steps": 8, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
        "seed": 11,
    }
    for key, value in sections.items():
        merges = isinstance(value, dict) and value.get("name") != "hf"
        settings[key] = {**settings.get(key, {}), **value} if merges else value
    return Config.model_validate(settings)


FEW_MICROBATCHES = {"global_batch_size": 12, "microbatch_size": 3}
"""A step of a third of the microbatches of `tiny_config`, for runs that do not look at them."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch's default type within, as a program may have set it."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def token_data(samples: int = 40, length: int = 12) -> TokenDataset:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, samples * length + 1, dtype=np.uint8)
    return TokenDataset("random", "0", VOCABULARY, tokens, length)


SomeFamily = TypeVar("SomeFamily", bound=Family)


def of_family(model: Family, family: type[SomeFamily]) -> SomeFamily:
    """The settings, which have to be of this family."""
    assert isinstance(model, family), f"{model.name} is no {family.__name__}"
    return model


def tiny_gpt(config: Config) -> Model:
    settings = of_family(config.model, GptConfig)
    return gpt(settings, settings.sequence_length)


def random_init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-0.4, 0.4, generator=generator)


def mlp(layers: int = 4, width: int = 16, classes: int = 5) -> Model:
    """Fully connected layers; widths chosen so that tensors are no multiple of a vector."""
    hidden = [
        Layer(
            f"hidden{number}",
            partial(_hidden, width + number, width + number + 1),
            init=random_init,
        )
        for number in range(layers - 1)
    ]
    out = Layer(
        "out", lambda: nn.Linear(width + layers - 1, classes), kind="head", init=random_init
    )
    return Model([*hidden, out], loss=summed_loss, name="mlp")


@dataclass(frozen=True)
class _Loaded:
    """Start values for every parameter, as if from a file."""

    shapes: dict[str, tuple[int, ...]]
    fingerprint: str = "loaded"

    def read(self, name: str) -> Tensor | None:
        shape = self.shapes.get(name)
        return None if shape is None else random_init(name, shape, keyed_generator(1, name))


def loaded(model: Model) -> Model:
    """The model with start values as if from a file."""
    shapes = {
        f"{layer.name}.{name}": tuple(parameter.shape)
        for layer in model.layers
        for name, parameter in layer.build().named_parameters()
    }
    return replace(model, start=_Loaded(shapes))


def _hidden(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


class Doing(nn.Module):
    """A linear layer with a custom forward: `forward(module, *inputs)`."""

    linear: nn.Linear

    def __init__(
        self, forward: Callable[..., Any], outputs: int = 16, inputs: int = 16, **parts: Any
    ) -> None:
        """`parts` are further modules, buffers and values, by their names."""
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._forward = forward
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self, *inputs)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def vector_data(
    samples: int = 30, width: int = 16, classes: int = 5, infinite: int | None = None
) -> ArrayDataset:
    """Points and classes; sample `infinite` is no number anybody can train on."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, width, generator=generator)
    if infinite is not None:
        inputs[infinite] = math.inf
    return ArrayDataset(inputs, torch.randint(classes, (samples,), generator=generator))


def around_step(
    before: Callable[[Trainer], object] = lambda trainer: None,
    after: Callable[[Trainer, StepResult], object] = lambda trainer, verdict: None,
) -> Callable[[Trainer], None]:
    """What happens around each step of a trainer, for `before` of `train_here` or `look` of
    `ran`."""

    def install(trainer: Trainer) -> None:
        step = trainer.step

        def stepping() -> StepResult:
            before(trainer)
            verdict = step()
            after(trainer, verdict)
            return verdict

        vars(trainer)["step"] = stepping

    return install


def train_here(
    where: Transport | Job,
    grid: Grid,
    model: Model,
    config: Config,
    data: Dataset,
    *,
    validation: Dataset | None = None,
    before: Callable[[Trainer], None] = lambda trainer: None,
    placement: Callable[[Transport], Placement] | None = None,
    quiet: bool = True,
    **own: Any,
) -> tuple[Trainer, Trace]:
    """Train on this rank's transport; the trace has the weights and moments of its stage, on the
    host. `placement` says where else than on the CPU, `own` is for `build`."""
    job = where if isinstance(where, Job) else Job(where)
    if placement is not None:
        job.placement = placement(job.transport)
    datasets = Datasets(data, validation)
    config = with_layout(config, grid)
    trainer = build(job, model, lambda: datasets, config, quiet=quiet, **own)
    before(trainer)
    trace = Trace()

    def note(step: int, verdict: StepResult) -> None:
        trace.losses.append(verdict.loss)
        trace.norms.append(verdict.grad_norm)
        trace.finite.append(verdict.finite)

    trainer.train(on_step=note)
    for layer in trainer.layers:
        state = layer.state
        weights = {name: weight.cpu().clone() for name, weight in full_weights(layer)}
        for name, tensor in state.by_full_name.items():
            trace.weights[name] = weights[layer.spec.local_name(name)]
            trace.masters[name] = state.master(name).cpu().clone()
            trace.kept[name] = state.mask(name).nonzero()[:, 0]
            trace.moments[name] = {}
            for moment in state.optimizer_state.moments_K:
                dense = torch.zeros(tensor.full_numel)
                dense[trace.kept[name]] = state.moment(name, moment).cpu()
                trace.moments[name][moment] = dense.view(tensor.full_shape)
        for name, buffer in layer.module.named_buffers():
            trace.buffers[f"{layer.spec.name}.{name}"] = buffer.detach().clone().cpu()
    trace.evaluation = trainer.last_evaluation
    return trainer, trace


def train_in_process(
    g_inter: int,
    g_data: int,
    model: Model,
    config: Config,
    data: Dataset,
    *,
    g_tensor: int = 1,
    order: int | None = None,
    **named: Any,
) -> list[tuple[Trainer, Trace]]:
    """`train_here` on all ranks of a world in this process; `order` draws an arrival order."""
    grid = Grid(g_inter, g_data, g_tensor)
    return on_ranks(
        grid.size, lambda here: train_here(here, grid, model, config, data, **named), order
    )


def assert_bitwise(ours: Trace, expected: Trace) -> None:
    """The common values of both traces have the same bits; `ours` may have some tensors only.

    Losses and norms of skipped steps are no numbers, and one is as good as another.
    """
    assert_same_steps(ours, expected)
    assert ours.weights
    for kind in ("weights", "masters", "kept"):
        theirs = getattr(expected, kind)
        for name, tensor in getattr(ours, kind).items():
            # A tied weight is that of the embedding, which is the first one.
            owner = name if name in expected.weights else next(iter(expected.weights))
            # The oracle has no masters, and no positions of what is not pruned.
            if owner in theirs or kind == "weights":
                assert torch.equal(tensor, theirs[owner]), (kind, name)
    for name, moments in ours.moments.items():
        owner = name if name in expected.moments else next(iter(expected.moments))
        for moment, values in moments.items():
            assert torch.equal(values, expected.moments[owner][moment]), (name, moment)
    for name, buffer in ours.buffers.items() if expected.buffers else ():
        assert torch.equal(buffer, expected.buffers[name]), name
    if ours.evaluation is not None and expected.evaluation is not None:
        assert ours.evaluation == expected.evaluation


def assert_same_steps(ours: Trace, expected: Trace) -> None:
    """The same steps updated, with the same bits of losses and norms."""
    assert ours.finite == expected.finite
    assert _of_good_steps(ours) == _of_good_steps(expected)


def _of_good_steps(trace: Trace) -> list[tuple[float, float]]:
    steps = zip(trace.losses, trace.norms, trace.finite, strict=True)
    return [(loss, norm) for loss, norm, good in steps if good]


def matrices(
    layers: Sequence[Layer],
    sparsity: float,
    method: Literal["magnitude", "random"] = "magnitude",
    *,
    include: Literal["blocks", "all"] = "all",
) -> ScoredMasks:
    """Every trained tensor of two or more dimensions, pruned by itself; without names of ties."""
    kept = {
        f"{layer.name}.{name}": kept_entries(parameter.numel(), sparsity)
        for layer in layers
        if layer.kind == "block" or include == "all"
        for name, parameter in layer.build().named_parameters()
        if parameter.dim() >= 2 and parameter.requires_grad
    }
    return ScoredMasks(Criterion(method, 1), kept)


def kept(model: Model, settings: PruningConfig) -> dict[str, int]:
    """Entries of each pruned tensor that stay, by a configuration."""
    return find_targets(profile(model), settings).kept()
