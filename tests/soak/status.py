"""What the ranks of a soaked run tell whoever is about to kill them: a file that all map."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("=qqq")
PHASES = ("", "start-up", "resuming", "training", "ending")
MAX_RANKS = 8
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Told:
    """Where one rank is."""

    process: int
    """0: it has not started."""
    phase: str
    step: int
    """Steps done."""


class Status:
    """The entries of all ranks; each writes its own."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), MAX_RANKS * _ENTRY.size)

    @classmethod
    def new(cls, path: Path) -> Status:
        """An empty one."""
        path.write_bytes(bytes(MAX_RANKS * _ENTRY.size))
        return cls(path)

    def tell(self, phase: str, step: int = 0) -> None:
        """As the rank that the launcher made of this process."""
        rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
        entry = (os.getpid(), PHASES.index(phase), step)
        _ENTRY.pack_into(self._map, rank * _ENTRY.size, *entry)

    def read(self, rank: int) -> Told:
        """What a rank said last."""
        process, phase, step = _ENTRY.unpack_from(self._map, rank * _ENTRY.size)
        return Told(process, PHASES[phase], step)
