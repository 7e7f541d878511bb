"""Gradients are summed in a fixed order, ties first, with exact bytes, and without deadlocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.kernel_contract import state_of
from support.oracle import Trace
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor, nn

from axsparse.data_parallel import gradient_sync as gradient_sync_module
from axsparse.data_parallel.gradient_sync import GradientSync
from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import ConfigError
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StageTie, Use
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import StateFormat
from axsparse.samo.tensor_state import TensorState
from axsparse.training.trainer import Trainer

NUMEL, KEPT = 20, 6
Ranks = list[tuple[Trainer, Trace]]


@dataclass
class Sum:
    """An all-reduce that doubles every entry, and ends when the test says so."""

    buffer: Tensor
    may_end: bool = False
    ended: bool = False

    def poll(self) -> bool:
        if self.may_end and not self.ended:
            self.buffer.mul_(2)
            self.ended = True
        return self.ended


@dataclass
class Members:
    """A collective of two ranks with equal buffers, which records the operations started."""

    size: int = 2
    rank: int = 0
    bytes_sent: int = 0
    patient: bool = False
    """Whether operations wait for the test to let them end."""
    started: list[Sum] = field(default_factory=list)

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Sum:
        assert op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
        work = Sum(buffer, may_end=not self.patient)
        self.started.append(work)
        self.bytes_sent += buffer.nbytes
        return work


class Impatient:
    """A back-off that must not be used, or for a few pauses only."""

    pauses = 0

    def __init__(self, pauses: int = 0) -> None:
        self.left = pauses
        self.at_pause: list[Sum] = []

    def pause(self) -> None:
        assert self.left, "waits for ever"
        self.left -= 1
        for work in self.at_pause:
            work.may_end = True

    def reset(self) -> None:
        """The back-off counts over all waits."""


def layer_state(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    owner: TensorState | None = None,
    replicas: Replicas = ALONE,
) -> LayerState:
    weight = torch.zeros(NUMEL) if owner is None else owner.parameter.detach()
    index = make_index(torch.arange(NUMEL) < KEPT)
    tensor = TensorState(f"{name}.w", nn.Parameter(weight), index, decays=True, alias_of=owner)
    state = LayerState(name, [tensor], StateFormat(torch.float32, dtype), replicas=replicas)
    state.gradient.fill_(1.0)
    return state


def gradient_sync(
    layers: Sequence[LayerState],
    replicas: Members,
    *,
    ties: Sequence[StageTie] = (),
    wire_dtype: torch.dtype = torch.float32,
    backoff: Impatient | None = None,
) -> GradientSync:
    sync = GradientSync(
        layers,
        ties,
        replicas=replicas,
        wire_dtype=wire_dtype,
        backoff=backoff or Impatient(),
        phases=Phases(),
    )
    sync.begin()
    return sync


def values(layer: LayerState) -> list[float]:
    """The different values of its gradient."""
    found: list[float] = layer.gradient.unique().tolist()
    return found


def all_ready(sync: GradientSync, layers: Sequence[LayerState]) -> None:
    """Report all layers as complete, the last one first, and wait for the sums."""
    for layer in reversed(layers):
        sync.ready(layer)
    sync.finish()


def started(members: Members, layers: Sequence[LayerState]) -> list[str]:
    """The layers whose buffers have been given to the replicas, in this order."""
    names = {layer.gradient.data_ptr(): layer.name for layer in layers}
    return [names[work.buffer.data_ptr()] for work in members.started]


def use(layer: LayerState) -> Use:
    return Use(layer, layer.tensors[0])


# -- order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", list(itertools.permutations(range(3))))
def test_buckets_start_last_layer_first_whatever_becomes_ready_when(ready: tuple[int, ...]) -> None:
    layers = [layer_state(name) for name in "abc"]
    replicas = Members()
    sync = gradient_sync(layers, replicas)

    complete = set()
    for number in ready:
        sync.ready(layers[number])
        complete.add(number)
        in_order = itertools.takewhile(complete.__contains__, (2, 1, 0))
        assert started(replicas, layers) == ["abc"[at] for at in in_order]
    sync.finish()

    assert [values(layer) for layer in layers] == [[2.0]] * 3


# -- ties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_after_the_sum_over_replicas_began_is_rejected(size: int) -> None:
    """As autograd's hooks report where a reentrant checkpoint runs a weight several times."""
    layer = layer_state("a")
    sync = gradient_sync([layer], Members(size=size))
    sync.ready(layer)

    with pytest.raises(ConfigError, match="use_reentrant=False") if size > 1 else nullcontext():
        sync.ready(layer)


