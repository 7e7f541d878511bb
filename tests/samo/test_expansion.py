"""The memory in which sparse weights are dense, by two layers of a stage and by themselves."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from support.kernel_contract import randoms, state_of
from support.runs import on_ranks
from torch import Tensor, nn

from axsparse.runtime.communication import Transport
from axsparse.runtime.machine import HeapTrimmer
from axsparse.samo.expansion import Expansion, LayerGather
from axsparse.samo.index.base import FullIndex
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
        masks = {
            f"{name}.{number}": mask_of(shape, density).view(shape)
            for number, shape in enumerate(shapes)
        }
        types = StateFormat(dtype, dtype, ADAMW.moments, "auto")
        layers.append(state_of(masks, types, expansion=expansion))
        for number, tensor in enumerate(layers[-1].tensors):
            values = randoms(math.prod(shapes[number]), number)
            kept = tensor.index.gather(values, 0, tensor.kept)
            layers[-1].optimizer_state.write_master(tensor, 0, kept)
    return layers


def train(layers: Sequence[LayerState], step: int) -> None:
    for layer in layers:
        layer.begin_step()
        for number, tensor in enumerate(layer.tensors):
            layer.accumulate(tensor, randoms(tensor.parameter.numel(), step + number))
    update(layers, ADAMW, Hyper(step, 0.1, (0.9, 0.95), 1e-8, 0.1), 1.0)


def present(expansion: Expansion) -> LayerState | None:
    return expansion._layer


def weights(layers: Sequence[LayerState]) -> Iterator[Tensor]:
    for layer in layers:
        with layer.expanded():
            for tensor in layer.tensors:
                yield tensor.parameter.detach().clone()


def test_freed_blocks_are_looked_at_between_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def count(_: HeapTrimmer) -> None:
        nonlocal looked
        looked += 1

    monkeypatch.setattr(HeapTrimmer, "trim", count)
    layers = stage(torch.float32, Expansion(torch.float32, HOST))
    for layer in (*layers, layers[-1]):
        layer.expand()

    assert looked == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_become_sparse_when_they_are_pruned_and_sparser(dtype: torch.dtype) -> None:
    dense, sparse = stage(dtype, None, 1.1), stage(dtype, expansion := Expansion(dtype, HOST), 1.1)
    before = sparse[1].live_bytes().weight
    assert expansion.nbytes == 0

    for layers, (step, share) in itertools.product((dense, sparse), ((1, 0.2), (2, 0.02))):
        layers[1].remask("b.0", mask_of((400, 400), share))
        train(layers, step)

    assert all(map(torch.equal, weights(dense), weights(sparse)))
    for one, other in zip(dense, sparse, strict=True):
        assert all(torch.equal(one.master(name), other.master(name)) for name in one.by_full_name)
    kept = 0 if dtype != torch.float32 else int(mask_of((400, 400), 0.02).sum())
    assert sparse[1].live_bytes().weight == before - dtype.itemsize * (160_000 - kept)


def test_an_alias_is_expanded_with_the_layer_that_uses_it() -> None:
    expansion, shape = Expansion(torch.bfloat16, HOST), (20, 30)
    first = TensorState("a", nn.Parameter(torch.zeros(shape).bfloat16()), FullIndex(600), True)
    again = nn.Parameter(first.parameter.detach())
    second = TensorState("b", again, FullIndex(600), True, alias_of=first)
    types = StateFormat(torch.bfloat16, torch.bfloat16, ADAMW.moments)
    owner = LayerState("one", [first], types, expansion=expansion)
    user = LayerState("two", [second], types, expansion=expansion)
    owner.optimizer_state.write_master(first, 0, values := randoms(600, 3))
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


# -- weights that two replicas gather (ZeRO stage 3) -----------------------------------------------

HALF = torch.bfloat16
GATHERED = [(500, 600), (7,)]
KEPT = 300_000 // 2
VALUES = torch.randn(KEPT + 7, generator=torch.Generator().manual_seed(1))
DENSE = torch.zeros(300_000, dtype=HALF)
DENSE[1::2] = round_to(VALUES, HALF)[:KEPT]


@dataclass
class GatheredStage:
    """Three layers of the same values on one of two replicas."""

    transport: Transport

    def __post_init__(self) -> None:
        self.group, backoff = self.transport.collective("replicas", [0, 1]), self.transport.backoff
        self.expansion = Expansion(HALF, HOST, LayerGather(self.group, backoff))
        self.layers = []
        for number in range(3):
            masks = {
                f"{number}.{shape}": (torch.arange(math.prod(shape)) % 2 >= len(shape) - 1).view(
                    shape
                )
                for shape in GATHERED
            }
            replicas = Replicas(self.group, backoff, shard=True)
            types = StateFormat(
                HALF, HALF, ADAMW.moments, "mask", weights="sparse", replicas=2, gathers=True
            )
            layer = state_of(masks, types, replicas=replicas, expansion=self.expansion)
            for tensor in layer.tensors:
                part = VALUES[tensor.offset : tensor.offset + tensor.kept]
                layer.optimizer_state.write_master(tensor, 0, part)
            self.layers.append(layer)

    @property
    def gathers(self) -> int:
        own = len(self.layers[0].shares.own) * HALF.itemsize
        return self.group.bytes_sent // own

    def check(self, layer: LayerState) -> None:
        layer.expand()
        assert torch.equal(layer.owned[0].parameter.view(-1), DENSE)


def test_the_gradients_memory_has_the_weights_until_a_backward_ends() -> None:
    def on_rank(transport: Transport) -> None:
        stage = GatheredStage(transport)
        for is_backward in (False, True):
            with stage.expansion.in_use(is_backward=is_backward):
                for layer in reversed(stage.layers) if is_backward else stage.layers:
                    stage.check(layer)
        assert stage.gathers == 0
        assert not any(layer.has_weights for layer in stage.layers)

        first = stage.layers[0]
        first.gradient.fill_(7)
        with first.expanded():
            stage.check(first)
        assert stage.gathers == 1
        first.collect_weights(first.exchanged_weights)
        own, others = first.shares.own, torch.ones(KEPT + 7, dtype=torch.bool)
        others[own.start : own.stop] = False
        assert torch.equal(first.gradient[~others], round_to(VALUES, HALF)[~others])
        assert (first.gradient[others] == 7).all()

    on_ranks(2, on_rank)


def test_the_next_layers_gather_is_under_way_and_every_pass_gathers_all() -> None:
    def on_rank(transport: Transport) -> None:
        stage = GatheredStage(transport)
        for layer in stage.layers:
            layer.reclaim_gradient()

        with stage.expansion.in_use(is_backward=True):
            assert stage.gathers == 1
            stage.check(stage.layers[2])
            assert stage.gathers == 2, "one more while this layer computes"
        assert stage.gathers == 3, "layers that had no backward here have one on other replicas"

        def backwards_in_a_forward() -> None:
            with stage.expansion.in_use():
                stage.check(stage.layers[2])
                stage.check(stage.layers[0])

        with pytest.raises(AssertionError, match="not expected"):
            backwards_in_a_forward()
        with stage.expansion.in_use():
            for layer in stage.layers:
                stage.check(layer)
        assert present(stage.expansion) is None

    on_ranks(2, on_rank)
