"""The gathers of a stage's weights, by one of two replicas and a group that plays the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from axsparse.runtime.communication import Op
from axsparse.samo.expansion import Expansion
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_gather import LayerGather
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.precision import round_to
from axsparse.samo.shards import Replicas
from axsparse.samo.tensor_state import TensorState

HALF = torch.bfloat16
SHAPES = [(500, 600), (7,)]
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


def stage(group: Others, layers: int = 3) -> tuple[Expansion, list[LayerState], Tensor]:
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
            for shape in SHAPES
        ]
        replicas = Replicas(group, NoPause(), shard=True, gather=True)
        types = StateTypes(HALF, HALF, ADAMW.moments)
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
    return full.view(SHAPES[0])


def test_the_gradients_memory_has_the_weights_until_a_backward_ends() -> None:
    expansion, layers, values = stage(group := Others())

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
    expansion, layers, values = stage(group := Others())
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


def test_weights_take_two_buffers_of_the_largest_layer_and_nothing_else() -> None:
    expansion, layers, _ = stage(Others())
    assert expansion.gather is not None
    assert expansion.gather.nbytes == 2 * 2 * (KEPT + 7)
    sparse = layers[0].live_bytes()
    assert sparse.weight == 2 * 7, "of vectors alone"
    assert sparse.gradient == 2 * (KEPT + 7)
    assert sparse.master == 4 * len(layers[0].shares.own)
