"""Bytes of model state a parameter, by formula and by what lives, for every way to store it.

    python benchmarks/state_bytes.py [--json benchmarks/results/state_bytes.json] [--markdown]

One matrix of 4,096 × 4,096 in bf16 with AdamW at five densities. State is allocated as in
training and its tensors are counted; where it is sharded, that of eight ranks, of which the
largest is shown. Ends with 1 where a formula and what lives differ by a byte.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState, StateTypes
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.shards import ALONE, Replicas
from axsparse.samo.state_bytes import IndexKind, StateFormat, TensorSize, layer_bytes, master_kind
from axsparse.samo.tensor_state import TensorState

SIDE = 4096
NUMEL = SIDE * SIDE
DENSITIES = (0.05, 0.1, 0.2, 0.5, 1.0)
REPLICAS = 8
USUAL_DENSE = 20
"""Half weight and gradient, fp32 gradient, master and two moments."""
Accumulation = Literal["half", "fp32"]
DTYPES: dict[Accumulation, torch.dtype] = {"half": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Storage:
    """How state is stored."""

    index: IndexKind
    gradient: Accumulation
    replicas: int

    def live(self, mask_D: Tensor) -> list[int]:
        """Bytes of the tensors of every rank, counted."""
        if self.replicas == 1:
            return [self._allocated(mask_D, ALONE)]
        world: LocalWorld[int] = LocalWorld(self.replicas)

        def rank_bytes(rank: int) -> int:
            transport = LocalTransport(world, rank)
            group = transport.collective("replicas", range(self.replicas))
            return self._allocated(mask_D, Replicas(group, transport.backoff, shard=True))

        return world.run(rank_bytes)

    def _allocated(self, mask_D: Tensor, replicas: Replicas) -> int:
        weight = nn.Parameter(torch.zeros(SIDE, SIDE, dtype=torch.bfloat16))
        tensor = TensorState("w", weight, make_index(mask_D, self.index), decays=True)
        state = LayerState(
            "layer",
            [tensor],
            StateTypes(
                DTYPES[self.gradient],
                master_kind(half=True),
                ADAMW.moments,
                index=self.index,
            ),
            replicas=replicas,
        )
        return state.live_bytes().total

    def formula(self, kept: int, replica: int = 0) -> int:
        """Bytes of one rank by samo/state_bytes.py."""
        return layer_bytes(
            [TensorSize(NUMEL, kept)],
            StateFormat(
                half=True,
                gradient_bytes=DTYPES[self.gradient].itemsize,
                moments=len(ADAMW.moments),
                index=self.index,
                replicas=self.replicas,
            ),
            replica,
        ).total

    def largest(self, kept: int) -> int:
        """Bytes of the rank that holds most, by formula."""
        return max(self.formula(kept, replica) for replica in range(self.replicas))

    def break_even(self, dense_bytes: float) -> float:
        """The sparsity from which on a parameter costs less than so many bytes; 0 if always."""
        low, high = 0, NUMEL  # kept entries: cheaper at `low`, perhaps not at `high`
        if self.largest(high - 1) < dense_bytes * NUMEL:
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            if self.largest(middle) < dense_bytes * NUMEL:
                low = middle
            else:
                high = middle
        return 1 - low / NUMEL


def storages() -> Iterator[Storage]:
    """Every combination of encoding, accumulation and sharding."""
    for replicas, gradient, index in itertools.product(
        (1, REPLICAS), get_args(Accumulation), get_args(IndexKind)
    ):
        yield Storage(index, gradient, replicas)


def masks() -> dict[float, Tensor]:
    """A random mask of exactly the density."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(NUMEL, generator=generator)
    found = {}
    for density in DENSITIES:
        found[density] = torch.zeros(NUMEL, dtype=torch.bool)
        found[density][order[: round(density * NUMEL)]] = True
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    arguments = parser.parse_args()
    drawn = masks()
    rows, wrong = [], 0
    for storage in storages():
        dense = storage.largest(NUMEL) / NUMEL
        row = {
            **asdict(storage),
            "bytes": {},
            "break_even_usual": round(storage.break_even(USUAL_DENSE), 3),
            "break_even_same": round(storage.break_even(dense), 3),
        }
        for density, mask in drawn.items():
            kept = int(mask.sum())
            live = storage.live(mask)
            predicted = [storage.formula(kept, replica) for replica in range(storage.replicas)]
            if live != predicted:
                wrong += 1
                print(f"{storage} at {density}: {live} live, {predicted} by formula")
            row["bytes"][str(density)] = round(max(live) / NUMEL, 4)
        rows.append(row)
        print(line(row, markdown=arguments.markdown), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"numel": NUMEL, "rows": rows}, indent=1) + "\n")
    return 1 if wrong else 0


def line(row: dict[str, object], *, markdown: bool) -> str:
    """A row as text: how state is stored, bytes by density, break-even sparsities."""
    by_density = row["bytes"]
    assert isinstance(by_density, dict)
    cells = [
        f"{row['index']}",
        f"{row['gradient']}",
        f"{row['replicas']}",
        *(f"{value:.3f}" for value in by_density.values()),
        f"{row['break_even_usual']}",
        f"{row['break_even_same']}",
    ]
    return f"| {' | '.join(cells)} |" if markdown else "  ".join(f"{cell:>7}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
