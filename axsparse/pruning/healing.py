"""Heals one pruned layer: fits the kept weights to the outputs of the dense layer, and by the loss.

The layer's outputs on the activations of the pruned layers before it are fitted to the outputs of
the dense layer on the activations of the dense layers before that, over the calibration samples.
The error of a token is

    Σ (output − dense output)² / Σ (dense output)²

over the entries of the token: without the division a few tokens with huge activations decide. The
last pruned layer of a model is then fitted by the model's loss, through the layers after it, which
are as they were. Weights that are pruned stay zero; kept weights, norms and biases are trained, by
Adam (Kingma and Ba 2015) with betas 0.9 and 0.95. Its learning rate, which falls linearly to zero,
is a share of the root mean square of a tensor's entries, since the entries of large models are ten
times as small as in small ones. Masters are fp32, products are in the run's precision. Fitting
block by block is from "A Free Lunch in LLM Compression" (arXiv 2510.14444).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Adam

from axsparse.runtime.communication import Op
from axsparse.runtime.errors import DataError, writing
from axsparse.runtime.files.atomic import new_path, remove_unfinished
from axsparse.runtime.files.safetensors import SafetensorsFile, header_of, write_safetensors
from axsparse.samo.selection import unpack
from axsparse.samo.shards import ALONE, Replicas

BETAS = (0.9, 0.95)
BITS = 40
"""Bits of the largest entry of a gradient that is added as integers."""
TINY = 1e-12
"""The least that the squares of a token's dense outputs count, so that zeros divide nothing."""

LOSS_RATE = 0.15
"""The learning rate of a layer that is fitted by the loss, in units of the other layers'."""

Tensors = tuple[Tensor, ...]
Errors: TypeAlias = Callable[[int], tuple[Tensor, int]]
"""Gives the errors of a microbatch, by its number: their sum, and of how many there are."""


@dataclass(frozen=True)
class Reconstruction:
    """How long and how fast a layer is fitted."""

    passes: int
    rate: float
    """The learning rate at the first step, in root mean squares of a tensor."""
    batch: int = 1
    replicas: Replicas = ALONE
    """The ranks that fit the same layer, and share the microbatches."""

    def heal(
        self,
        module: nn.Module,
        masters: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        errors: Errors,
        microbatches: int,
    ) -> tuple[float, float]:
        """Fit the trained parameters of a layer in place, and return its error before and after.

        `masters` has the fp32 values of the parameters that are trained, by their names in the
        module, which are changed; `masks` has the bool masks of those that are pruned, of the same
        shapes. The errors before and after are means over all microbatches.
        """
        parameters = dict(module.named_parameters())
        trained = {name: parameters[name] for name in masters}
        # Fused, the optimizer of a tensor takes one pass and no memory in between.
        optimizers = {
            name: Adam([master], betas=BETAS, fused=master.device.type in ("cpu", "cuda"))
            for name, master in masters.items()
        }
        sizes = _sizes(masters)
        before = self._error(errors, microbatches)
        batches = [
            range(first, min(first + self.batch, microbatches))
            for first in range(0, microbatches, self.batch)
        ]
        steps, step = self.passes * len(batches), 0

        def gradients_of(number: int) -> tuple[Tensor | None, ...]:
            # In the thread of this rank, as a training's backward (`pipeline/stage.py`).
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                total, count = errors(number)
                mean = total / max(count, 1)
                return torch.autograd.grad(mean, list(trained.values()), allow_unused=True)

        for _ in range(self.passes):
            for batch in batches:
                rate = self.rate * (1 - step / steps)
                step += 1
                # Nothing but the loop keeps the gradients, so that they are gone before the next.
                gradients = iter(self._mean(batch, gradients_of, list(trained.values())))
                for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
                    if gradient is None:
                        continue
                    master, optimizer = masters[name], optimizers[name]
                    optimizer.param_groups[0]["lr"] = rate * sizes[name]
                    master.grad = gradient.float().contiguous()
                    optimizer.step()
                    master.grad = None  # One tensor's is there in fp32 at a time.
                    if name in masks:
                        master.mul_(masks[name])
                    parameter.detach().copy_(master)
        return before, self._error(errors, microbatches)

    def _mean(
        self,
        batch: range,
        gradients_of: Callable[[int], tuple[Tensor | None, ...]],
        parameters: Sequence[Tensor],
    ) -> Sequence[Tensor | None]:
        """The mean gradients of a step's microbatches, of which this replica computes its share."""
        if len(batch) == 1:  # which every replica computes
            return gradients_of(batch[0])
        # Of each parameter, the gradients of the microbatches that use it.
        each: list[list[Tensor]] = [[] for _ in parameters]
        for number in filter(self._is_own, batch):
            for parts, part in zip(each, gradients_of(number), strict=True):
                if part is not None:
                    parts.append(part)
        largest = torch.zeros(self.replicas.size, len(parameters), dtype=torch.float64)
        for place, parts in enumerate(each):
            if parts:
                ends = torch.stack([part.abs().amax().double().cpu() for part in parts])
                largest[self.replicas.rank, place] = ends.amax()  # NaN if one is NaN
        self.replicas.exchange(Op.ALL_REDUCE, largest.view(-1))
        means: list[Tensor] = []
        for place, parameter in enumerate(parameters):
            most = float(largest[:, place].amax())
            # Each part has integers of up to 2**BITS, and a sum may have up to 2**63.
            unit = 2.0 ** (math.frexp(most)[1] - BITS) if math.isfinite(most) else math.nan
            sums = torch.zeros(parameter.numel(), dtype=torch.int64, device=parameter.device)
            for part in each[place] if math.isfinite(unit) else ():
                sums += part.reshape(-1).double().div_(unit).round_().long()
            self.replicas.exchange(Op.ALL_REDUCE, sums)
            means.append(sums.double().mul_(unit / len(batch)).float().view(parameter.shape))
        return means

    def _is_own(self, number: int) -> bool:
        return number % self.replicas.size == self.replicas.rank

    @torch.no_grad()
    def _error(self, errors: Errors, microbatches: int) -> float:
        found = torch.zeros(microbatches, 2, dtype=torch.float64)
        for number in filter(self._is_own, range(microbatches)):
            total, count = errors(number)
            found[number] = torch.tensor([float(total), count], dtype=torch.float64)
        self.replicas.exchange(Op.ALL_REDUCE, found.view(-1))
        totals: list[float] = found[:, 0].tolist()
        counts: list[float] = found[:, 1].tolist()
        return sum(totals) / max(sum(counts), 1.0)

    def all_agree(self, found: bool) -> bool:
        """Whether something is so on all replicas, which call this together."""
        count = torch.tensor([float(found)], dtype=torch.float64)
        self.replicas.exchange(Op.ALL_REDUCE, count)
        return int(count) == self.replicas.size


