"""Random numbers that depend on their purpose, never on which rank draws them or when."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMPY: Any = np.random
"""numpy's module, whose type stubs lack some of its functions."""
_SEEDED = np.random.MT19937()
"""The generator of code that seeds it before it draws."""


def keyed_seed(*key: int | str) -> int:
    """A 63-bit seed for a key such as (seed, "block3.fc1.weight", "init"). Equal keys give equal
    seeds on every rank, platform and run."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def keyed_generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(keyed_seed(*key))


def seed_all(*key: int | str) -> None:
    """Start the global generators of torch (as in `preserved_rng`), Python and numpy from the seed
    of a key; only within `preserved_rng`, where numpy's is one that takes seeds."""
    seed = keyed_seed(*key)
    # `torch.manual_seed` would also keep the stack of its caller for each kind of device that might
    # still come, which takes 0.1 to 1 ms for each layer of each microbatch.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_main() -> None:
    """Start these generators as on every other rank, for draws in `main` of a job."""
    torch.manual_seed(0)
    random.seed(0)
    if isinstance(_NUMPY.get_bit_generator(), np.random.MT19937):  # others take no seed
        np.random.seed(0)


@contextmanager
def preserved_rng(*, is_seeded: bool = False) -> Iterator[None]:
    """Let the code within draw from the global generators of torch, Python and numpy, and restore
    them afterwards.

    torch's are the CPU's, and the current GPU's once CUDA is in use. If `is_seeded`, the code calls
    `seed_all` before it draws, so that numpy's state is not restored: its copy takes ten times as
    long as all the rest. The code does not wait for other ranks.
    """
    meanwhile = _SEEDED if is_seeded else np.random.MT19937()
    of_torch, of_python = _torch_state(), random.getstate()
    of_numpy = _NUMPY.get_bit_generator()
    if not is_seeded and isinstance(of_numpy, np.random.MT19937):
        meanwhile.state = of_numpy.state
    _NUMPY.set_bit_generator(meanwhile)
    try:
        yield
    finally:
        _NUMPY.set_bit_generator(of_numpy)
        random.setstate(of_python)
        torch.set_rng_state(of_torch[0])
        if len(of_torch) > 1:
            torch.cuda.set_rng_state(of_torch[1])


def rng_state() -> tuple[object, ...]:
    """The states of these generators within `preserved_rng`; two are equal if nothing was drawn
    between them."""
    of_torch = (state.numpy().tobytes() for state in _torch_state())
    words, place = _NUMPY.get_state()[1:3]
    return *of_torch, random.getstate(), words.tobytes(), place


def _torch_state() -> tuple[Tensor, ...]:
    """The state of torch's global generators on the host, the current GPU's too once CUDA is in
    use; this does not wait for a GPU."""
    if not torch.cuda.is_initialized():
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.cuda.get_rng_state()