def test_both_uses_on_one_stage_are_summed_before_the_replicas() -> None:
    first = layer_state("first")
    middle = layer_state("middle")
    last = layer_state("last", owner=first.tensors[0])
    layers = [first, middle, last]
    last.gradient.fill_(10.0)
    replicas = Members(patient=True)
    backoff = Impatient(2)
    ties = [StageTie((use(first), use(last)), None)]
    sync = gradient_sync(layers, replicas, ties=ties, backoff=backoff)

    sync.ready(last)
    assert replicas.started == []
    sync.ready(middle)
    assert started(replicas, layers) == ["middle"]
    sync.ready(first)
    backoff.at_pause = replicas.started
    sync.finish()

    assert started(replicas, layers) == ["middle", "first"]
    assert values(first) == [2 * 11.0]


def test_ties_start_in_their_fixed_order_and_their_bytes_are_counted_apart() -> None:
    layers = [layer_state(name) for name in "ab"]
    pair, replicas = Members(), Members()
    ties = [StageTie((use(layer),), pair) for layer in layers]
    sync = gradient_sync(layers, replicas, ties=ties)

    all_ready(sync, layers)

    assert started(pair, layers) == ["a", "b"]
    # The two ties of one pair count once.
    assert sync.tie_bytes_sent == 2 * KEPT * 4
    assert sync.replicas.bytes_sent == 2 * KEPT * 4


def test_only_the_tied_tensor_of_a_layer_is_summed_with_its_other_use() -> None:
    masks = dict.fromkeys(("l.p", "l.q"), torch.ones(4, dtype=torch.bool))
    layer = state_of(masks, StateFormat(torch.float32, torch.float32))
    layer.gradient.fill_(1.0)
    tie = StageTie((Use(layer, layer.tensors[1]),), Members())
    sync = gradient_sync([layer], Members(size=1), ties=[tie])

    sync.ready(layer)
    sync.finish()

    assert layer.gradient.tolist() == [1.0] * 4 + [2.0] * 4


# -- the wire -------------------------------------------------------------------------------


def test_wide_accumulators_travel_in_half_and_take_what_comes_back() -> None:
    layer = layer_state("a")
    layer.gradient.fill_(1 + 2.0**-12)
    replicas = Members(patient=True)
    sync = gradient_sync([layer], replicas, wire_dtype=torch.bfloat16)

    sync.ready(layer)
    (work,) = replicas.started
    assert (work.buffer.dtype, work.buffer.numel()) == (torch.bfloat16, KEPT)
    work.may_end = True
    sync.finish()

    assert layer.gradient.dtype == torch.float32
    assert values(layer) == [2.0]
    # What has the type of the wire travels without a copy.
    half, others = layer_state("b", dtype=torch.bfloat16), Members(patient=True)
    gradient_sync([half], others, wire_dtype=torch.bfloat16).ready(half)
    assert others.started[0].buffer.data_ptr() == half.gradient.data_ptr()


