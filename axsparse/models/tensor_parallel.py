"""Layers that the ranks of a group compute together: each holds some chunks of their matrices.

A linear module that `Layer.tensor` names is cut into C chunks, each a plain `nn.Linear`. The T
members of a group hold C / T consecutive chunks each. A column split cuts outputs, and a row split
cuts inputs, so that

    y = Σ_c row_c(between(column_c(x))) + bias

where x and y are alike on all members. The sum, and that of the gradients of x, runs in one binary
tree over the C chunks: first those of a member, then those of two members, of four, and so on. So
neither the shapes of the products nor the order of the additions depends on T, if C does not.

Shapes: B sequences of a microbatch, S tokens of each, H hidden size; I inputs and O outputs of a
linear module; t a token, v a word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from axsparse.models.chunked_tensor import ChunkedTensor, chunk_of, chunked, of_all_chunks
from axsparse.models.layer import Layer, Split, SplitKind
from axsparse.models.losses import most_logits, refuse_foreign_words
from axsparse.runtime.bounds import IGNORED
from axsparse.runtime.communication import Collective, Direction, Op, Transport, Work
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.gpu.collectives import NcclWork
from axsparse.runtime.grid import Place
from axsparse.runtime.seeds import kept_rng, torch_state

MOST_CHUNKS = 8
"""Chunks under `layout.tensor_exact`: the highest degree, and not so many that products of degree
1 become small."""
WHOLE = ("shared", "summed")
"""Kinds of splits that name a module; parameters inside it are cut only where other splits name
them."""
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


def as_splits(layer: str, given: Mapping[str, Split | str]) -> dict[str, Split]:
    """`Layer.tensor` with a `Split` for each kind that is given by its name."""
    splits = {}
    for path, one in given.items():
        split = Split(one) if isinstance(one, str) else one  # type: ignore[arg-type]  # checked
        if not isinstance(split, Split) or split.kind not in get_args(SplitKind):
            raise ConfigError(
                f"layer {layer}: tensor has {one!r} for {path!r}, which is not known; give one of "
                f"{', '.join(get_args(SplitKind))}, a Split, or layout.g_tensor 1"
            )
        splits[path] = split
    return splits


def cuts_of(
    layer: str,
    splits: Mapping[str, Split | str],
    shapes: Mapping[str, tuple[int, ...]],
    chunks: int,
    key: str = "layout.g_tensor",
) -> dict[str, Cut]:
    """How each parameter of a layer is cut, by its name within the layer; only those that are.

    `shapes` has the layer's parameters. ConfigError for a module that the layer does not have or
    whose size the chunks do not divide; `key` is the setting from which their number follows.
    """
    cuts = {}
    for path, split in as_splits(layer, splits).items():
        names = [f"{path}.weight"] + [f"{path}.bias"] * (split.kind == "column")
        found = [name for name in (names if names[0] in shapes else [path]) if name in shapes]
        if split.kind in WHOLE and any(name.startswith(f"{path}.") for name in shapes):
            continue
        if not found:
            nearest = ", ".join(get_close_matches(path, [*shapes], n=2, cutoff=0))
            raise ConfigError(
                f"layer {layer}: tensor names {path!r}, which has no weight; nearest: {nearest}"
            )
        for name in found:
            cut = Cut(shapes[name], _dim_of(split, shapes[name]), split.groups, chunks)
            size = cut.shape[cut.dim]
            if not _can_be_cut(split, size, chunks) and split.kind == "vocabulary":
                raise ConfigError(
                    f"{key}: {chunks} chunks are more than the {size} words of {layer}.{name}; "
                    "choose a smaller power of two"
                )
            if not _can_be_cut(split, size, chunks):
                raise ConfigError(
                    f"{key}: {chunks} chunks do not divide the {size // split.groups} outputs or "
                    f"inputs of {layer}.{name}, of which {split.unit} stay together; choose a "
                    "power of two that does"
                )
            cuts[name] = cut
    return cuts


def _can_be_cut(split: Split, size: int, chunks: int) -> bool:
    """Whether so many outputs, inputs or words give chunks, those of words not all alike."""
    if split.kind == "vocabulary":
        return chunks <= size
    return size % (split.groups * split.unit * chunks) == 0


def _dim_of(split: Split, shape: tuple[int, ...]) -> int:
    """The dimension along which a parameter of this shape is cut."""
    last = len(shape) - 1
    return last if split.kind == "row" else max(last - 1, 0)


def most_chunks(
    layer: str, splits: Mapping[str, Split | str], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """The largest power of two up to `MOST_CHUNKS` that divides all that a layer has cut."""
    chunks = MOST_CHUNKS
    for path, split in as_splits(layer, splits).items():
        shape = shapes.get(f"{path}.weight", shapes.get(path))
        if shape is not None and split.kind not in WHOLE:
            size = shape[_dim_of(split, shape)]
            while chunks > 1 and not _can_be_cut(split, size, chunks):
                chunks //= 2
    return chunks


# -- the members of a group -------------------------------------------------------------


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
        self.drawn: tuple[Tensor, ...] = ()
        """The state of torch's generators after the last column split, until the row split that
        follows compares it."""
        self._split: tuple[Tensor, tuple[Tensor, ...]] | None = None
        """The input of the last column split that autograd recorded, and what the chunks got, until
        the row split that follows."""
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
        for pair in self._pairs:
            sizes.append(part.numel())
            if pair is self._pairs[-1]:
                own = given = part
            else:
                halves = part.tensor_split(2)
                own, given = halves[pair.rank], halves[1 - pair.rank]
            both = self._exchanged(pair, given, given.numel() + own.numel())
            theirs = both[given.numel() :] if pair.rank == 0 else both[: own.numel()]
            part = own + theirs if pair.rank == 0 else theirs + own
        for pair, size in zip(self._pairs[-2::-1], sizes[-2::-1], strict=True):
            part = self._exchanged(pair, part, size)
        return part.view(whole.shape)

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

    def split_input(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each chunk of this member gets of the input of a column split. Column splits of one
        input, such as those of query, key and value, get the same tensors until a row split
        follows, so that the gradients of x are summed over the chunks once."""
        if not torch.is_grad_enabled():
            return spread(self, x)
        if self._split is None or self._split[0] is not x:
            self._split = x, spread(self, x)
        return self._split[1]

    def end_split(self) -> None:
        """Begin anew: a row split has followed."""
        self.drawn, self._split = (), None

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
    """The same tensor for each chunk; backward, the sum of the gradients over all chunks."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for _ in group.own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor]:
        return None, ctx.group.fold(outer)


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
        return None, None, ctx.group.gathered(ctx.cut, outer)


def spread(group: TensorGroup, x: Tensor) -> tuple[Tensor, ...]:
    """The same tensor for each chunk of this member; its gradient is the sum over all chunks."""
    apply: Callable[..., tuple[Tensor, ...]] = _Spread.apply
    return apply(group, x)


def join(group: TensorGroup, parts: Sequence[Tensor]) -> Tensor:
    """The sum over all chunks, from the parts of this member."""
    apply: Callable[..., Tensor] = _Join.apply
    return apply(group, *parts)


def _features(like: Tensor, size: int, chunks: int, groups: int = 1) -> Cut:
    """How the last dimension of activations, of `size` features in all, is cut."""
    return Cut((*like.shape[:-1], size), like.dim() - 1, groups, chunks)


# -- modules ----------------------------------------------------------------------------


class Column(nn.Module):
    """A linear module whose outputs are cut: (…, I) to (…, O · own chunks / chunks), or to (…, O)
    if they are gathered."""

    def __init__(self, linear: nn.Linear, cut: Cut, group: TensorGroup, split: Split) -> None:
        super().__init__()
        self.group, self.groups, self.gathers = group, cut.groups, split.gathered
        self.features = linear.out_features
        has_bias = linear.bias is not None
        self.chunks = nn.ModuleList(
            nn.Linear(linear.in_features, cut.shape_of(chunk)[0], bias=has_bias, device="meta")
            for chunk in group.own
        )

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        each = zip(self.chunks, group.split_input(x), strict=True)
        parts: list[Tensor] = [chunk(part) for chunk, part in each]
        if self.gathers:
            cut = _features(parts[0], self.features, group.chunks, self.groups)
            apply: Callable[..., Tensor] = _Gather.apply
            return apply(group, cut, *parts)
        group.drawn = torch_state()
        return chunked(parts)


class Row(nn.Module):
    """A linear module whose inputs are cut: (…, I · own chunks / chunks), or (…, I) if they are
    gathered, to (…, O)."""

    def __init__(self, linear: nn.Linear, cut: Cut, group: TensorGroup, split: Split) -> None:
        super().__init__()
        self.group, self.groups, self.takes = group, cut.groups, split.gathered
        self.features = linear.in_features
        self.bias = linear.bias
        self.chunks = nn.ModuleList(
            nn.Linear(cut.shape_of(chunk)[1], linear.out_features, bias=False, device="meta")
            for chunk in group.own
        )

    def forward(self, x: Tensor) -> Tensor:
        group, parts = self.group, x.chunks if isinstance(x, ChunkedTensor) else (x,)
        if self.takes:
            apply: Callable[..., tuple[Tensor, ...]] = _Take.apply
            cut = _features(x, x.shape[-1], group.chunks, self.groups)
            parts = apply(group, cut, x) if x.shape[-1] == self.features else ()
        elif group.drawn and not all(map(torch.equal, group.drawn, torch_state())):
            raise ConfigError(
                "layout.g_tensor: random numbers are drawn between a column and a row split, and "
                "would differ with the degree; move the dropout behind the row split"
            )
        group.end_split()
        if torch.is_grad_enabled() and not all(part.requires_grad for part in parts):
            raise ConfigError(
                "layout.g_tensor: what lies between a column and a row split passes no gradient "
                "on; gather both splits (Split.gathered), since an autograd.Function there does "
                "not see the chunks"
            )
        if [part.shape[-1] for part in parts] != [chunk.in_features for chunk in self.chunks]:
            raise ConfigError(
                f"layout.g_tensor: a row split of {self.features} features in {group.chunks} "
                f"chunks gets {tuple(x.shape)}; let what lies before it take the number of heads "
                "or features from the tensor, and gather both splits or neither (Split.gathered)"
            )
        total = join(group, [chunk(p) for chunk, p in zip(self.chunks, parts, strict=True)])
        return total if self.bias is None else total + self.bias


class Shared(nn.Module):
    """A module that every chunk uses, each for its own heads or features: shapes are the module's.

    It has the module's own dictionaries of parameters and buffers, so that their names stay.
    """

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[kind] = vars(module)[kind]
        vars(self)["_module"] = module
        self.group = group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = vars(self)["_module"]
        module.training = self.training
        # The chunks' gradients of a parameter are summed as those of an activation are.
        copies = {name: spread(self.group, p) for name, p in module.named_parameters()}
        with _steady_buffers(module):
            results = [
                functional_call(
                    module,
                    {name: each[number] for name, each in copies.items()},
                    chunk_of(args, number),
                    chunk_of(kwargs, number),
                )
                for number in range(len(self.group.own))
            ]
        return of_all_chunks(module, results)


class Summed(nn.Module):
    """A module of which every chunk runs all with its own chunks of the parameters: the outputs are
    added, and so are the gradients of the inputs."""

    def __init__(self, module: nn.Module, cuts: Mapping[str, Cut], group: TensorGroup) -> None:
        super().__init__()
        self.group, self.chunks = group, nn.ModuleList()
        for number in group.own:
            chunk = copy.copy(module)
            vars(chunk)["_parameters"] = {
                name: nn.Parameter(torch.empty(cut.shape_of(number), device="meta"))
                for name, cut in cuts.items()
            }
            self.chunks.append(chunk)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        each = {
            key: spread(self.group, x)
            if isinstance(x, Tensor) and x.is_floating_point()
            else (x,) * len(self.chunks)
            for key, x in (*enumerate(inputs), *named.items())
        }
        with _steady_buffers(self):
            parts = [
                chunk(
                    *(each[place][number] for place in range(len(inputs))),
                    **{name: each[name][number] for name in named},
                )
                for number, chunk in enumerate(self.chunks)
            ]
        return join(self.group, parts)


@contextmanager
def _steady_buffers(module: nn.Module) -> Iterator[None]:
    """ConfigError if calls of a module for each chunk change a buffer, which would then depend on
    how many chunks a member has."""
    before = [(name, buffer, buffer._version) for name, buffer in module.named_buffers()]
    yield
    for (name, now), (_, buffer, version) in zip(module.named_buffers(), before, strict=True):
        if now is not buffer or now._version != version:
            raise ConfigError(
                f"layout.g_tensor: a shared or summed module changes its buffer {name!r} once for "
                "each chunk; keep what it counts outside of what is cut"
            )


class Vocabulary(nn.Module):
    """An embedding whose words are cut: (B, S) integers to (B, S, H)."""

    def __init__(self, cut: Cut, group: TensorGroup) -> None:
        super().__init__()
        self.group, self.words = group, cut.shape[0]
        self.bounds = [cut.bounds(chunk) for chunk in group.own]
        self.chunks = nn.ModuleList(
            nn.Embedding(stop - start, cut.shape[1], device="meta") for start, stop in self.bounds
        )

    def forward(self, tokens: Tensor) -> Tensor:
        refuse_foreign_words(tokens, self.words)
        parts = []
        for chunk, (start, stop) in zip(self.chunks, self.bounds, strict=True):
            here = (tokens >= start) & (tokens < stop)
            rows = chunk((tokens - start).clamp(0, stop - start - 1))
            parts.append(rows.masked_fill(~here.unsqueeze(-1), 0))
        return join(self.group, parts)


class Chunks(nn.Module):
    """The chunks of a parameter that the layer hands to the loss."""

    def __init__(self, cut: Cut, group: TensorGroup) -> None:
        super().__init__()
        self.chunks = nn.ParameterList(
            nn.Parameter(torch.empty(cut.shape_of(chunk), device="meta")) for chunk in group.own
        )


def chunk_modules(module: nn.Module) -> set[nn.Module]:
    """The linear modules inside a module that hold chunks of cut ones."""
    cut = (each for each in module.modules() if isinstance(each, (Column, Row)))
    return {chunk for each in cut for chunk in each.chunks}


def chunks_of(weight: nn.Parameter | Chunks) -> tuple[nn.Parameter, ...]:
    """The chunks of a weight that are here: the weight itself, where it is not cut."""
    return tuple(weight.chunks) if isinstance(weight, Chunks) else (weight,)


def cut_module(
    layer: Layer, module: nn.Module, cuts: Mapping[str, Cut], group: TensorGroup
) -> dict[str, tuple[str, int]]:
    """Cut the modules of a layer whose parameters `cuts` names; the chunks have no contents yet.

    Returns, by the name of each chunk's parameter within the layer, the name of the whole parameter
    and the number of the chunk. ConfigError for a module that cannot be cut.
    """
    found: dict[str, tuple[str, int]] = {}
    splits = as_splits(layer.name, layer.tensor)
    for name in cuts:
        path = name.rpartition(".")[0]
        replaced = module.get_submodule(path) if path in splits else None
        for what in _what_is_lost(replaced, module.get_parameter(name)):
            raise ConfigError(
                f"layer {layer.name}: {name} {what}, and is not cut; leave it out of tensor"
            )
    for path, split in splits.items():
        owner = module.get_submodule(path) if split.kind in WHOLE else module
        if split.kind == "shared":
            _replace(module, path, Shared(owner, group))
        elif split.kind == "summed":
            inside = _cuts_inside(layer, path, owner, cuts)
            _replace(module, path, Summed(owner, inside, group))
    for name, cut in cuts.items():
        path, _, kind = name.rpartition(".")
        owner = module.get_submodule(path)
        own = enumerate(group.own)
        if isinstance(
            owner, (Column, Row, Summed)
        ):  # Replaced with the weight before this bias, or above.
            found |= {f"{path}.chunks.{n}.{kind}": (name, c) for n, c in own}
            continue
        if (
            name in splits and splits[name].kind == "vocabulary"
        ):  # A parameter that the layer hands to the loss, such as the head's weight.
            delattr(owner, kind)
            setattr(owner, kind, Chunks(cut, group))
            found |= {f"{name}.chunks.{n}": (name, c) for n, c in own}
            continue
        new: nn.Module
        if type(owner) is nn.Linear and path in splits:
            new = (Row if cut.dim else Column)(owner, cut, group, splits[path])
        elif type(owner) is nn.Embedding and owner.padding_idx is None and not owner.max_norm:
            new = Vocabulary(cut, group)
        else:
            raise ConfigError(
                f"layer {layer.name}: {path} is {type(owner).__name__}, which is not cut by "
                f"{name!r}; name a plain nn.Linear or nn.Embedding in tensor, or leave it out"
            )
        _replace(module, path, new)
        found |= {f"{path}.chunks.{n}.{kind}": (name, c) for n, c in own}
    kinds = {split.kind for split in splits.values() if not split.gathered}
    if len(kinds & {"column", "row"}) == 1:
        raise ConfigError(
            f"layer {layer.name}: tensor has column splits or row splits, and not both; what lies "
            'between "column" and "row" is cut, so name both, or gather (Split.gathered)'
        )
    return found


def _what_is_lost(replaced: nn.Module | None, parameter: nn.Parameter) -> Iterator[str]:
    """What a parameter has, or a module that is replaced, and their chunks would not have."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if not parameter.requires_grad:
        yield "is frozen"
    if replaced is not None and any(vars(replaced)[kind] for kind in hooks):
        yield "is of a module with hooks"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        yield "has hooks"


