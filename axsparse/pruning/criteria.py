"""Pruning criteria: the scores by which the entries of a tensor are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Signature, signature
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from axsparse.config.schema import ONCE, Config, parse_pattern
from axsparse.pruning.targets import n_of_m
from axsparse.runtime.errors import ConfigError, check_kind
from axsparse.runtime.seeds import keyed_generator
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import (
    Keys,
    Threshold,
    by_magnitude,
    by_value,
    largest,
    select,
    threshold_of,
    unpack,
)

Score: TypeAlias = Callable[..., Tensor]
"""`score(name, weight)` scores the entries of one tensor, and the entries of highest score are
kept.

`name` is the tensor's global name. `weight` has its fp32 weights on the CPU, zero where they are
already pruned; it is a copy, which the function may change. It returns a dense real tensor of
the same shape on the CPU, without NaN. Every rank that holds the tensor calls it, so the result
must depend on the two arguments alone. This one prunes the entries of smallest magnitude:

    def by_magnitude(name: str, weight: Tensor) -> Tensor:
        return weight.abs()

A function with a third argument `gradient` also gets the gradient of the coming step's batch, of
the shape of the weights, zero where they are pruned; the tensor's alone, summed over replicas:

    def by_sensitivity(name: str, weight: Tensor, gradient: Tensor) -> Tensor:
        return (weight * gradient).abs()

There is one for `gradual`, `iterative`, and `custom` with `pruning.at_step` above 0.

A function with a third argument `inputs` also gets the norm of each input of the linear layer that
multiplies the matrix: √(Σ x[j]²) over all tokens of the calibration samples, (inputs,) in fp32 on
the CPU. This one scores entries as Wanda does, which then selects within each row:

    def by_wanda(name: str, weight: Tensor, inputs: Tensor) -> Tensor:
        return weight.abs() * inputs

There are inputs for `custom` with `pruning.at_step` 0 (`calibration` explains how they come).

A run uses it with `ax.Trainer(…, score=by_magnitude)` and `pruning.method: custom`, or with a
method that prunes over time.
"""


@dataclass(frozen=True)
class Criterion:
    """Scores the entries of any tensor, and keeps the entries of highest score.

    A custom score needs no change here (see `Score`). To add a named criterion:

    1. Add its name to the type of `score`, and a branch to `scores`. It may use the name, the
       shape and the weights of the tensor, and `seed`; nothing that differs between ranks.
    2. Add the name to `PruningConfig.method` in `config/schema.py` and describe it there. Let
       `configured_criterion` return the criterion for it, and reject a second score.
    3. If it looks at nothing but weights, add the method to `FROM_START` in `targets.py`; if it
       prunes once, to `ONCE` in `config/schema.py`.
    4. Add it to `tests/pruning/test_criteria.py` (exact counts, the same mask for the same name),
       and to the dense oracle in `tests/support/methods.py` and to `PRUNING` in
       `tests/support/cases.py`, whose rows compare masks and weights bitwise in every layout.
    """

    score: Literal["magnitude", "random"] | Score
    seed: int = 0
    pattern: tuple[int, int] | None = None
    """With (n, m), the n highest of every m consecutive inputs are kept."""
    input_dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension of the inputs of stacks and of transposed matrices (`Targets.input_dims`)."""

    @property
    def sees_gradients(self) -> bool:
        """Whether the score takes the gradient of its tensor."""
        return callable(self.score) and _takes(self.score, "gradient")

    @property
    def sees_inputs(self) -> bool:
        """Whether the score takes the norms of its layer's inputs."""
        return callable(self.score) and _takes(self.score, "inputs")

    def scores(self, name: str, shape: Shape, weight: Weight) -> tuple[Tensor, Keys]:
        """The flat fp32 scores of a tensor, without NaN, and the keys that put them in order.

        Raises ConfigError if a custom score does not fit its tensor.
        """
        if self.score == "magnitude":
            return weight().view(-1), by_magnitude
        if self.score == "random":
            generator = keyed_generator(self.seed, name, "mask")
            numel = torch.Size(shape).numel()
            return torch.rand(numel, generator=generator, dtype=torch.float32), by_value
        assert callable(self.score)
        scores = self.score(name, weight().clone())
        is_tensor = isinstance(scores, Tensor)
        if (
            not is_tensor
            or scores.shape != shape
            or (scores.layout, scores.device.type) != (torch.strided, "cpu")
            or scores.is_complex()
        ):
            kind = type(scores).__name__
            if is_tensor:
                kind = f"{tuple(scores.shape)} of {scores.dtype}, {scores.layout}, on "
                kind += str(scores.device)
            raise ConfigError(
                f"score of {name}: {kind}; it must be one number an entry, a dense "
                f"real tensor of shape {shape} on the CPU"
            )
        scores = scores.detach().float().reshape(-1)
        if scores.isnan().any():
            raise ConfigError(f"score of {name}: NaN, which has no order; return numbers")
        return scores, by_value

    def mask(
        self,
        name: str,
        shape: Shape,
        weight: Weight,
        keep: int | Threshold,
        within: Tensor | None = None,
    ) -> Tensor:
        """The flat bool mask of a tensor, True where an entry is kept.

        `keep` is the number of entries to keep, or the threshold above which they stay. `within`
        has the flat positions that may be kept; without it all may. Among equal scores, lower
        positions are kept. A `pattern` decides by itself and ignores `keep`. Each matrix of a
        stack keeps its share of the number. Raises what `scores` raises.
        """
        scores, keys = self.scores(name, shape, weight)
        if self.pattern is not None:
            assert within is None, "a pattern is drawn once"
            magnitudes = scores.abs() if keys is by_magnitude else scores
            inputs = self.input_dims.get(name, 1)
            return n_of_m(magnitudes.view(shape), *self.pattern, inputs).view(-1)
        if name in self.input_dims and len(shape) == 3 and isinstance(keep, int):
            return _mask_of_stack(scores, keys, shape[0], keep, within)
        numel = scores.numel()
        if within is not None:
            scores = scores[within]
        threshold = keep if isinstance(keep, Threshold) else threshold_of(scores, keep, keys)
        selected, scored = select(scores, keys, threshold), scores.numel()
        del scores  # frees their memory before the mask takes a byte an entry
        kept = unpack(selected, scored)
        if within is None:
            return kept
        return torch.zeros(numel, dtype=torch.bool).index_copy_(0, within, kept)