@dataclass(frozen=True)
class HealedLayers:
    """A folder with a file for each pruned layer, so that a killed run continues after the last of
    them, and weights need not stay in memory."""

    folder: Path
    fingerprint: str
    """Of the settings and weights that decide the contents; other files are passed over."""
    writes: bool
    """Whether this rank writes files: one of the ranks that hold a layer does."""

    def read(self, layer: str) -> SafetensorsFile | None:
        """A layer's file; None if there is none of this run that is complete."""
        try:
            file = SafetensorsFile(self._path(layer))
        except (OSError, DataError):
            return None
        return file if file.metadata.get(_FINGERPRINT) == self.fingerprint else None

    def write(self, layer: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a layer's file; OutputError if that fails."""
        if not self.writes:
            return
        headers = {name: header_of(tensor) for name, tensor in tensors.items()}
        said = {_FINGERPRINT: self.fingerprint}
        with writing(f"{self._path(layer)}: what is healed", "free the disk"):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._path(layer))
            with new_path(self._path(layer)) as unfinished:
                write_safetensors(unfinished, headers, iter(tensors.values()), said)

    def value(self, layer: str, name: str, value: Tensor) -> Tensor:
        """The value of a parameter, by its global name, of a layer that is pruned; `value` is the
        one from before. Pruned entries are 0, never -0. DataError if the layer's file is gone."""
        file = self.read(layer)
        if file is None:
            raise DataError(
                f"{self._path(layer)}: is gone, or of another run; start the command again"
            )
        return changed_value(name, value, file.shapes, file.read)

    def _path(self, layer: str) -> Path:
        return self.folder / f"{layer}.safetensors"


MASK, KEPT, FITTED = "mask ", "kept ", "fitted "
"""Prefixes of tensor names in the file of a layer, before the global names: masks in one bit an
entry, the kept weights of matrices whose weights have changed, and the values of fitted parameters
that are not pruned."""
_FINGERPRINT = "axsparse healed by"


def changed_value(
    name: str, value: Tensor, keys: Container[str], read: Callable[[str], Tensor]
) -> Tensor:
    """The value of a parameter after pruning and healing; `value` is the one from before. `keys`
    are names of tensors as in the file of a layer, and `read` gives each of them."""
    if f"{FITTED}{name}" in keys:
        return read(f"{FITTED}{name}")
    if f"{MASK}{name}" not in keys:
        return value
    mask = unpack(read(f"{MASK}{name}"), value.numel()).view(value.shape)
    if f"{KEPT}{name}" not in keys:
        return value.masked_fill(~mask, 0)
    kept_K = read(f"{KEPT}{name}")
    return torch.zeros(value.shape, dtype=kept_K.dtype).masked_scatter_(mask, kept_K)


def relative_error(outputs: Tensors, wanted: Tensors) -> tuple[Tensor, int]:
    """The errors of all tokens, added, and their number.

    A token is the last dimension of a tensor of up to three dimensions, such as (samples,
    positions, width), and a sample of a tensor of more, such as an image's. Tensors that are no
    floating-point numbers count nothing.
    """
    total = torch.zeros((), dtype=torch.float32, device=outputs[0].device)
    tokens = 0
    for given, asked in zip(outputs, wanted, strict=True):
        if not given.is_floating_point():
            continue
        keeps = given.dim() - 1 if given.dim() <= 3 else 1
        error = (given.float() - asked.float()).square().flatten(keeps).sum(-1)
        size = asked.float().square().flatten(keeps).sum(-1).clamp(min=TINY)
        total = total + (error / size).sum()
        tokens += error.numel()
    return total, tokens


def _sizes(masters: Mapping[str, Tensor]) -> dict[str, float]:
    """The root mean square of nonzero entries; a tensor of zeros gets the others' largest."""
    sizes = {
        name: math.sqrt(float(master.square().sum()) / max(int(master.count_nonzero()), 1))
        for name, master in masters.items()
    }
    return {name: size or max(sizes.values()) for name, size in sizes.items()}
