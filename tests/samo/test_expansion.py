"""The memory in which sparse weights are dense, by two layers of a stage and by themselves."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from axsparse.runtime.communication import Op
from axsparse.samo.expansion import Expansion, LayerGather
from axsparse.samo.index.base import FullIndex, make_index
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.precision import round_to
from axsparse.samo.shards import Replicas
from axsparse.samo.state_bytes import ALIGNED, StateFormat, TensorSize, expanded_bytes
from axsparse.samo.tensor_state import TensorState

SHAPES = {"a": [(40, 30), (30,)], "b": [(400, 400), (7, 9), (9,)]}
HOST = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(shape: Sequence[int], density: float, seed: int = 0) -> Tensor:
    numel = math.prod(shape)
    drawn = torch.rand(numel, generator=torch.Generator().manual_seed(seed + numel))
    return drawn < (density if len(shape) > 1 else 2)


def stage(
    dtype: torch.dtype, expansion: Expansion | None, density: float = 0.3
) -> list[LayerState]:
    """Two layers whose matrices are pruned, filled with the same values every time."""
    layers = []
    for name, shapes in SHAPES.items():
        tensors = [
            TensorState(
                f"{name}.{number}",
                nn.Parameter(torch.zeros(shape, dtype=dtype)),
                make_index(mask_of(shape, density), "auto"),
                decays=True,
            )
            for number, shape in enumerate(shapes)
        ]
        types = StateFormat(dtype, dtype, ADAMW.moments)
        layers.append(LayerState(name, tensors, types, expansion=expansion))
        for number, tensor in enumerate(tensors):
            values = random(number, *shapes[number]).view(-1)
            kept = tensor.index.gather(values, 0, tensor.kept)
            layers[-1].optimizer_state.write_master(tensor, 0, kept)
    return layers


def train(layers: Sequence[LayerState], step: int) -> None:
    for layer in layers:
        layer.begin_step()
        for number, tensor in enumerate(layer.tensors):
            layer.accumulate(tensor, random(step + number, *tensor.parameter.shape))
    update(layers, ADAMW, Hyper(step, 0.1, (0.9, 0.95), 1e-8, 0.1), 1.0)


def present(expansion: Expansion) -> LayerState | None:
    return expansion._layer


def weights(layers: Sequence[LayerState]) -> Iterator[Tensor]:
    for layer in layers:
        with layer.expanded():
            for tensor in layer.tensors:
                yield tensor.parameter.detach().clone()


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("dtype", TYPES)
def test_expanded_weights_are_those_that_are_dense_at_rest(
    dtype: torch.dtype, density: float
) -> None:
    dense, sparse = stage(dtype, None, density), stage(dtype, Expansion(dtype, HOST), density)
    for step in range(1, 4):
        train(dense, step)
        train(sparse, step)
        if step == 2:
            for layers in (dense, sparse):
                within = mask_of((400, 400), density) & mask_of((400, 400), 0.5, seed=1)
                layers[1].remask("b.0", within)

        for one, other in zip(weights(dense), weights(sparse), strict=True):
            assert torch.equal(one, other)
        for layer, like in zip(sparse, dense, strict=True):
            for name in layer.by_full_name:
                assert torch.equal(layer.dense_weight(name), like.dense_weight(name))
                assert torch.equal(layer.master(name), like.master(name))


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_become_sparse_when_they_are_pruned(dtype: torch.dtype) -> None:
    dense, sparse = stage(dtype, None, 1.1), stage(dtype, expansion := Expansion(dtype, HOST), 1.1)
    before = sparse[1].live_bytes().weight
    assert expansion.nbytes == 0

    for layers in (dense, sparse):
        layers[1].remask("b.0", mask_of((400, 400), 0.2))
        train(layers, 1)

    assert all(map(torch.equal, weights(dense), weights(sparse)))
    kept = 0 if dtype != torch.float32 else int(mask_of((400, 400), 0.2).sum())
    assert sparse[1].live_bytes().weight == before - dtype.itemsize * (160_000 - kept)


def test_an_alias_is_expanded_with_the_layer_that_uses_it() -> None:
    expansion, shape = Expansion(torch.bfloat16, HOST), (20, 30)
    first = TensorState("a", nn.Parameter(torch.zeros(shape).bfloat16()), FullIndex(600), True)
    again = nn.Parameter(first.parameter.detach())
    second = TensorState("b", again, FullIndex(600), True, alias_of=first)
    types = StateFormat(torch.bfloat16, torch.bfloat16, ADAMW.moments)
    owner = LayerState("one", [first], types, expansion=expansion)
    user = LayerState("two", [second], types, expansion=expansion)
    owner.optimizer_state.write_master(first, 0, values := random(3, 600))
    mask = mask_of(shape, 0.4)

    owner.remask("a", mask)
    user.refit()

    for layer, parameter in ((owner, first.parameter), (user, again)):
        with layer.expanded():
            expected = round_to(values, torch.bfloat16) * mask
            assert torch.equal(parameter.detach().view(-1), expected)


def test_memory_is_that_of_the_largest_layer_and_layers_take_turns() -> None:
    expansion = Expansion(torch.bfloat16, HOST)
    first, second = stage(torch.bfloat16, expansion)
    sizes = [TensorSize(160_000, 5), TensorSize(63, 5), TensorSize(9, 9)]
    stored = StateFormat(HALF, HALF, ADAMW.moments, weights="sparse")
    matrices = [layer.tensors[0].parameter for layer in (first, second)]

    assert expansion.nbytes == expanded_bytes(sizes, stored) == ALIGNED * (1_250 + 1)
    assert matrices[0].data_ptr() == matrices[1].data_ptr()
    assert matrices[0].data_ptr() % 64 == 0
    versions = [matrix._version for matrix in matrices]
    for layer in (first, second, first):
        layer.expand()
        matrix = layer.tensors[0]
        kept = matrix.parameter.detach().view(-1)[matrix.index.positions()]
        at_rest = layer.optimizer_state.at_rest(matrix)
        assert torch.equal(kept, round_to(at_rest, torch.bfloat16))
    assert versions == [matrix._version for matrix in matrices], "autograd would object"
    assert first.lends(matrices[1][3:])
    assert not first.lends(first.tensors[1].parameter)


def test_a_fault_leaves_nothing_expanded() -> None:
    expansion = Expansion(torch.float32, HOST)
    first, second = stage(torch.float32, expansion)

    def failing() -> None:
        with expansion.in_use():
            first.expand()
            second.expand()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()

    assert present(expansion) is None
    with first.expanded():
        with first.expanded():
            pass
        assert present(expansion) is first, "the outer block still needs it"
    assert present(expansion) is None


@pytest.mark.parametrize("expansion", [None, Expansion(torch.float32, HOST)])
def test_the_state_of_a_layer_is_freed_with_its_last_reference(expansion: Expansion | None) -> None:
    """No reference leads back to it, which only the garbage collector would find."""
    [layer, _] = stage(torch.float32, expansion)
    gone = weakref.ref(layer)

    del layer

    assert gone() is None


HALF = torch.bfloat16
GATHERED = [(500, 600), (7,)]
KEPT = 300_000 // 2


class NoPause:
    pauses = 0

    def reset(self) -> None: ...

    def pause(self) -> None:
        self.pauses += 1


@dataclass
class Arrival:
    """An all-gather that is complete at the second poll."""

    group: Others
    buffer: Tensor
    bounds: Sequence[int]
    polls: int = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.polls == 2:
            theirs = self.group.values[self.bounds[1] : self.bounds[2]]
            self.buffer[self.bounds[1] :] = theirs
        return self.polls > 1


@dataclass
class Others:
    """The group of replica 0 of 2; the other one has `values`."""

    values: Tensor = field(default_factory=lambda: torch.empty(0))
    size: int = 2
    rank: int = 0
    bytes_sent: int = 0
    started: list[int] = field(default_factory=list)
    """The entries of each gather."""

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Arrival:
        assert op is Op.ALL_GATHER
        assert bounds is not None
        assert bounds[1] < bounds[2], "the other replica has a share"
        self.started.append(buffer.numel())
        return Arrival(self, buffer, bounds)


def gathered_stage(group: Others, layers: int = 3) -> tuple[Expansion, list[LayerState], Tensor]:
    """Layers of the same values, and the kept weights of each."""
    group.values = values = torch.randn(KEPT + 7, generator=torch.Generator().manual_seed(1))
    expansion = Expansion(HALF, torch.device("cpu"), LayerGather(group, NoPause()))
    built = []
    for number in range(layers):
        tensors = [
            TensorState(
                f"{number}.{shape}",
                nn.Parameter(torch.zeros(shape, dtype=HALF)),
                make_index(torch.arange(torch.Size(shape).numel()) % 2 >= len(shape) - 1, "mask"),
                decays=True,
            )
            for shape in GATHERED
        ]
        replicas = Replicas(group, NoPause(), shard=True, gather=True)
        types = StateFormat(HALF, HALF, ADAMW.moments)
        built.append(
            LayerState(f"{number}", tensors, types, replicas=replicas, expansion=expansion)
        )
        for tensor in tensors:
            part = values[tensor.offset : tensor.offset + tensor.kept]
            built[-1].optimizer_state.write_master(tensor, 0, part)
    group.values = round_to(values, HALF)
    return expansion, built, group.values


def dense(values: Tensor) -> Tensor:
    full = torch.zeros(300_000, dtype=HALF)
    full[1::2] = values[:KEPT]
    return full.view(GATHERED[0])


def test_the_gradients_memory_has_the_weights_until_a_backward_ends() -> None:
    expansion, layers, values = gathered_stage(group := Others())

    for is_backward in (False, True):
        with expansion.in_use(is_backward=is_backward):
            for layer in reversed(layers) if is_backward else layers:
                layer.expand()
                assert torch.equal(layer.owned[0].parameter, dense(values))
        assert group.started == []
    assert not any(layer.has_weights for layer in layers)

    layers[0].gradient.fill_(7)
    with layers[0].expanded():
        assert torch.equal(layers[0].owned[0].parameter, dense(values))
    assert group.started == [KEPT + 7]
    layers[0].collect_weights()
    own = layers[0].shares.own
    assert torch.equal(layers[0].gradient[own.start : own.stop], values[own.start : own.stop])
    assert (layers[0].gradient[own.stop :] == 7).all()


def test_the_next_layers_gather_is_under_way_and_every_pass_gathers_all() -> None:
    expansion, layers, values = gathered_stage(group := Others())
    for layer in layers:
        layer.reclaim_gradient()

    with expansion.in_use(is_backward=True):
        assert len(group.started) == 1
        layers[2].expand()
        assert len(group.started) == 2, "one more while this layer computes"
        assert torch.equal(layers[2].owned[0].parameter, dense(values))
    assert len(group.started) == 3, "layers that had no backward here have one on other replicas"

    def backwards_in_a_forward() -> None:
        with expansion.in_use():
            layers[2].expand()
            layers[0].expand()

    with pytest.raises(AssertionError, match="not expected"):
        backwards_in_a_forward()
    with expansion.in_use():
        for layer in layers:
            layer.expand()
            assert torch.equal(layer.owned[0].parameter, dense(values))
    assert expansion._layer is None
