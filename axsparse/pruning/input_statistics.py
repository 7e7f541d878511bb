"""Selection of a matrix's entries by its inputs: Wanda and SparseGPT.

Matrices are (outputs, inputs); x is one token's inputs; sums are over all tokens of all samples.

Wanda (Sun et al. 2023) keeps, of every row, the entries of largest

    |weight[i, j]| · √(Σ x[j]²)

SparseGPT (Frantar and Alistarh 2023) removes, in blocks of 128 columns, the entries of smallest

    weight[i, j]² / U[j, j]²    with  UᵀU = (Σ x xᵀ · 2 / tokens + 0.01 · mean of its diagonal)⁻¹

and after each column moves what it has removed to the columns behind it, so that the outputs change
least. U is upper triangular.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from axsparse.pruning.targets import BLOCK, n_of_m, removed_of_block, removed_of_row
from axsparse.runtime.errors import ConfigError, TrainingError

DAMPING = 0.01
"""The part of the mean of the diagonal that SparseGPT adds to it."""
HowMany: TypeAlias = "float | tuple[int, int]"
"""A sparsity, or (n, m) to keep n of every m consecutive inputs."""


class WandaStatistics:
    """Gathers sums of squares of the inputs of one matrix, then prunes the matrix.

    A method has the functions of this class, and its name in `METHODS` and `targets.COUNTS`.
    """

    changes_weights = False
    """Whether `prune` changes kept weights, too."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.squares = torch.zeros(inputs, dtype=torch.float32, device=device)
        """Σ x[j]² of each input."""

    def add(self, x: Tensor) -> None:
        """Count the inputs of one microbatch, (tokens, inputs)."""
        self.squares += x.float().square().sum(0)

    @property
    def norms(self) -> Tensor:
        """√(Σ x[j]²) of each input."""
        return self.squares.sqrt()

    def prune(self, weight: Tensor, how_many: HowMany) -> tuple[Tensor, Tensor]:
        """The bool mask and the weights, zero where the mask is False, both in the shape of the
        fp32 matrix; called once, after all microbatches."""
        score = weight.abs() * self.norms
        if isinstance(how_many, tuple):
            mask = n_of_m(score.cpu(), *how_many).to(weight.device)
        else:
            order = score.sort(dim=1, stable=True).indices
            mask = torch.ones_like(score, dtype=torch.bool)
            mask.scatter_(1, order[:, : removed_of_row(weight.shape[1], how_many)], False)
        return mask, weight * mask

    @staticmethod
    def statistics_bytes(inputs: int) -> int:
        """Bytes of the statistics of a matrix with this number of inputs; plans count them."""
        return 4 * inputs

    @staticmethod
    def working(shape: tuple[int, ...]) -> int:
        """The most temporary bytes of `prune` for a matrix of this shape, its results included:
        scores, and the memory that sorts them, in torch 17 bytes an entry."""
        return 21 * math.prod(shape)


