"""The promises of every `Link`, as functions that each rank of a transport calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.runs import all_here
from torch import Tensor

from axsparse.runtime.communication import Direction, Link, Message, Transport
from axsparse.runtime.grid import Grid, RankCoords

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ALIGNMENT = 64
"""Bytes; what torch gives its own tensors, and vector instructions like."""
EAGER_BYTES = 8 << 20
"""Far above what any MPI library buffers for a receiver that has not asked yet."""
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    torch.bool,
)


def tensors_of_every_kind_arrive_bit_by_bit(transport: Transport) -> None:
    coords, link = _open(transport)
    assert link.arrivals() == []
    all_here(transport)
    for direction in _outgoing(coords):
        sent = _every_kind(coords.rank, direction)
        link.send(Message(direction, 0, sent, _wishes(sent)))

    for message in _receive(transport, link, 1):
        expected = _every_kind(_source(coords, message.direction), message.direction)
        assert message.microbatch == 0
        assert message.requires_grad == _wishes(expected)
        assert len(message.tensors) == len(expected)
        for tensor, wanted in zip(message.tensors, expected, strict=True):
            _assert_same(tensor, wanted)


def received_tensors_are_aligned_leaves_of_their_own(transport: Transport) -> None:
    coords, link = _open(transport)
    base = torch.arange(35.0, requires_grad=True)
    sent = (base.exp()[1:], base.view(5, 7).t() * 2, torch.arange(6.0).view(2, 3).t())
    before = [tensor.detach().clone() for tensor in sent]
    for direction in _outgoing(coords):
        link.send(Message(direction, 3, sent, (True, True, False)))

    for message in _receive(transport, link, 1):
        assert message.requires_grad == (True, True, False)
        for tensor in message.tensors:
            assert tensor is not None
            assert tensor.is_leaf and not tensor.requires_grad
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            tensor.zero_()
    _drain(transport, link)
    all_here(transport)
    for tensor, wanted in zip(sent, before, strict=True):
        assert torch.equal(tensor, wanted)


def messages_keep_their_order_in_each_direction(transport: Transport) -> None:
    coords, link = _open(transport)
    count = 60

    def content(rank: int, number: int) -> tuple[Tensor, ...]:
        # Every seventh is large, so that those after it could overtake it.
        size = 20_000 if number % 7 == 0 else number % 3
        return (torch.full((size,), 100 * rank + number), torch.tensor(number))

    for number in range(count):
        for direction in _outgoing(coords):
            link.send(Message(direction, number, content(coords.rank, number)))

    messages = _receive(transport, link, count)
    for direction in _incoming(coords):
        arrived = [message for message in messages if message.direction is direction]
        assert [message.microbatch for message in arrived] == list(range(count))
        for number, message in enumerate(arrived):
            expected = content(_source(coords, direction), number)
            for tensor, wanted in zip(message.tensors, expected, strict=True):
                _assert_same(tensor, wanted)


def neighbours_may_both_send_much_before_either_receives(transport: Transport) -> None:
    coords, link = _open(transport)

    def content(rank: int, number: int) -> Tensor:
        return torch.arange(EAGER_BYTES // 8) * (10 * rank + number + 1)

    # Nobody but the link holds what was sent.
    for number in range(2):
        for direction in _outgoing(coords):
            link.send(Message(direction, number, (content(coords.rank, number),)))
    all_here(transport)

    for message in _receive(transport, link, 2):
        wanted = content(_source(coords, message.direction), message.microbatch)
        _assert_same(message.tensors[0], wanted)


def bytes_sent_counts_contents_and_nothing_stays_unsent(transport: Transport) -> None:
    coords, link = _open(transport)
    assert link.bytes_sent == link.unsent == 0
    tensors = (torch.ones(3, 5), None, torch.ones(7, dtype=torch.bfloat16), torch.empty(0, 4))
    outgoing = _outgoing(coords)

    for number in range(4):
        for direction in outgoing:
            link.send(Message(direction, number, tensors))

    assert link.bytes_sent == 4 * len(outgoing) * (3 * 5 * 4 + 7 * 2)
    _receive(transport, link, 4)
    _drain(transport, link)
    assert link.unsent == 0


LARGE = (neighbours_may_both_send_much_before_either_receives,)
CONTRACT: tuple[Callable[[Transport], None], ...] = (
    tensors_of_every_kind_arrive_bit_by_bit,
    received_tensors_are_aligned_leaves_of_their_own,
    messages_keep_their_order_in_each_direction,
    bytes_sent_counts_contents_and_nothing_stays_unsent,
    *LARGE,
)
"""For two ranks and more, all of them stages of one pipeline."""


def _open(transport: Transport) -> tuple[RankCoords, Link]:
    coords = Grid(transport.size, 1).coords(transport.rank)
    return coords, transport.link(coords)


def _outgoing(coords: RankCoords) -> list[Direction]:
    return [FORWARD] * (not coords.is_last) + [BACKWARD] * (not coords.is_first)


def _incoming(coords: RankCoords) -> list[Direction]:
    return [FORWARD] * (not coords.is_first) + [BACKWARD] * (not coords.is_last)


def _source(coords: RankCoords, direction: Direction) -> int:
    return coords.rank + (-1 if direction is FORWARD else 1)


def _receive(transport: Transport, link: Link, from_each: int) -> list[Message]:
    """That many messages from each neighbour, and none beyond."""
    coords = Grid(transport.size, 1).coords(transport.rank)
    expected = from_each * len(_incoming(coords))
    messages: list[Message] = []
    transport.backoff.reset()
    while len(messages) < expected:
        messages += link.arrivals()
        transport.backoff.pause()
    assert len(messages) == expected
    return messages


def _drain(transport: Transport, link: Link) -> None:
    """Until the transport holds no tensor any more; `arrivals` is what makes progress."""
    transport.backoff.reset()
    while link.unsent:
        assert link.arrivals() == []
        transport.backoff.pause()


def _every_kind(rank: int, direction: Direction) -> tuple[Tensor | None, ...]:
    """Every type and shape, different for each sender; None only where gradients travel."""
    generator = torch.Generator().manual_seed(2 * rank + direction)
    shapes = ((), (0,), (1,), (3, 0, 2), (2, 3, 5), (257,))
    kinds: list[Tensor | None] = []
    for number, dtype in enumerate(DTYPES):
        for shape in shapes:
            values = torch.randint(0, 100, shape, generator=generator)
            kinds.append((values % 2 if number == len(DTYPES) - 1 else values).to(dtype))
    whole = torch.randn(6, 8, generator=generator)
    kinds += [
        whole.t(),
        whole[:, ::2],
        whole[1:, 3],
        whole[:1].expand(4, 8),
        whole.bfloat16().t(),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        torch.randn(4, generator=generator, requires_grad=True).exp(),
    ]
    if direction is BACKWARD:
        kinds[1::4] = [None] * len(kinds[1::4])
    return tuple(kinds)


def _wishes(tensors: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    """A pattern of gradients wanted, with none wanted for a tensor that is not there."""
    return tuple(t is not None and number % 3 == 1 for number, t in enumerate(tensors))


def _assert_same(tensor: Tensor | None, wanted: Tensor | None) -> None:
    if tensor is None or wanted is None:
        assert tensor is wanted is None
        return
    assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(_bits(tensor), _bits(wanted))


def _bits(tensor: Tensor) -> Tensor:
    """Bytes, since NaN equals nothing and −0 equals 0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