def is_cut(module: nn.Module) -> bool:
    """Whether any module in it is cut."""
    kinds = (Column, Row, Shared, Summed, Vocabulary, Chunks)
    return any(isinstance(child, kinds) for child in module.modules())


def _cuts_inside(
    layer: Layer, path: str, owner: nn.Module, cuts: Mapping[str, Cut]
) -> dict[str, Cut]:
    """How the parameters of a summed module are cut, by their names in it; ConfigError if one is
    not cut."""
    inside = {}
    for name, parameter in owner.named_parameters():
        if f"{path}.{name}" not in cuts or not parameter.requires_grad or "." in name:
            raise ConfigError(
                f"layer {layer.name}: {path} is summed over chunks, so that {path}.{name} has to "
                'be trained, its own, and cut; name it "column" or "row" in tensor, or leave '
                f"{path} out"
            )
        inside[name] = cuts[f"{path}.{name}"]
    return inside


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    above, _, last = path.rpartition(".")
    setattr(module.get_submodule(above), last, new)


# -- the loss of a cut vocabulary -------------------------------------------------------


def vocabulary_cross_entropy(
    group: TensorGroup, words: int, hidden: Tensor, *weights_and_targets: Tensor
) -> Tensor:
    """`losses.linear_cross_entropy` with this member's chunks of the weight, of `words` rows.

    loss = Σ_t log Σ_c exp(log Σ_{v in c} exp z[t, v]) − Σ_c z[t, y[t]]
    """
    *weights, targets = weights_and_targets
    flat, rows = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    refuse_foreign_words(rows, words, ignored=IGNORED)
    totals, hits = [], []
    for chunk, part, weight in zip(group.own, spread(group, flat), weights, strict=True):
        start = chunk * words // group.chunks
        if len(rows) * len(weight) > most_logits(rows.device) and torch.is_grad_enabled():
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            total, hit = checkpoint(_totals, part, weight, rows - start, **options)
        else:
            total, hit = _totals(part, weight, rows - start)
        totals.append(total)
        hits.append(hit)
    apply: Callable[..., Tensor] = _LogTotal.apply
    losses = apply(group, *totals) - join(group, hits)
    return torch.where(rows != IGNORED, losses, 0).sum()


def _totals(hidden: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ_v exp z[t, v] over the words of a chunk, and z at the target if it is one of them."""
    logits = F.linear(hidden, weight).float()
    here = (rows >= 0) & (rows < len(weight))
    columns = rows.clamp(0, len(weight) - 1).unsqueeze(1)
    return logits.logsumexp(1), here * logits.gather(1, columns).squeeze(1)
