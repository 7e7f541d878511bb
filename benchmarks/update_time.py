"""Time of AdamW's update on a CPU, over a loop that only moves the same bytes: `make bench`.

One thread. The update and the loop that reads and writes the same bytes without a root or a
division take turns; ratios are taken within a round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from figures import Figure, figure
from numba import njit
from torch import Tensor, nn

from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.state_bytes import MasterKind
from axsparse.samo.tensor_state import TensorState

NUMEL = 1 << 24
"""Entries of the dense tensor: its state is larger than caches are."""
DENSITY = 0.1
WIDTH = 65_536
"""Dense entries of a block, in which 16 bits number them."""
HYPER = Hyper(3, 1e-6, (0.9, 0.95), 1e-8, 0.1)

Case: TypeAlias = tuple[torch.dtype, bool]
"""Type of the weights, and whether a tenth is kept."""
CASES: Mapping[str, Case] = {
    "dense, fp32": (torch.float32, False),
    "dense, bf16": (torch.bfloat16, False),
    "a tenth kept, bf16": (torch.bfloat16, True),
}


# -- the bytes --------------------------------------------------------------------------------


def _move_fp32(gradient: Any, mean: Any, square: Any, master: Any) -> None:
    for i in range(mean.size):
        value = gradient[i]
        mean[i] += value
        square[i] += value
        master[i] += value


def _move_bf16(gradient: Any, mean: Any, square: Any, master: Any, weight: Any) -> None:
    for i in range(mean.size):
        value = np.float32(gradient[i])
        mean[i] += value
        square[i] += value
        master[i] += value
        weight[i] = gradient[i]


def _move_kept(gradient: Any, mean: Any, square: Any, master: Any, weight: Any, low: Any) -> None:
    """`low` are the lower 16 bits of the positions; each block of 65,536 entries is taken to have
    as many kept ones as any other."""
    each = low.size * WIDTH // weight.size
    for block in range(weight.size // WIDTH):
        for i in range(block * each, block * each + each):
            value = np.float32(gradient[i])
            mean[i] += value
            square[i] += value
            master[i] += value
        for i in range(block * each, block * each + each):
            weight[block * WIDTH + low[i]] = gradient[i]


_compile: Any = njit(nogil=True, error_model="numpy")
move_fp32, move_bf16, move_kept = map(_compile, (_move_fp32, _move_bf16, _move_kept))


# -- what takes turns ---------------------------------------------------------------------------


def contenders(case: Case, numel: int) -> dict[str, Callable[[], None]]:
    """One update each, by name, of as many entries with the same numbers."""
    layer = _layer(case, numel)
    [tensor] = layer.tensors
    values = [layer.gradient, *layer.optimizer_state.moments_K.values()]
    master_K = layer.optimizer_state.master_K
    values.append(tensor.weight_D if master_K is None else master_K)
    arrays = [_bits(value.clone()) for value in values]
    weight = _bits(tensor.weight_D.clone())
    if case[1]:
        low = (tensor.positions() % WIDTH).numpy().astype(np.uint16)
        move = partial(move_kept, *arrays, weight, low)
    elif case[0] == torch.float32:
        move = partial(move_fp32, *arrays)
    else:
        move = partial(move_bf16, *arrays, weight)
    return {
        "bytes": move,
        "update": lambda: update([layer], ADAMW, HYPER, 0.5),
    }


def _layer(case: Case, numel: int) -> LayerState:
    """The state of one tensor before its third step."""
    dtype, is_pruned = case
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(numel, generator=generator)
    index: Index = FullIndex(numel)
    if is_pruned:
        mask = torch.rand(numel, generator=generator) < DENSITY
        index = make_index(mask, "mask")
        weight *= mask
    tensor = TensorState("w", nn.Parameter(weight.to(dtype)), index, decays=True)
    master: MasterKind = "weight" if dtype == torch.float32 else "fp32"
    layer = LayerState("l", [tensor], StateTypes(dtype, master, ADAMW.moments))
    layer.optimizer_state.write_master(tensor, 0, weight[index.positions()])
    layer.gradient.copy_(torch.randn(index.kept, generator=generator))
    for values in layer.optimizer_state.moments_K.values():
        values.copy_(torch.rand(index.kept, generator=generator))
    return layer


def _bits(values: Tensor) -> Any:
    return (values.view(torch.uint16) if values.itemsize == 2 else values).numpy()


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU of every contender in every round, by its name."""
    torch.set_num_threads(1)
    taking_turns = contenders(CASES[name], NUMEL)
    taken: dict[str, list[float]] = {one: [] for one in taking_turns}
    for number in range(-2, rounds):  # two to compile and to warm up
        for one, step in taking_turns.items():
            began = time.process_time()
            step()
            if number >= 0:
                taken[one].append(time.process_time() - began)
    return taken


def over_bytes(taken: Mapping[str, list[float]]) -> Figure:
    """The update's time over the bytes' time, in each round."""
    pairs = zip(taken["update"], taken["bytes"], strict=True)
    return figure("× bytes", [own / moved for own, moved in pairs])
