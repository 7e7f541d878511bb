"""Replicas train with separate buffers, and evaluate with the first replica's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.runs import on_ranks
from torch import nn

from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.samo.shards import Replicas


class Odd(nn.Module):
    """Buffers of several types, one of them a cache, one without elements, one transposed."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean = torch.full((3,), value / 3)
        self.register_buffer("flags", torch.tensor([value > 0, False]))
        self.register_buffer("narrow", torch.full((5,), float(value), dtype=torch.bfloat16))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t() * value)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("cache", torch.full((2,), float(value)), persistent=False)


def values(*modules: nn.Module) -> list[dict[str, object]]:
    return [{name: b.tolist() for name, b in module.named_buffers()} for module in modules]


def on_replicas(count: int, main: Callable[[int, Replicas], None]) -> None:
    def rank_main(transport: Transport) -> None:
        group = transport.collective("replicas", range(count))
        main(transport.rank, Replicas(group, transport.backoff))

    on_ranks(count, rank_main, order=1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_evaluation_sees_the_firsts_state_and_training_its_own_again(count: int) -> None:
    def main(rank: int, replicas: Replicas) -> None:
        modules = [Odd(rank), nn.Linear(2, 2), Odd(10 + rank)]
        own, first = values(*modules), values(Odd(0), nn.Linear(2, 2), Odd(10))
        for number in (0, 2):
            first[number]["cache"] = own[number]["cache"]
        types = [buffer.dtype for module in modules for buffer in module.buffers()]

        with RunningStatistics(modules, replicas).of_first_replica(evaluates=True):
            assert values(*modules) == first
            assert [b.dtype for module in modules for b in module.buffers()] == types
            modules[2].get_buffer("narrow").zero_()

        assert values(*modules) == own

    on_replicas(count, main)


@pytest.mark.parametrize(
    "other", [torch.zeros(0, 3), torch.zeros(4, 0), torch.zeros(0, 4).half(), torch.zeros(2, 4)]
)
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_buffer_of_another_kind_on_another_replica_is_refused_on_all(
    other: torch.Tensor, evaluates: bool
) -> None:
    def main(rank: int, replicas: Replicas) -> None:
        modules = [nn.Linear(2, 2), Odd(rank)]
        if rank == 2:
            modules[1].nothing = other
        with (
            pytest.raises(ConfigError, match="buffer 'nothing' of Odd: another replica has one"),
            RunningStatistics(modules, replicas).of_first_replica(evaluates=evaluates),
        ):
            pass

    on_replicas(3, main)


def test_a_failed_evaluation_gives_the_buffers_back() -> None:
    def main(rank: int, replicas: Replicas) -> None:
        module = Odd(rank)
        with (
            pytest.raises(ZeroDivisionError),
            RunningStatistics([module], replicas).of_first_replica(evaluates=True),
        ):
            raise ZeroDivisionError
        assert values(module) == values(Odd(rank))

    on_replicas(2, main)


def test_large_buffers_that_evaluations_leave_as_they_are_are_copied_once() -> None:
    def main(rank: int, replicas: Replicas) -> None:
        module = nn.Module()
        for name in ("constant", "counts"):
            module.register_buffer(name, torch.zeros(2**16))
        constant, counts = module.get_buffer("constant"), module.get_buffer("counts")
        statistics = RunningStatistics([module], replicas)

        for _ in range(3):
            with statistics.of_first_replica(evaluates=True):
                is_copied = module.get_buffer("constant") is not constant
                module.get_buffer("counts").add_(1)
            assert not counts.any()
        with statistics.of_first_replica(evaluates=False):
            assert module.get_buffer("counts") is counts

        assert not is_copied

    on_replicas(1, main)


def test_large_buffers_that_a_later_evaluation_begins_to_change_are_put_back_or_refused() -> None:
    def main(rank: int, replicas: Replicas) -> None:
        module = nn.Module()
        for name in ("replaced", "equal", "written"):
            module.register_buffer(name, torch.zeros(2**16))
        own = [*module.buffers()]
        statistics = RunningStatistics([module], replicas)

        for number in range(3):
            with statistics.of_first_replica(evaluates=True):
                module.get_buffer("equal").add_(number)  # the first write leaves it equal
                if number:
                    module.replaced = torch.ones(2**16)
            assert all(now is tensor for now, tensor in zip(module.buffers(), own, strict=True))
            assert not any(tensor.any() for tensor in own)
        with (
            pytest.raises(ConfigError, match="buffer 'written' of Module: an evaluation has begun"),
            statistics.of_first_replica(evaluates=True),
        ):
            module.get_buffer("written").add_(1)

    on_replicas(1, main)


def test_a_buffer_that_a_step_begins_to_change_is_copied_from_the_next_one_on() -> None:
    def main(rank: int, replicas: Replicas) -> None:
        module = nn.Module()
        module.register_buffer("late", torch.zeros(2**16))
        statistics = RunningStatistics([module], replicas)
        for changes in (False, True):
            statistics.begin(may_repeat=True)
            if changes:
                module.get_buffer("late").add_(1)
            statistics.keep()

        statistics.begin(may_repeat=True)
        module.get_buffer("late").add_(1)
        statistics.undo()

        assert (module.get_buffer("late") == 1).all()

    on_replicas(1, main)
