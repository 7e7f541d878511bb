"""The ranks that compute one stage together, and what they exchange.

Tensors are cut into C chunks, of which each of T members holds C / T consecutive ones. What chunks
give is added in one binary tree over all of them: first those of a member, then those of two
members, of four, and so on. So the order of the additions does not depend on T, if C does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axsparse.runtime.communication import Collective, Direction, Op, Transport, Work
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.gpu.collectives import NcclWork
from axsparse.runtime.grid import Place
from axsparse.runtime.seeds import kept_rng

Combine = Callable[[Tensor, Tensor], Tensor]
"""Combines two tensors, entry by entry."""


@dataclass(frozen=True)
class Cut:
    """Where the chunks of one tensor lie in the whole tensor."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dim: int
    """The dimension that is cut."""
    groups: int
    """How many matrices stand one above the other (`Split.groups`); each of them is cut."""
    chunks: int
    """The number of chunks in all, those of other members included."""

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins and ends in each group."""
        size = self.shape[self.dim] // self.groups
        return chunk * size // self.chunks, (chunk + 1) * size // self.chunks

    def shape_of(self, chunk: int) -> tuple[int, ...]:
        """The shape of a chunk."""
        start, stop = self.bounds(chunk)
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return (*before, self.groups * (stop - start), *after)

    def take(self, whole: Tensor, chunk: int) -> Tensor:
        """A chunk of the whole tensor, contiguous."""
        return self._part(whole, chunk).flatten(self.dim, self.dim + 1).contiguous()

    def put(self, whole: Tensor, chunk: int, values: Tensor) -> None:
        """Write a chunk into the whole tensor; `values` may be flat."""
        part = self._part(whole, chunk)
        part.copy_(values.view(part.shape))

    def _part(self, whole: Tensor, chunk: int) -> Tensor:
        start, stop = self.bounds(chunk)
        size = self.shape[self.dim] // self.groups
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        grouped = whole.view(*before, self.groups, size, *after)
        return grouped.narrow(self.dim + 1, start, stop - start)


class TensorGroup:
    """The ranks that compute the layers of one stage of one replica together, as one of them."""

    def __init__(
        self, place: Place, transport: Transport, chunks: int, *, on_gpus: bool = False
    ) -> None:
        """All ranks call this together; `chunks` is a multiple of the members, and a power of
        two. Members compute `on_gpus` or on CPUs."""
        grid = place.grid
        self.rank, self.size, self.chunks = place.member, grid.g_tensor, chunks
        each = chunks // self.size
        self.own = range(self.rank * each, (self.rank + 1) * each)
        """The chunks of this member."""
        self.idle: Callable[[], object] = _nothing
        """Called while this member waits for others, so that its messages go on."""
        self.beside: Callable[[Work], object] = _nothing
        """Called with a sum that is under way, to compute what need not wait for it."""
        self.timed: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the waiting."""
        self.fixed_bytes = 0
        """Those of `bytes_sent` that do not grow with the samples of a microbatch."""
        self.copies: dict[Tensor, tuple[Tensor, ...]] = {}
        """What the chunks get of each parameter that a layer uses token by token, while it runs."""
        self.drawn: tuple[Tensor, ...] = ()
        """The state of torch's generators after the last column split, until the row split that
        follows compares it."""
        self._split: tuple[Tensor, bool, list[int], tuple[Tensor, ...]] | None = None
        """The input of the layer's last column split, whether autograd recorded it, its versions,
        and what the chunks got."""
        self._backoff = transport.backoff
        self._keeping = kept_rng if transport.name.endswith("local") else nullcontext
        ranks = [grid.rank(place.stage, place.replica, member) for member in range(self.size)]
        self._members = transport.collective("members", ranks)
        self._pairs: list[Collective] = []
        level = 1
        while level < self.size:
            pair = sorted((self.rank, self.rank ^ level))
            self._pairs.append(transport.collective(f"pair {level}", [ranks[m] for m in pair]))
            level *= 2
        self._arrivals: dict[Direction, Collective] = {}
        """Of members on GPUs, what counts the messages that have come to all of them."""
        for direction in Direction if on_gpus and self.size > 1 else ():
            self._arrivals[direction] = transport.collective(f"arrivals {direction.name}", ranks)
        self._telling: list[Work] = []
        self._hearing: tuple[Tensor, Work] | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other members since the start."""
        return sum(group.bytes_sent for group in (self._members, *self._pairs))

    def fold(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all chunks' tensors, from those of this member, in the order of its chunks;
        the same bits on all members, which call this together.

        With its nearest partner a member exchanges halves, and goes on with the half that is its
        own, then quarters with the next one; at the end they gather what each has summed. So a
        member sends 2 n (T − 1) / T of n bytes, the fewest that there can be. The sum of two
        numbers does not depend on where in a tensor they stand; for other operations it may.
        """
        whole = in_tree(parts, torch.add)
        part, sizes = whole.reshape(-1), list[int]()
        for pair in self._pairs[:-1]:
            sizes.append(part.numel())
            own, given = part.tensor_split(2)[:: 1 - 2 * pair.rank]
            part = self._summed(pair, own, given)
        for pair in self._pairs[-1:]:
            part = self._summed(pair, part, part)
        for pair, size in zip(self._pairs[-2::-1], sizes[::-1], strict=True):
            part = self._exchanged(pair, part, size)
        return part.view(whole.shape)

    def scattered(self, cut: Cut, parts: Sequence[Tensor]) -> list[Tensor]:
        """This member's chunks, which are alike in size, of the sum of all chunks' tensors; all
        members call this together.

        It is the first half of `fold`, with the same bits: a member sends n (T − 1) / T of n bytes.
        """
        whole = in_tree(parts, torch.add).contiguous()
        part = torch.cat([cut.take(whole, chunk).view(-1) for chunk in self._halving_order()])
        for pair in self._pairs:
            own, given = part.tensor_split(2)[:: 1 - 2 * pair.rank]
            part = self._summed(pair, own, given)
        chunks = part.view(len(self.own), *cut.shape_of(self.own.start))
        # Several have memory of their own, so that each can be written to.
        return [chunk.clone() if len(chunks) > 1 else chunk for chunk in chunks.unbind()]

    def _halving_order(self) -> list[int]:
        """All chunks in an order in which those of a member are left, once it has kept its half
        with each of its partners: members by the bits of their numbers, the lowest bit first."""
        owners, bit = [0], 1
        while bit < self.size:
            owners = [owner + high for owner in owners for high in (0, bit)]
            bit *= 2
        each = len(self.own)
        return [owner * each + number for owner in owners for number in range(each)]

    def _summed(self, pair: Collective, own: Tensor, given: Tensor) -> Tensor:
        """The sum of what a member of a pair keeps and what its partner gives for it."""
        both = self._exchanged(pair, given, own.numel() + given.numel())
        return own + (both[given.numel() :] if pair.rank == 0 else both[: own.numel()])

    def of_all(self, own: Tensor) -> Sequence[Tensor]:
        """The tensors of all members, which call this together with tensors of one shape."""
        if self.size == 1:
            return [own]
        every = own.new_empty(self.size, own.numel())
        every[self.rank] = own.reshape(-1)
        self._gather(self._members, every.view(-1))
        return every.view(self.size, *own.shape).unbind()

    def _exchanged(self, pair: Collective, given: Tensor, size: int) -> Tensor:
        """What both members of a pair give, one after the other: `size` entries in all."""
        border = given.numel() if pair.rank == 0 else size - given.numel()
        both = given.new_empty(size)
        (both[:border] if pair.rank == 0 else both[border:]).copy_(given)
        self._gather(pair, both, (0, border, size))
        return both

    def split_input(
        self, x: Tensor, versions: list[int], split: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """What each chunk of this member gets of the input of a column split, which `split` makes.
        Column splits of one input, such as those of query, key and value, get the same tensors, so
        that the gradients of x are summed over the chunks once. `versions` are those of x, which a
        later write changes."""
        has_graph, known = torch.is_grad_enabled(), self._split
        if known is None or known[0] is not x or known[1:3] != (has_graph, versions):
            known = self._split = x, has_graph, versions, split()
        return known[3]

    def end_layer(self) -> None:
        """Forget what has been kept while a layer ran."""
        self.copies, self.drawn, self._split = {}, (), None

    def gathered(self, cut: Cut, parts: Sequence[Tensor]) -> Tensor:
        """The whole of a tensor, from this member's chunks in order, which may be flat; all members
        call this together."""
        sizes = [torch.Size(cut.shape_of(chunk)).numel() for chunk in range(self.chunks)]
        starts = [sum(sizes[:chunk]) for chunk in range(self.chunks + 1)]
        flat = parts[0].new_empty(starts[-1])
        flat[starts[self.own.start] : starts[self.own.stop]] = torch.cat(
            [part.reshape(-1) for part in parts]
        )
        if self.size > 1:
            each = len(self.own)
            self._gather(self._members, flat, starts[::each])
        if cut.groups == 1 and math.prod(cut.shape[: cut.dim]) == 1:
            return flat.view(cut.shape)
        whole = flat.new_empty(cut.shape)
        for chunk in range(self.chunks):
            cut.put(whole, chunk, flat[starts[chunk] : starts[chunk + 1]])
        return whole

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of every member, on all of them, which call this together."""
        return sum_by_owner(self._members, self._backoff, values)

    def tell(self, first: int, second: int) -> None:
        """Tell the other members two numbers; member 0 calls this. On GPUs the numbers have left
        when this returns."""
        self._telling = [work for work in self._telling if not work.poll()]
        if self.size > 1:
            self._telling.append(self._members.start(Op.BROADCAST, torch.tensor([first, second])))
            if self._arrivals:
                self._wait(self._telling[-1])

    def heard(self) -> tuple[int, int] | None:
        """The next two numbers that member 0 tells, or None if they have not come yet."""
        if self._hearing is None:
            words = torch.zeros(2, dtype=torch.int64)
            self._hearing = words, self._members.start(Op.BROADCAST, words)
        words, work = self._hearing
        if not work.poll():
            return None
        self._hearing = None
        first, second = words.tolist()
        return first, second

    def arrived(self, direction: Direction) -> Work | None:
        """Note that the next message of a direction has come here. The work is done once it has
        come to all members; None where a member need not know.

        On GPUs each action begins after that. Its sums then wait for nothing but members that are
        about to begin them, so that compute may wait there in place of a host that sends
        messages, and a host that waits for compute holds up nobody for good.
        """
        if not self._arrivals:
            return None
        return self._arrivals[direction].start(Op.ALL_REDUCE, torch.zeros(1, dtype=torch.float64))

    def _gather(
        self, ranks: Collective, buffer: Tensor, bounds: Sequence[int] | None = None
    ) -> None:
        """Fill a buffer from the shards of these ranks, and compute meanwhile what can be."""
        with self._keeping():
            work = ranks.start(Op.ALL_GATHER, buffer, bounds)
            self.beside(work)
            self._wait(work)

    def _wait(self, work: Work) -> None:
        """Have what follows find the result: over NCCL compute waits, else the host."""
        if isinstance(work, NcclWork):
            with self.timed():
                work.before_compute()
        elif not work.poll():
            with self.timed():
                self._backoff.reset()
                while not work.poll():
                    self.idle()
                    self._backoff.pause()


def _nothing(*_: object) -> None:
    """What a member does while it waits, before there is a pipeline."""


def in_tree(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """Tensors combined in a binary tree: the first two, the next two, then what these gave."""
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class _Spread(torch.autograd.Function):
    """The same tensors for each chunk; backward, the sums of their gradients over all chunks, in
    one exchange."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        # Vectors are parameters, or made of them, such as the weight of a norm plus one.
        ctx.is_fixed = all(isinstance(x, nn.Parameter) or x.dim() < 2 for x in given)
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in given for _ in group.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        group, each = ctx.group, len(ctx.group.own)
        sent = group.bytes_sent
        found = [_without_none(outer[at : at + each]) for at in range(0, len(outer), each)]
        used = [parts for parts in found if parts]
        if len(used) == 1:
            sums = [group.fold(used[0])]
        elif used:
            rows = [
                torch.cat([part.reshape(-1) for part in row]) for row in zip(*used, strict=True)
            ]
            flat = group.fold(rows).split([parts[0].numel() for parts in used])
            sums = [
                part.view(parts[0].shape).to(parts[0].dtype)
                for part, parts in zip(flat, used, strict=True)
            ]
        if ctx.is_fixed:
            group.fixed_bytes += group.bytes_sent - sent
        return None, *[sums.pop(0) if parts else None for parts in found]


def _without_none(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of one tensor by several uses, zeros for those that there are not; empty if there
    is none at all."""
    some = next((gradient for gradient in gradients if gradient is not None), None)
    if some is None:
        return []
    zeros = torch.zeros_like(some)
    return [zeros if gradient is None else gradient for gradient in gradients]


class _Join(torch.autograd.Function):
    """The sum over all chunks; backward, the gradient of the sum for each chunk."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return group.fold(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[outer] * ctx.count


class _JoinTokens(torch.autograd.Function):
    """This member's chunks of the sum over all chunks, cut by tokens; backward, the gradient of the
    sum for each chunk."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, cut: Cut, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut, ctx.count = group, cut, len(parts)
        return tuple(group.scattered(cut, parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *[ctx.group.gathered(ctx.cut, outer)] * ctx.count


class _SpreadTokens(torch.autograd.Function):
    """The whole of a tensor that is cut by tokens, for each chunk; backward, this member's chunks
    of the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, cut: Cut, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut = group, cut
        whole = group.gathered(cut, parts)
        return tuple(whole.view_as(whole) for _ in group.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.group.scattered(ctx.cut, outer)


class _LogTotal(torch.autograd.Function):
    """log Σ_c exp z_c over all chunks; backward, ∂z_c = exp(z_c − total)."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parts: Tensor) -> Tensor:
        own = in_tree(parts, torch.logaddexp)
        total = in_tree(group.of_all(own), torch.logaddexp)
        ctx.save_for_backward(total, *parts)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        total, *parts = ctx.saved_tensors
        return None, *[(part - total).exp_().mul_(outer) for part in parts]


class _Gather(torch.autograd.Function):
    """The whole of a tensor from its chunks; backward, the chunks of the gradient."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, cut: Cut, *parts: Tensor) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return group.gathered(cut, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        outer = outer.contiguous()
        return None, None, *[ctx.cut.take(outer, chunk) for chunk in ctx.group.own]


class _Take(torch.autograd.Function):
    """The chunks of a whole tensor; backward, the whole gradient from its chunks."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, cut: Cut, whole: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut = group, cut
        whole = whole.contiguous()
        return tuple(cut.take(whole, chunk) for chunk in group.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        group, cut = ctx.group, ctx.cut
        sent = group.bytes_sent
        whole = group.gathered(cut, outer)
        if cut.dim == 0:  # such as positions, which all samples share
            group.fixed_bytes += group.bytes_sent - sent
        return None, None, whole


def spread(group: TensorGroup, *given: Tensor) -> tuple[Tensor, ...]:
    """The same tensor for each chunk of this member, of several one after the other; its gradient
    is the sum over all chunks."""
    apply: Callable[..., tuple[Tensor, ...]] = _Spread.apply
    return apply(group, *given)


def join(group: TensorGroup, parts: Sequence[Tensor]) -> Tensor:
    """The sum over all chunks, from the parts of this member."""
    apply: Callable[..., Tensor] = _Join.apply
    return apply(group, *parts)


def spread_tokens(group: TensorGroup, cut: Cut, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`spread` of a tensor of which this member has some chunks."""
    apply: Callable[..., tuple[Tensor, ...]] = _SpreadTokens.apply
    return apply(group, cut, *parts)


def join_tokens(group: TensorGroup, cut: Cut, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This member's chunks of what `join` gives."""
    apply: Callable[..., tuple[Tensor, ...]] = _JoinTokens.apply
    return apply(group, cut, *parts)


def gather(group: TensorGroup, cut: Cut, parts: Sequence[Tensor]) -> Tensor:
    """The whole of a tensor, from the chunks of this member; what follows is alike on all
    members."""
    apply: Callable[..., Tensor] = _Gather.apply
    return apply(group, cut, *parts)


def take(group: TensorGroup, cut: Cut, whole: Tensor) -> tuple[Tensor, ...]:
    """This member's chunks of a tensor that all members have."""
    apply: Callable[..., tuple[Tensor, ...]] = _Take.apply
    return apply(group, cut, whole)


def log_total(group: TensorGroup, parts: Sequence[Tensor]) -> Tensor:
    """log Σ_c exp z_c over all chunks, from the z_c of this member."""
    apply: Callable[..., Tensor] = _LogTotal.apply
    return apply(group, *parts)
