"""FSDP2 (fully_shard) with its own mixed precision: fp32 shards, weights gathered in bf16.

`gathered` keeps weights after the forward and sums gradients over replicas once a step.
`resharded` frees weights after each use and sums after each microbatch: less memory.
"bf16 sums" adds the gradients of replicas in bf16 in place of fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from peers.adamw import torch_adamw
from peers.contenders.contender import Seat
from peers.gpt import DTYPES, make_layers, mean_loss


@functools.cache
def mesh_of(replicas: int) -> DeviceMesh:
    """Made once, since its threads have stacks that would count under a cap."""
    return init_device_mesh("cpu", (replicas,))


class Fsdp2:
    def __init__(self, seat: Seat) -> None:
        run = seat.run
        self._gathers_once = run.case.variant.startswith("gathered")
        mesh = mesh_of(run.case.replicas)
        sums = torch.bfloat16 if run.case.variant.endswith("bf16 sums") else torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[run.precision], reduce_dtype=sums, cast_forward_inputs=False
        )
        layers = make_layers(run.size, seat.layers, run.precision)
        # The masters are fp32 and have the values of rounded weights.
        model = nn.Sequential(*layers.values()).float()
        for module in (*model, model):
            fully_shard(
                module, mesh=mesh, reshard_after_forward=not self._gathers_once, mp_policy=policy
            )
        assert isinstance(model, FSDPModule)
        self._model = model
        self._optimizer = torch_adamw(model.parameters())
        self._seat = seat

    def step(self, number: int) -> list[float]:
        self._optimizer.zero_grad()
        losses = []
        batch = self._seat.batch(number)
        for count, (inputs, targets) in enumerate(batch, start=1):
            if self._gathers_once:
                is_last = count == len(batch)
                self._model.set_requires_gradient_sync(is_last)
                self._model.set_reshard_after_backward(is_last)
                self._model.set_is_last_backward(is_last)
            loss = mean_loss(self._model(inputs), targets)
            (loss / len(batch)).backward()
            losses.append(loss.item())
        self._optimizer.step()
        return losses


def start(seat: Seat) -> Fsdp2:
    return Fsdp2(seat)