def _mask_of_stack(
    scores: Tensor, keys: Keys, experts: int, keep: int, within: Tensor | None
) -> Tensor:
    """The flat mask of a stack; each matrix keeps its share, the first ones one more if need be."""
    size = scores.numel() // experts
    shares = [keep // experts + (expert < keep % experts) for expert in range(experts)]
    if within is None:
        parts = zip(scores.split(size), shares, strict=True)
        return torch.cat([largest(part, share, keys) for part, share in parts])
    mask = torch.zeros(scores.numel(), dtype=torch.bool)
    for expert, share in enumerate(shares):
        own = within[within // size == expert]
        mask[own] = largest(scores[own], share, keys)
    return mask


def configured_criterion(config: Config, score: Score | None) -> Criterion:
    """The criterion of a configuration's pruning method; `score` is the user's own, if any.

    Raises ConfigError if the method needs such a score and has none, or has one already.
    """
    pruning = config.pruning
    if pruning.method == "custom" and score is None and pruning.mask is None:
        raise ConfigError(
            f"{config.where('pruning.method')}: custom needs a score of your own; give it to "
            "Trainer in Python (score=…), or choose magnitude"
        )
    if score is not None and pruning.method in ONCE and pruning.method != "custom":
        over_time = ", or a method over time," * (
            pruning.pattern is None and pruning.heal == "none"
        )
        raise ConfigError(
            f"{config.where('pruning.method')}: {pruning.method} has a score already; choose "
            f"custom{over_time} for the one given to Trainer"
        )
    pattern = None if pruning.pattern is None else parse_pattern(pruning.pattern)
    if score is not None:
        _reject_arguments(config, score)
        return Criterion(score, config.seed, pattern)
    return Criterion("random" if pruning.method == "random" else "magnitude", config.seed, pattern)


def _reject_arguments(config: Config, score: Score) -> None:
    """ConfigError for a score that cannot be called with the arguments that the method has when it
    draws masks."""
    pruning = config.pruning
    check_kind("Trainer: score", score, Callable, "give a function of a tensor's name and weights")
    found = _signature(score)
    if found is None:
        return
    given = {"gradient", "inputs"} & set(found.parameters)
    try:
        found.bind("", None, **dict.fromkeys(given))
    except TypeError as error:
        raise ConfigError(
            f"score: {error}; it is called with a tensor's name, its weights, and gradient or "
            "inputs if it has an argument of that name"
        ) from error
    draws_later = pruning.method in ("gradual", "iterative") or (
        pruning.method == "custom" and pruning.at_step > 0
    )
    has = {"gradient"} if draws_later else {"inputs"} if pruning.method == "custom" else set()
    if not given <= has:
        raise ConfigError(
            f"score: it takes {' and '.join(sorted(given))}; there are gradients for custom with "
            "pruning.at_step above 0, gradual and iterative, and inputs for custom with "
            "pruning.at_step 0"
        )
    if "inputs" in given and pruning.distribution == "global":
        raise ConfigError(
            f"{config.where('pruning.distribution')}: global, but a score that takes inputs draws "
            "masks tensor by tensor before the first step; choose uniform or erk"
        )


def _takes(score: Score, argument: str) -> bool:
    found = _signature(score)
    return found is not None and argument in found.parameters


def _signature(score: Score) -> Signature | None:
    try:
        return signature(score)
    except (TypeError, ValueError):  # a built-in function without one
        return None