class SparseGptStatistics:
    """Second moments of the inputs."""

    changes_weights = True

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._moments = torch.zeros(inputs, inputs, dtype=torch.float32, device=device)
        self._tokens = 0

    def add(self, x: Tensor) -> None:
        x = x.float()
        self._moments += x.t() @ x
        self._tokens += x.shape[0]

    @property
    def squares(self) -> Tensor:
        return self._moments.diagonal()

    def prune(self, weight: Tensor, how_many: HowMany) -> tuple[Tensor, Tensor]:
        upper, weight = self._factor(), weight.clone()
        weight[:, self._moments.diagonal() == 0] = 0
        mask = torch.ones_like(weight, dtype=torch.bool)
        groups_of = how_many[1] if isinstance(how_many, tuple) else 1
        width = max(BLOCK // groups_of, 1) * groups_of  # full groups, if groups decide
        for start in range(0, weight.shape[1], width):
            stop = min(start + width, weight.shape[1])
            errors = _prune_block(
                weight[:, start:stop], mask[:, start:stop], upper[start:stop, start:stop], how_many
            )
            weight[:, stop:] -= errors @ upper[start:stop, stop:]
        return mask, weight

    def _factor(self) -> Tensor:
        """U of the formula."""
        damped = self._moments * (2 / max(self._tokens, 1))
        diagonal = damped.diagonal()
        diagonal[diagonal == 0] = 1
        diagonal += DAMPING * diagonal.mean()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
        return factor

    @staticmethod
    def statistics_bytes(inputs: int) -> int:
        return 4 * inputs**2

    @staticmethod
    def working(shape: tuple[int, ...]) -> int:
        """Three matrices of inputs² while the factor is made; then one, weights and mask, and the
        larger of the scores of a block, which torch sorts, and of the errors that a block
        leaves."""
        entries, block = shape[0] * shape[1], shape[0] * min(BLOCK, shape[1])
        square = 4 * shape[1] ** 2
        return max(3 * square, square + 5 * entries + max(28 * block, 4 * (entries + block)))


def _prune_block(weight: Tensor, mask: Tensor, upper: Tensor, how_many: HowMany) -> Tensor:
    """Prune some columns and write their mask; returns the errors, over `upper`'s diagonal."""
    scale = upper.diagonal().square()
    if not isinstance(how_many, tuple):
        score = weight.square() / scale
        order = score.view(-1).sort(stable=True).indices
        gone = order[: removed_of_block(score.numel(), how_many)]
        flat = torch.ones(score.numel(), dtype=torch.bool, device=mask.device)
        flat[gone] = False
        mask.copy_(flat.view(mask.shape))
    errors = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        if isinstance(how_many, tuple) and column % how_many[1] == 0:
            n, m = how_many
            here = slice(column, column + m)
            score = weight[:, here].square() / scale[here]
            mask[:, here] = n_of_m(score.cpu(), n, m).to(mask.device)
        before = weight[:, column].clone()
        after = before * mask[:, column]
        errors[:, column] = (before - after) / upper[column, column]
        weight[:, column:] -= torch.outer(errors[:, column], upper[column, column:])
        weight[:, column] = after
    return errors


Method: TypeAlias = type[WandaStatistics] | type[SparseGptStatistics]
METHODS: dict[str, Method] = {"wanda": WandaStatistics, "sparsegpt": SparseGptStatistics}
"""The methods that calibration samples decide, by their names in the settings."""
STATISTICS: dict[str, Method] = {**METHODS, "custom": WandaStatistics}
"""The statistics that a method gathers; `custom` does so if its score takes `inputs`, and then
selects by itself."""


# -- products -----------------------------------------------------------------------------
#
# A layer may multiply by a weight in any module, so that products themselves are watched: an
# operation of torch that multiplies with a matrix, or with one of a stack, shows the inputs.


class ProductStatistics:
    """Gathers statistics for a matrix, or for each of a stack, then prunes each by itself."""

    def __init__(self, method: Method, name: str, weight: Tensor, input_dim: int) -> None:
        """`input_dim` is the dimension of the inputs in the weight, (E, outputs, inputs) or
        (E, inputs, outputs), without E for a matrix alone."""
        self._name, self.weight, self._dimension = name, weight, input_dim
        self._is_last = input_dim == weight.dim() - 1
        self._matrices = weight if weight.dim() == 3 else weight.unsqueeze(0)
        self._each = [method(weight.shape[input_dim], weight.device) for _ in self._matrices]
        self._tokens = [0] * len(self._each)
        self._names = [name]
        if weight.dim() == 3:
            self._names = [f"{name}[{number}]" for number in range(len(self._each))]
        self.changes_weights = method.changes_weights

    @property
    def unmet(self) -> list[str]:
        """The matrices that no token met."""
        return [name for name, tokens in zip(self._names, self._tokens, strict=True) if not tokens]

    def check(self) -> None:
        """TrainingError if inputs are infinite, or no numbers: all scores would be, too."""
        for name, own in zip(self._names, self._each, strict=True):
            if not own.squares.isfinite().all():
                raise TrainingError(
                    f"{name}: its inputs are not finite in {self.weight.dtype}; choose another "
                    "precision, or other texts"
                )

    @property
    def norms(self) -> Tensor:
        """`WandaStatistics.norms` of a matrix alone, one for all of its outputs."""
        [own] = self._each
        assert isinstance(own, WandaStatistics)
        return own.norms if self._is_last else own.norms.unsqueeze(1)

    def scores(self, weight: Tensor) -> Iterator[Tensor]:
        """Wanda's score of each entry, |weight| × norm of its input, a matrix after the other."""
        for own, matrix in zip(self._each, weight.view(self._matrices.shape), strict=True):
            assert isinstance(own, WandaStatistics)
            yield self._rows(matrix).to(own.norms.device).abs() * own.norms

    def add(self, inputs: Tensor, matrix: Tensor, offsets: Sequence[int] | None) -> None:
        """Count a product of inputs, (tokens, inputs), with one matrix, (inputs, outputs).

        Of the full stack, (E, inputs, outputs), each expert has separate tokens, (E, tokens,
        inputs), or the tokens from the offset of the expert before it up to its offset.
        """
        if matrix.dim() == 3 and self.weight.dim() == 2:  # the same for each of a batch
            inputs, matrix = inputs.flatten(0, 1), matrix[0]
        # The strides show the orientation: neighbours are entries of the weight's last dimension.
        is_turned = (matrix.stride(-2) == 1) != self._is_last and min(matrix.shape[-2:]) > 1
        if is_turned or matrix.shape[-2:].numel() != self._matrices[0].numel():
            how = "by its other dimension" if is_turned else "in parts"
            alike = re.sub(r"\.\d+\.", ".*.", self._name)
            if self.weight.dim() == 3:  # a stack, whose neighbours are multiplied as it is
                alike = f"{alike.rpartition('.')[0]}.*"
            everywhere = "" if alike == self._name else f" ({alike} for all of its kind)"
            raise ConfigError(
                f"pruning.method: {self._name} is multiplied {how}; name it in pruning.exclude"
                f"{everywhere}"
            )
        if matrix.dim() == 2:
            first = matrix.storage_offset() - self.weight.storage_offset()
            self._count(first // self._matrices[0].numel(), inputs)
            return
        for expert in range(len(self._each)):
            if offsets is None:
                self._count(expert, inputs[expert])
            else:
                begin = offsets[expert - 1] if expert else 0
                self._count(expert, inputs[begin : offsets[expert]])

    def _count(self, number: int, inputs: Tensor) -> None:
        if len(inputs):
            self._each[number].add(inputs)
            self._tokens[number] += len(inputs)

    def prune(self, weight: Tensor, how_many: HowMany) -> tuple[Tensor, Tensor]:
        """The bool mask and the weights of all matrices, see `WandaStatistics.prune`.

        An expert that no token met is pruned by magnitude: as if it had met each input once, alone.
        """
        if weight.dim() == 2:
            mask, after = self._each[0].prune(self._rows(weight).contiguous(), how_many)
            return self._rows(mask), self._rows(after)
        mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
        after = torch.empty_like(weight)
        for expert, statistics in enumerate(self._each):
            if not self._tokens[expert]:
                statistics.add(torch.eye(weight.shape[self._dimension], device=weight.device))
            before, *into = (self._rows(tensor[expert]) for tensor in (weight, mask, after))
            found = statistics.prune(before.contiguous(), how_many)
            for part, result in zip(into, found, strict=True):
                part.copy_(result)
            del found, result  # Freed before the next expert needs memory.
        return mask, after

    def _rows(self, matrix: Tensor) -> Tensor:
        """A matrix with its outputs first, or back."""
        return matrix if self._is_last else matrix.t()


class WatchedProducts(TorchDispatchMode):
    """Adds the inputs of every product with the weight of some statistics to them."""

    def __init__(self, gathered: Iterable[ProductStatistics]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gathered = gathered

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket.__name__
        if operation in PRODUCTS or operation.endswith("grouped_mm"):
            # The summand comes first in addmm and baddbmm.
            first, second = args[operation.startswith(("add", "badd")) :][:2]
            offsets: Tensor | None = None
            if "grouped" in operation:
                offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
            ends = None if offsets is None else offsets.tolist()
            if own := self._of(second):
                own.add(first, second, ends)
            elif own := self._of(first):  # outputs come first
                columns = second if second.dim() > 1 else second.unsqueeze(1)
                own.add(columns.mT, first.mT, ends)
        return func(*args, **kwargs)

    def _of(self, factor: Tensor) -> ProductStatistics | None:
        """The statistics of the weight that a factor is, or is a part of."""
        at = factor.data_ptr()
        for own in self._gathered:
            begin = own.weight.data_ptr()
            if begin <= at < begin + own.weight.nbytes:
                return own
        return None


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv")
"""Operations of torch that multiply two of their arguments, apart from grouped ones."""