@pytest.mark.parametrize(("rank", "expected"), [(0, 1 + 2.0**-12), (1, 2.0)])
def test_of_what_comes_back_a_sharded_layer_takes_its_share(rank: int, expected: float) -> None:
    """The layer is one block, which is the second replica's."""
    replicas = Members(rank=rank)
    layer = layer_state("a", replicas=Replicas(replicas, Impatient(), shard=True))
    layer.gradient.fill_(1 + 2.0**-12)
    sync = gradient_sync([layer], replicas, wire_dtype=torch.bfloat16)

    all_ready(sync, [layer])

    assert values(layer) == [expected]


# -- whole runs -----------------------------------------------------------------------------


def train_gpt(g_inter: int, g_data: int, **sections: Any) -> Ranks:
    """Two steps of a small GPT by default."""
    config = tiny_config(**{"batch": {"microbatch_size": 3}, "train": {"steps": 2}, **sections})
    return train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data())


def gradient_bytes(precision: str, **samo: Any) -> tuple[int, int, int]:
    """Bytes that two replicas send in a step, kept entries, and all entries."""
    ranks = train_gpt(
        1,
        2,
        precision=precision,
        pruning={"sparsity": 0.8, "include": "all"},
        samo=samo,
        model={"tie_embeddings": False},
        batch={"microbatch_size": 6},
        train={"steps": 1},
    )
    sent = sum(trainer.sync.replicas.bytes_sent for trainer, _ in ranks)
    tensors = [tensor for layer in ranks[0][0].layers for tensor in layer.state.owned]
    kept = sum(tensor.kept for tensor in tensors)
    return sent, kept, sum(tensor.parameter.numel() for tensor in tensors)


@pytest.mark.parametrize(
    ("precision", "gradient", "shard", "itemsize"),
    [
        ("bf16", "half", False, 2),
        ("bf16", "fp32", False, 2),
        ("fp32", "auto", False, 4),
        # Where the optimizer state is sharded, weights come back instead of gradients.
        ("bf16", "half", True, 2),
        ("bf16", "fp32", True, 2),
    ],
)
def test_replicas_exchange_kept_entries_only_in_the_precision_of_weights(
    precision: str, gradient: str, shard: bool, itemsize: int
) -> None:
    pruned, kept, numel = gradient_bytes(precision, gradient=gradient, zero_stage=int(shard))
    dense, all_kept, _ = gradient_bytes(precision, enabled=False)

    assert all_kept == numel
    assert kept < 0.25 * numel
    assert pruned == 2 * kept * itemsize  # the volume of a ring
    assert dense == 2 * numel * itemsize


# -- ties in pieces -------------------------------------------------------------------------


def test_replicas_sum_a_piece_of_a_tied_weight_while_two_stages_sum_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_sync_module, "PIECE", 2)
    layer = layer_state("head")
    pair, replicas = Members(patient=True), Members()
    backoff = Impatient(pauses=3)
    seen: list[tuple[int, int]] = []

    def pause() -> None:
        done = sum(work.ended for work in pair.started)
        seen.append((done, len(replicas.started)))
        next(work for work in pair.started if not work.may_end).may_end = True

    backoff.pause = pause  # type: ignore[method-assign]
    sync = gradient_sync([layer], replicas, ties=[StageTie((use(layer),), pair)], backoff=backoff)
    sync.ready(layer)
    assert not pair.started

    sync.finish()

    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert [work.buffer.numel() for work in replicas.started] == [2, 2, 2]
    assert layer.gradient.tolist() == [4.0] * KEPT


@pytest.mark.parametrize(("shard", "gradient"), [(False, "half"), (True, "fp32")])
def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch, shard: bool, gradient: str) -> None:
    def traces() -> list[Trace]:
        samo = {"zero_stage": int(shard), "gradient": gradient}
        return [trace for _, trace in train_gpt(2, 2, precision="bf16", samo=samo)]

    whole = traces()
    monkeypatch.setattr(gradient_sync_module, "PIECE", 333)

    for ours, expected in zip(traces(), whole, strict=True):
        assert_bitwise(ours, expected)
