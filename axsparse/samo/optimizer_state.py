"""The fp32 master weights and the optimizer's moments of one layer's held entries.

There are three ways to store the masters (`MasterKind`):

    "weight"       fp32 training: the weight is its own master, gathered for an update
    "fp32"         half training: an fp32 buffer of held entries, from which weights are rounded
    "remainder"    bf16 training: the weight is the master's upper half, and an int16 buffer of
                   held entries has the lower half

Moments are fp32 buffers of held entries. All of these buffers may rest on the host and visit the
GPU for an update (`samo/offload.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from axsparse.samo import precision
from axsparse.samo.backend import Backend
from axsparse.samo.layer_shares import Shares
from axsparse.samo.relocation import Relocation
from axsparse.samo.state_bytes import MasterKind, StateBytes
from axsparse.samo.tensor_state import TensorState

_DTYPES = {"fp32": torch.float32, "remainder": torch.int16}


@dataclass(frozen=True)
class HeldBuffers:
    """A layer's masters and moments in one place, on the host or on the GPU."""

    master: Tensor | None
    """fp32 masters or int16 remainders; None where fp32 weights are their own masters."""
    moments: dict[str, Tensor]


class OptimizerState:
    """Reads and writes the masters and moments of one layer, wherever they are."""

    def __init__(
        self, shares: Shares, master: MasterKind, moments: tuple[str, ...], backend: Backend
    ) -> None:
        """`write_master` fills the masters; moments are allocated when first asked for."""
        self._shares = shares
        self._backend = backend
        self._is_split = master == "remainder"
        self._master_K = (
            None if master == "weight" else backend.rest(len(shares.held), _DTYPES[master])
        )
        self._names = moments
        self._moments_K: dict[str, Tensor] = {}
        self._visit: HeldBuffers | None = None
        self.settle: Callable[[], None] = _nothing
        """Waits until the buffers on the host have the values of the last update."""

    # -- buffers ----------------------------------------------------------------------

    @property
    def moments_K(self) -> dict[str, Tensor]:
        """The held values of each moment, fp32; zero before the first update."""
        if self._visit is not None:
            return self._visit.moments
        self.settle()
        return self.resting().moments

    @property
    def master_K(self) -> Tensor | None:
        """The held masters or their remainders; None where fp32 weights are their own masters."""
        if self._visit is not None:
            return self._visit.master
        self.settle()
        return self._master_K  # not by `resting`, which would allocate the moments

    def resting(self) -> HeldBuffers:
        """The buffers where they are between updates. Before `settle` returns, values of the last
        update may still be missing there."""
        if not self._moments_K:
            size, rest = len(self._shares.held), self._backend.rest
            self._moments_K.update((name, rest(size, torch.float32)) for name in self._names)
        return HeldBuffers(self._master_K, self._moments_K)

    @contextmanager
    def visiting(self, here: HeldBuffers) -> Iterator[None]:
        """Within this context `here`, a copy of the resting buffers, is read and written."""
        self._visit = here
        try:
            yield
        finally:
            self._visit = None

    # -- masters ----------------------------------------------------------------------

    def read_master(self, tensor: TensorState, start: int, stop: int) -> Tensor:
        """The fp32 master weights of kept entries [start, stop), all held; may be a view."""
        master_K = self.master_K
        if master_K is None:
            return tensor.index.gather(tensor.weight_D, start, stop)
        own = master_K[self._shares.held_slice(tensor, start, stop)].to(self._backend.device)
        if self._is_split:
            return precision.join(tensor.index.gather(tensor.weight_D, start, stop), own)
        return own

    def write_master(self, tensor: TensorState, start: int, values_K: Tensor) -> None:
        """Store new fp32 master weights of the kept entries from `start` on, as far as they are
        held, and round all of them into the dense weight."""
        weight_K = precision.round_to(values_K, tensor.parameter.dtype)
        held = tensor.entries_in(self._shares.held, start, start + values_K.numel())
        master_K = self.master_K
        if master_K is not None and held:
            own = master_K[self._shares.held_slice(tensor, held.start, held.stop)]
            values_K = values_K[held.start - start : held.stop - start]
            if self._is_split:
                own.copy_(precision.remainder(values_K))
            elif own.data_ptr() != values_K.data_ptr():
                own.copy_(values_K)
        tensor.index.scatter(tensor.weight_D, weight_K, start)

    def whole_master(self, tensor: TensorState) -> Tensor:
        """The fp32 masters of all kept entries, `(kept,)`, on the layer's device; may be a view.

        All replicas call this together where the state is sharded.
        """
        if self._master_K is None:
            return self.read_master(tensor, 0, tensor.kept)
        return self._shares.gathered(
            tensor,
            lambda start, stop: self.read_master(tensor, start, stop),
            self._backend.device,
        )

    # -- moments ----------------------------------------------------------------------

    def moments_of(self, tensor: TensorState, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the moments of kept entries [start, stop), all held."""
        held = self._shares.held_slice(tensor, start, stop)
        return {name: values[held] for name, values in self.moments_K.items()}

    def whole_moment(self, tensor: TensorState, moment: str) -> Tensor:
        """One moment of all kept entries, `(kept,)`; called as `whole_master`."""
        values_K = self.moments_K[moment]
        return self._shares.gathered(
            tensor,
            lambda start, stop: values_K[self._shares.held_slice(tensor, start, stop)],
            self._backend.device,
        )

    def reset_moments(self) -> None:
        """Set all moments to zero."""
        for values_K in self.moments_K.values():
            values_K.zero_()

    # -- the whole of it --------------------------------------------------------------

    def relocate(self, relocation: Relocation) -> None:
        """Move all values to where the shares, which are laid out anew, have them now.

        Buffers are replaced one at a time. All replicas call this together.
        """
        self.settle()
        if self._master_K is not None:
            self._master_K = self._relocated(relocation, self._master_K)
        for moment, values_K in self._moments_K.items():
            self._moments_K[moment] = self._relocated(relocation, values_K)

    def _relocated(self, relocation: Relocation, resting: Tensor) -> Tensor:
        shares = self._shares
        old = relocation.all_owned(resting.to(self._backend.device))
        new = old.new_zeros(shares.bounds[-1])
        relocation.carry_over(old, new)
        if shares.is_sharded or self._backend.host is not None:
            held = new[shares.held.start : shares.held.stop]
            return self._backend.rest(len(shares.held), new.dtype).copy_(held)
        return new

    def live_bytes(self) -> StateBytes:
        """Bytes of these buffers."""
        resting = self.resting()
        master = 0 if resting.master is None else resting.master.nbytes
        optimizer = sum(values.nbytes for values in resting.moments.values())
        if self._backend.host is not None:
            return StateBytes(offloaded=master + optimizer)
        return StateBytes(master=master, optimizer=optimizer)


def _nothing() -> None:
    """The `settle` of buffers that never leave the device."""
