"""The base of the ranks of every peer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import prune

from peers.gpt import Stream
from peers.workload import Case, Run


@dataclass(frozen=True)
class Seat:
    """A rank's place: rank = stage × replicas + replica."""

    run: Run
    rank: int
    stream: Stream

    @property
    def stage(self) -> int:
        return self.rank // self.run.case.replicas

    @property
    def replica(self) -> int:
        return self.rank % self.run.case.replicas

    @property
    def share(self) -> int:
        """Microbatches of this replica."""
        return self.run.size.microbatches // self.run.case.replicas

    @property
    def layers(self) -> range:
        """The layers of this rank's stage."""
        split = self.run.size.split(self.run.case.stages)
        first = sum(split[: self.stage])
        return range(first, first + split[self.stage])

    def batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.stream.share(step, self.replica, self.run.case.replicas)


MODULES = {
    "plain": "peers.contenders.ddp",
    "ddp": "peers.contenders.ddp",
    "fsdp2": "peers.contenders.fsdp2",
    "pipelining": "peers.contenders.pipelining",
    "deepspeed": "peers.contenders.deepspeed_engine",
}


def contender_module(case: Case) -> Any:
    """The module of a peer's framework; its `start(seat)` makes what trains: `step(number)` returns
    the mean losses of the microbatches that this rank knows."""
    return importlib.import_module(MODULES[case.framework])


def prune_weights(layers: Any, masks: Any) -> None:
    """torch.nn.utils.prune as its tutorial has it: each forward multiplies weights by masks."""
    for layer in layers.values():
        for module in list(layer.modules()):
            mask = masks.get(getattr(module, "weight", None))
            if mask is not None:
                prune.custom_from_mask(module, "weight", mask.to(module.weight.dtype))
