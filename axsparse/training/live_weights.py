"""Collects the weights of a running training on rank 0, without files in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from axsparse.models.module_buffers import named_tensors, slots, with_other_names
from axsparse.models.sequential import PLAIN, OwnValues
from axsparse.runtime.canonical_form import bytes_of
from axsparse.runtime.communication import Collective, Op, Transport, wait
from axsparse.runtime.exchange import gather_values
from axsparse.runtime.files.safetensors import TensorHeader
from axsparse.samo.layer_construction import BuiltLayer, given_value
from axsparse.training.plan import RunPlan

ROUNDED = {"rtol": 2.0**-7, "atol": 2.0**-24}
"""Differences of two values of which one is rounded to bf16 or fp16."""


@dataclass(eq=False)
class LiveWeights:
    """Gathers parameters and buffers of all stages; all ranks call `collect` together."""

    plan: RunPlan
    layers: Sequence[BuiltLayer]
    transport: Transport
    note_progress: Callable[[], object]

    def __post_init__(self) -> None:
        self._numbers_at_first = dict(self._numbers())

    def collect(self, *, caches: bool) -> dict[str, Tensor] | None:
        """All fp32 masters and buffers by global name, dense and on the CPU; None but on rank 0.

        `caches` asks for the buffers that are not in the state dict as well. One tensor at a time
        is under way.
        """
        coords, transport = self.plan.coords, self.transport
        own = dict(self._own(caches=caches))
        headers = [
            [name, str(header.dtype).removeprefix("torch."), header.shape]
            for name, (header, _) in own.items()
        ]
        all_headers = gather_values(transport, headers)
        if coords.replica != 0:
            if self.plan.config.samo.zero_stage:
                for _, value in own.values():  # replica 0 waits for the shares of the others
                    value()
            return None
        groups = self._groups if coords.tp_rank == 0 else {}
        if not coords.is_first:
            for _, value in own.values():
                tensor = value()
                self.note_progress()
                if coords.tp_rank == 0:
                    self._send(groups[coords.stage], bytes_of(tensor))
            return None
        copies = {name: value().clone() for name, (_, value) in own.items()}
        if coords.tp_rank:
            return None
        for stage, group in groups.items():
            for name, dtype, shape in all_headers[coords.grid.rank(stage, 0)]:
                copies[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self._send(group, copies[name].view(-1).view(torch.uint8))
                self.note_progress()
        return with_other_names(copies, self.plan.profile.other_names)

    def set_numbers(self) -> dict[str, object] | None:
        """The numbers and texts by global name that programs or forwards have set in the layers of
        the first replica since the start, on rank 0; None on the others. All ranks call this
        together."""
        first = self._numbers_at_first
        own = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in self._numbers()
            if first.get(name) != value
        }
        of_all = gather_values(self.transport, own)
        if self.transport.rank:
            return None
        grid = self.plan.coords.grid
        found: dict[str, object] = {}
        for stage in range(grid.g_inter):
            found |= of_all[grid.rank(stage, 0)]
        return found

    def may_have(self, name: str, given: Tensor) -> bool:
        """Whether a tensor has the values, perhaps rounded, that are trained under its name, or no
        layer of this rank has that name: programs put trained weights into their modules, and into
        buffers the values of the first replica."""
        for layer in self.layers:
            shards = {tensor.full_name: tensor for tensor in layer.state.tensors}
            with layer.state.expanded():
                for local, own in named_tensors(layer.module):
                    if layer.spec.full_name(local) == name:
                        if not isinstance(own, nn.Parameter) and self.plan.coords.replica:
                            return True
                        shape = shards[name].full_shape if name in shards else tuple(own.shape)
                        if given.is_meta or tuple(given.shape) != shape:
                            return False
                        flat = given.detach().reshape(-1)
                        flat = shards[name].of_full(flat) if name in shards else flat
                        theirs, ours = flat.to(own), own.detach().reshape(-1)
                        if own.is_floating_point():
                            return torch.allclose(theirs, ours, **ROUNDED, equal_nan=True)
                        return torch.equal(theirs, ours)
        return True

    def may_be_set(self, name: str, before: object) -> bool:
        """Whether the layers that have this number or text have another one than `before` as well,
        as where forwards write it, or are not on this rank."""
        key = name.rpartition(".")[2]
        copies = self._copies(name)
        return all(key != "training" and vars(each).get(key) != before for _, _, each in copies)

    def path_to_copies(self, name: str) -> str:
        """Where a program may set the number or buffer that has this name in the layers; empty
        if this rank has none."""
        key = name.rpartition(".")[2]
        places = [
            f".layers[{number}].module" + (f".get_submodule({path!r})" if path else "")
            for number, path, module in self._copies(name)
            if (key != "training" and isinstance(vars(module).get(key), PLAIN))
            or key in module._buffers
        ]
        if len(places) == self.plan.coords.grid.g_inter == 1:
            return f"trainer{places[0]}.{key}"
        every = (
            f"{key} of each module in [each for layer in trainer.layers for path, each in "
            "layer.module.named_modules() if layer.spec.full_name(path).rstrip('.') in "
            f"{self._paths(name)}]"
        )
        return every if places else ""

    def _paths(self, name: str) -> list[str]:
        start = self.plan.model.start
        return start.paths(name) if isinstance(start, OwnValues) else []

    def _copies(self, name: str) -> list[tuple[int, str, nn.Module]]:
        """The copies, in the layers of this rank, of the given module that has an attribute of this
        name: one in each layer that uses it, with the number of the layer, and its path there."""
        paths = self._paths(name)
        return [
            (number, path, module)
            for number, layer in enumerate(self.layers)
            for path, module in layer.module.named_modules()
            if layer.spec.full_name(path).rstrip(".") in paths
        ]

    def _numbers(self) -> Iterator[tuple[str, object]]:
        """The numbers and texts of the layers by global name, without modes."""
        for layer in self.layers:
            for path, module in layer.module.named_modules():
                for key, value in vars(module).items():
                    if key != "training" and isinstance(value, PLAIN):
                        yield layer.spec.full_name(f"{path}.{key}" if path else key), value

    def _own(
        self, *, caches: bool
    ) -> Iterator[tuple[str, tuple[TensorHeader, Callable[[], Tensor]]]]:
        """The tensors of this stage by name, in the same order on all of its replicas, and what
        makes each when its turn comes."""
        for layer in self.layers:
            state = layer.state
            for local, parameter in layer.module.named_parameters():
                name, shape = layer.spec.full_name(local), tuple(parameter.shape)
                value: Callable[[], Tensor] = partial(self._given, name, parameter.detach())
                if name in self.plan.profile.ties:
                    continue
                if name in state.by_full_name:
                    shape = state.by_full_name[name].full_shape
                    value = partial(state.dense_master, name)
                yield name, (TensorHeader(torch.float32, shape), value)
            for slot in slots(layer.module):
                if slot.persists or caches:
                    now = slot.tensor.detach()
                    header = TensorHeader(now.dtype, tuple(now.shape))
                    yield layer.spec.full_name(slot.name), (header, now.cpu)

    def _given(self, name: str, stored: Tensor) -> Tensor:
        """A frozen parameter in fp32."""
        return given_value(self.plan.model.start, name, stored).to("cpu", torch.float32)

    @cached_property
    def _groups(self) -> dict[int, Collective]:
        """The groups of rank 0 and the first rank of each later stage that this rank is in."""
        coords, transport = self.plan.coords, self.transport
        stages = range(1, coords.grid.g_inter) if coords.is_first else [coords.stage]
        return {
            stage: transport.collective(
                f"weights of stage {stage}", [0, coords.grid.rank(stage, 0)]
            )
            for stage in stages
        }

    def _send(self, group: Collective, buffer: Tensor) -> None:
        if buffer.numel():
            bounds = [0, 0, buffer.numel()]
            wait(group.start(Op.ALL_GATHER, buffer, bounds), self.transport.backoff)
