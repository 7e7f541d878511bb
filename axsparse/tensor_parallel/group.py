"""The tensor-parallel ranks of one stage, and their exchanges.

Each of T ranks holds one shard of every sharded tensor. Partial results are summed in the order of
the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axsparse.models.layer import TensorShard
from axsparse.runtime.communication import Collective, Direction, Op, Transport, Work, wait
from axsparse.runtime.gpu.collectives import NcclWork
from axsparse.runtime.grid import RankCoords

TensorMap = Callable[[Tensor], Tensor]


class TensorGroup:
    """The ranks that compute the layers of one stage of one replica together. A `ShardGroup`."""

    def __init__(self, coords: RankCoords, transport: Transport, *, on_gpus: bool = False) -> None:
        """All ranks call this together. They compute `on_gpus` or on CPUs."""
        grid = coords.grid
        self.rank, self.size, self.on_gpus = coords.tp_rank, grid.g_tensor, on_gpus
        self.idle: Callable[[], object] = lambda: None
        """Called while this rank waits for others, so that its messages are sent."""
        self.while_summing: Callable[[Work], object] = lambda _: None
        """Called with a running sum, to compute meanwhile."""
        self.timed: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the waiting."""
        self.fixed_bytes = 0
        """The part of `bytes_sent` that does not grow with the samples of a microbatch."""
        self._copied: tuple[Tensor, bool, int, Tensor] | None = None
        """The input of the last column-parallel module, its mode and version, and its copy."""
        self._backoff = transport.backoff
        ranks = [grid.rank(coords.stage, coords.replica, tp_rank) for tp_rank in range(self.size)]
        self._ranks = transport.collective("members", ranks)
        self._arrivals: dict[Direction, Collective] = {}
        """On GPUs, the counter of messages that have come to all ranks of the group."""
        for direction in Direction if on_gpus else ():
            self._arrivals[direction] = transport.collective(f"arrivals {direction.name}", ranks)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to the other ranks of the group since the start."""
        return self._ranks.bytes_sent

    # -- tensors ------------------------------------------------------------------------

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, which call this together; a new tensor."""
        total = part.clone(memory_format=torch.contiguous_format)
        self._exchange(Op.ALL_REDUCE, total.view(-1))
        return total

    def gather(self, shard: TensorShard, part: Tensor) -> Tensor:
        """The full tensor, from this rank's shard, which may be flat; all ranks call it."""
        bounds = list(itertools.accumulate(shard.numels, initial=0))
        flat = part.new_empty(bounds[-1])
        flat[bounds[self.rank] : bounds[self.rank + 1]] = part.reshape(-1)
        self._exchange(Op.ALL_GATHER, flat, bounds)
        return shard.assemble(flat)

    def gather_rows(self, row: Tensor) -> Tensor:
        """Flat tensors of one size of all ranks as rows of a matrix; all ranks call it."""
        rows = row.new_empty(self.size, row.numel())
        rows[self.rank] = row
        self._exchange(Op.ALL_GATHER, rows.view(-1))
        return rows

    def shared_copy(self, x: Tensor) -> Tensor:
        """The copy of `copy_to_tp`, one for all column-parallel modules of one input, such as
        query, key and value: the gradients of x are summed over the ranks once."""
        has_graph, known = torch.is_grad_enabled(), self._copied
        if known is None or known[0] is not x or known[1:3] != (has_graph, x._version):
            known = self._copied = x, has_graph, x._version, copy_to_tp(self, x)
        return known[3]

    def end_sharded(self) -> None:
        """Forget the inputs that were kept for the row-parallel module that ends."""
        self._copied = None

    # -- messages between stages ---------------------------------------------------------

    def arrived(self, direction: Direction) -> Work:
        """Note that the next message of a direction has come here, on GPUs. The work is done once
        it has come to all ranks of the group."""
        return self._arrivals[direction].start(Op.ALL_REDUCE, torch.zeros(1, dtype=torch.float64))

    # -- details ------------------------------------------------------------------------

    def _exchange(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> None:
        """Carry out an operation in place, and compute meanwhile."""
        work = self._ranks.start(op, buffer, bounds)
        self.while_summing(work)
        self._wait(work)

    def _wait(self, work: Work) -> None:
        """Make the result visible to the next operation: over NCCL compute waits, else the host."""
        if isinstance(work, NcclWork):
            with self.timed():
                work.before_compute()
        elif not work.poll():
            with self.timed():
                wait(work, self._backoff, self.idle)


class _Copy(torch.autograd.Function):
    """The same tensors; backward, the sums of their gradients over all ranks, in one exchange."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # Vectors are parameters, or made of them, such as the weight of a norm plus one.
        ctx.is_fixed = all(isinstance(x, nn.Parameter) or x.dim() < 2 for x in given)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        group, sent = ctx.group, ctx.group.bytes_sent
        used = [gradient for gradient in outer if gradient is not None]
        if len(used) == 1:
            sums = [group.all_reduce(used[0])]
        elif used:
            total = group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in used]))
            flat = total.split([gradient.numel() for gradient in used])
            pairs = zip(flat, used, strict=True)
            sums = [part.view(gradient.shape).to(gradient.dtype) for part, gradient in pairs]
        if ctx.is_fixed:
            group.fixed_bytes += group.bytes_sent - sent
        return None, *[None if gradient is None else sums.pop(0) for gradient in outer]


class _Reduce(torch.autograd.Function):
    """The sum over all ranks; backward, the gradient of the sum."""

    @staticmethod
    def forward(_: Any, group: TensorGroup, part: Tensor) -> Tensor:
        return group.all_reduce(part)

    @staticmethod
    def backward(_: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, outer


class _LogTotal(torch.autograd.Function):
    """log Σ_r exp z_r over all ranks r; backward, ∂z_r = exp(z_r − total)."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, part: Tensor) -> Tensor:
        total = group.gather_rows(part).logsumexp(0)
        ctx.save_for_backward(total, part)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        total, part = ctx.saved_tensors
        return None, (part - total).exp_().mul_(outer)


class _Reshard(torch.autograd.Function):
    """A tensor in another form over the ranks; backward, its gradient in the form before."""

    @staticmethod
    def forward(ctx: Any, reshard: TensorMap, restore: TensorMap, tensor: Tensor) -> Tensor:
        ctx.restore = restore
        return reshard(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.restore(outer)


def copy_to_tp(group: TensorGroup, x: Tensor) -> Tensor:
    """The same tensor; its gradient is the sum over all ranks."""
    [copied] = copies_to_tp(group, [x])
    return copied


def copies_to_tp(group: TensorGroup, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`copy_to_tp` of several tensors, whose gradients are summed in one exchange."""
    apply: Callable[..., tuple[Tensor, ...]] = _Copy.apply
    return apply(group, *given)


reduce_from_tp: Callable[[TensorGroup, Tensor], Tensor] = _Reduce.apply
"""The sum over all ranks."""
log_total: Callable[[TensorGroup, Tensor], Tensor] = _LogTotal.apply
"""log Σ_r exp z_r over all ranks r, from the z_r of this one."""
_reshard: Callable[[TensorMap, TensorMap, Tensor], Tensor] = _Reshard.apply


def gather_from_tp(group: TensorGroup, shard: TensorShard, part: Tensor) -> Tensor:
    """The full tensor from the shards of all ranks; all of them compute the rest alike."""
    return _reshard(partial(group.gather, shard), shard.take, part)


def scatter_to_tp(group: TensorGroup, shard: TensorShard, full: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have."""
    return _reshard(shard.take, partial(group.gather, shard), full)
