"""What the links of GPUs need of a channel between hosts, as protocols; `wire_mpi` is the real one.

A wire goes one way between two neighbours. Headers and contents are two sequences, each
first in, first out.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from axsparse.runtime.message_header import Header

QUIET_PASSES = 2
"""Looks without a find before arrivals are complete. A call that finds nothing may be the one
that lets MPI take in what has come: after a long action one look saw nothing in 12 cases of
12 (MPICH 5.0), two saw all, and a schedule that decides on half the arrivals is not driven
by them."""


class Request(Protocol):
    """A send or receive under way; its memory stays alive and untouched until it is done."""

    def done(self) -> bool:
        """Whether it has completed; lets the channel make progress."""
        ...


class Wire(Protocol):
    """One end of a one-way channel; no call but `close` waits."""

    def send_header(self, header: Header) -> Request:
        """Start sending a header."""
        ...

    def receive_header(self) -> Header | None:
        """The next header, if it is here."""
        ...

    def send(self, piece: Tensor) -> Request:
        """Start sending bytes."""
        ...

    def receive(self, piece: Tensor) -> Request:
        """Start receiving as many bytes as are sent."""
        ...

    def close(self) -> None:
        """Release the channel; nothing is under way any more."""
        ...


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, flat, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def byte_pieces(tensor: Tensor, most: int) -> list[Tensor]:
    """The bytes of a contiguous tensor, as views of at most `most` each; none of nothing."""
    content = as_bytes(tensor)
    return [content[start : start + most] for start in range(0, content.numel(), most)]
