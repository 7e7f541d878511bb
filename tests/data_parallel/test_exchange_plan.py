"""Everything that a run exchanges over a group was planned when the group was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from support.images import image_config, image_data, small_wide_resnet
from support.runs import mlp, tiny_config, tiny_gpt, token_data, train_in_process, vector_data
from torch import Tensor

from axsparse.runtime.communication import Collective, Exchange, Op, Work
from axsparse.runtime.local.local_transport import LocalTransport


@dataclass
class Seen:
    """What ranks have planned to exchange over all groups of theirs, and what they did."""

    planned: list[Exchange] = field(default_factory=list)
    done: list[Exchange] = field(default_factory=list)

    def surprises(self) -> list[Exchange]:
        """What was done and no plan covers: the same operation on as many bytes."""
        return [
            one
            for one in self.done
            if not any(plan.op is one.op and nbytes(plan) >= nbytes(one) for plan in self.planned)
        ]


def nbytes(exchange: Exchange) -> int:
    return exchange.numel * exchange.dtype.itemsize


class Watched:
    """A group that notes what it carries out."""

    def __init__(self, inner: Collective, seen: Seen) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._seen = seen

    @property
    def bytes_sent(self) -> int:
        return self._inner.bytes_sent

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        self._seen.done.append(Exchange(op, buffer.dtype, buffer.numel()))
        return self._inner.start(op, buffer, bounds)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Seen]:
    """By the ranks of a group; but for that of all ranks, which stays on the hosts."""
    found: dict[tuple[int, ...], Seen] = defaultdict(Seen)
    make = LocalTransport.collective

    def collective(
        self: LocalTransport, name: str, ranks: Sequence[int], planned: Sequence[Exchange] = ()
    ) -> Collective:
        inner = make(self, name, ranks)
        if name == "world" or len(ranks) == 1:
            return inner
        seen = found[tuple(ranks)]
        seen.planned += planned
        return Watched(inner, seen)

    monkeypatch.setattr(LocalTransport, "collective", collective)
    return found


def gpt(shard: bool) -> None:
    config = tiny_config(
        samo={"shard_optimizer": shard},
        optimizer={"name": "lamb" if shard else "adamw"},
        pruning={"include": "blocks"},
        train={"steps": 2},
    )
    train_in_process(2, 2, tiny_gpt(config), config, token_data())


def images(shard: bool) -> None:
    config = image_config(
        samo={"shard_optimizer": shard},
        batch={"global_batch_size": 12, "microbatch_size": 3},
        train={"steps": 2, "eval_every": 1, "eval_steps": 1},
    )
    data = image_data(33)
    train_in_process(1, 2, small_wide_resnet(), config, data, validation=data)


def perceptron(shard: bool) -> None:
    config = tiny_config(
        samo={"shard_optimizer": shard},
        batch={"global_batch_size": 12, "microbatch_size": 1},
        precision="fp32",
        train={"steps": 2},
    )
    train_in_process(1, 3, mlp(3, 300), config, vector_data(24, 300))


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("run", [gpt, images, perceptron])
def test_what_a_run_exchanges_was_planned(
    run: Callable[[bool], None], shard: bool, groups: dict[tuple[int, ...], Seen]
) -> None:
    run(shard)

    assert groups
    for seen in groups.values():
        assert seen.done, "every group is used"
        assert seen.surprises() == []
