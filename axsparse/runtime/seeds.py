"""Random numbers that depend on what they are for, never on which rank draws them or when."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed for a key such as (seed, "block3.fc1.weight", "init").

    Equal keys give equal seeds on every rank, platform and run.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def keyed_generator(*key: int | str) -> torch.Generator:
    """A new generator on the CPU that starts from the seed of a key."""
    return torch.Generator().manual_seed(keyed_seed(*key))


def seed_torch(*key: int | str) -> None:
    """Start torch's global generators from the seed of a key.

    Without a GPU this is the CPU's alone: `torch.manual_seed` would also keep the stack of its
    caller for each kind of device that might still come, which takes 0.1 to 1 ms.
    """
    if torch.cuda.is_available():
        torch.manual_seed(keyed_seed(*key))
    else:
        torch.default_generator.manual_seed(keyed_seed(*key))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Let the code within draw from torch's global generators, and restore them afterwards.

    These are the CPU's, and the current GPU's once CUDA is in use.
    """
    state = rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1])


def rng_state() -> tuple[Tensor, ...]:
    """The state of torch's global generators, on the host; this does not wait for a GPU."""
    if not torch.cuda.is_initialized():
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.cuda.get_rng_state()
