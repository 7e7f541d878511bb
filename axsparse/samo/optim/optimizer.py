"""Optimizers over compressed state: named moments, and functions over blocks of entries.

`samo/optim/update.py` cuts each tensor's kept entries into blocks and calls an optimizer's
functions for each. So an optimizer knows nothing of masks, half precision, sharding or devices: it
sees 1-D fp32 tensors, be they all entries of a dense tensor or the kept entries of a pruned one.

A user's custom `Optimizer` trains by `ax.Trainer(…, optimizer=…)`, and needs none of the steps
below: a sign of the gradient without weight decay, say, is

    def apply(block, statistics, hyper):
        block.master.add_(block.grad.sign(), alpha=-hyper.learning_rate)

    SIGN_SGD = ax.Optimizer(
        moments=(), update_moments=lambda block, hyper: None, statistics=None, apply=apply
    )

Adding an optimizer to the package:
  1. Write `samo/optim/<name>.py` with the functions and one `Optimizer` (`adamw.py` is elementwise,
     `lamb.py` needs sums over full tensors). The recurrence stands in its module docstring.
  2. Add the name to the literal of `OptimizerConfig.name` in `config/schema.py`, with the settings
     it needs. Settings that `Hyper` has reach the functions at every call; others are passed when
     the `Optimizer` is made, as `sgd(momentum, nesterov=…)` does.
  3. Return it from `optimizer_of` of `samo/optim/update.py`.
  4. Write `tests/samo/optim/test_<name>.py`, which compares kept entries with a dense masked run,
     write the dense rule into `tests/support/oracle.py` and rows of it into
     `tests/behavior/test_state_equivalence.py`, and add the name to the lists in `test_resume.py`
     and `test_step_memory.py` next to it. All of these must pass.
  5. Machine code is optional (`Compiled`). The loop goes into `samo/host/step_loops.py`, and
     `tests/samo/host/test_host_step.py` compares it with the functions; the kernel's source goes
     into `samo/cuda/source/step.cuh`, and `tests/samo/cuda/test_kernels_emulated.py` compares it
     with the loop, once `RULES` of `tests/support/kernel_contract.py` has the rule and `EVERY` of
     `tests/support/cuda_on_cpu.py` the kernel's instances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from axsparse.config.schema import ScheduleConfig
from axsparse.runtime.errors import ConfigError, check_kinds, one_line
from axsparse.samo.cuda.launch import check
from axsparse.samo.index.base import Index

TAKEN = ("mask", "master", "value", "buffer")
"""Names that the tensors of a checkpoint have already."""
LearningRate: TypeAlias = Callable[[int], float]
"""A schedule of a user's own: from the number of a step to its learning rate. Steps are counted
from 0, and anew after a rewinding."""


@dataclass(frozen=True)
class Hyper:
    """The settings of one step; `OptimizerConfig` of `config/schema.py` explains each."""

    step: int
    """Number of this update, from 1; skipped steps do not count."""
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """0 for tensors that do not decay."""


@dataclass(frozen=True)
class StateBlock:
    """Consecutive kept entries of one tensor during its update: 1-D fp32 tensors of one length, at
    most `shards.BLOCK`, on one device."""

    grad: Tensor
    """The gradient, already unscaled and clipped. No function changes it."""
    master: Tensor
    """The master weights before the step; `apply` changes them in place."""
    moments: Mapping[str, Tensor]
    """Each moment by its name; views of the state, which `update_moments` changes in place."""


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's weight, gradient and state, all on one device."""

    index: Index
    weight: Tensor
    """Dense, flat."""
    gradient: Tensor
    """Kept entries, in the training precision or fp32."""
    master: Tensor | None
    """The masters of the held entries, fp32; None if the fp32 weight is its own master."""
    moments: tuple[Tensor, ...]
    """The rule's moments of the held entries, fp32, in its order."""
    held: range
    """The kept entries that have their masters and moments here and are updated. The others keep
    their weights."""

    def check(self, moments: tuple[str, ...]) -> None:
        """Assert sizes and types, which neither kernels nor compiled loops check."""
        on_device = self.index.on_device
        numel = self.weight.numel() if on_device is None else on_device.numel
        assert 0 <= self.held.start <= self.held.stop <= self.index.kept, f"{self.held}"
        half = (torch.bfloat16, torch.float16)
        weights = (torch.float32,) if self.master is None else half
        check(self.weight, "weight", weights, numel)
        kinds = (torch.float32, *(half if self.master is None else (self.weight.dtype,)))
        check(self.gradient, "gradient", kinds, self.index.kept)
        if self.master is not None:
            check(self.master, "master", (torch.float32,), len(self.held))
        assert len(self.moments) == len(moments), f"{len(self.moments)} moments, not {moments}"
        for name, values in zip(moments, self.moments, strict=True):
            check(values, name, (torch.float32,), len(self.held))


@dataclass(frozen=True)
class Compiled:
    """A rule of which machine code does the full step of tensors, in place, in one pass.

    It has the operations of the rule's functions in their order, and their bits where torch joins
    multiplications and additions into one rounding, as on all x86 processors of the last ten years.
    """

    name: str
    """The kernel of GPUs is `step_<name>` of `samo/cuda/source/step.cuh`, the loop of CPUs
    `<name>_step` of `samo/host/step_loops.py`."""
    factors: Callable[[Hyper], tuple[float, ...]]
    """The constants of one step, in the order in which kernel and loop take them."""
    variant: str = ""
    """The last template argument of the kernel, if it has one more than types."""


@dataclass(frozen=True)
class Optimizer:
    """An update rule, which is called for every block once a step in the order of its functions:
    `update_moments`, `statistics` if there is one, and `apply`."""

    moments: tuple[str, ...]
    """Names of the rule's states, also in checkpoints: one fp32 value a kept entry each, zero
    before the first step. Empty if the rule keeps no state."""
    update_moments: Callable[[StateBlock, Hyper], None]
    """`update_moments(block, hyper)` adds the gradient to the block's moments, in place. It reads
    `block.master`, if at all, as it was before the step."""
    statistics: Callable[[StateBlock, Hyper], Tensor] | None
    """`statistics(block, hyper)` returns fp64 sums over the block, `(num_statistics,)`, from
    updated moments, and changes nothing. They are added over all blocks of the tensor, on all
    replicas and tensor-parallel ranks, before `apply` is called. None if the rule is
    elementwise."""
    apply: Callable[[StateBlock, Tensor | None, Hyper], None]
    """`apply(block, statistics, hyper)` moves the block's master weights, in place, from updated
    moments. `statistics` are the tensor's sums, fp64 `(num_statistics,)` on the host, or
    None if the rule is elementwise."""
    num_statistics: int = 0
    """How many sums `statistics` returns."""
    compiled: Compiled | None = None
    """The same rule as machine code; None has the functions above called on every device."""

    def __post_init__(self) -> None:
        """ConfigError for moments that a checkpoint could not name, and for what is no function."""
        check_kinds("optimizer", vars(self), update_moments="function", apply="function")
        check_kinds("optimizer", vars(self), statistics="function or None")
        names = [*self.moments] if isinstance(self.moments, tuple) else [repr(self.moments)]
        for name in names:
            if not str(name).isidentifier() or name in TAKEN or names.count(name) > 1:
                raise ConfigError(
                    f"optimizer: the moment {name!r} is no name for a tensor of a checkpoint; give "
                    f"a tuple of different names, and other ones than {', '.join(TAKEN)}"
                )


def learning_rate(step: int, schedule: ScheduleConfig, *, peak: float, decay_steps: int) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then decay (Brown et al. 2020,
    appendix B) or steps. A pure function, so resuming needs no state.

    `decay_steps` replaces the schedule's, which may be `auto` and counts from the start of the run,
    not from `step` 0.

    η(t) = peak · (t + 1) / warmup                              t < warmup
    η(t) = peak · (final + (1 − final) · shape(x)),             after
           x = (t − warmup) / (decay − warmup), at most 1
    shape(x) = (1 + cos πx) / 2,  1 − x  or  1

    η(t) = peak · factor^⌊t / every⌋                            after, if the decay is `step`
    """
    warmup_steps, final_ratio = schedule.warmup_steps, schedule.final_ratio
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule.decay == "step":
        return float(peak * schedule.step_factor ** (step // schedule.step_every))
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    shapes = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "constant": 1.0,
    }
    return peak * (final_ratio + (1 - final_ratio) * shapes[schedule.decay])


def own_learning_rate(function: LearningRate, step: int) -> float:
    """The learning rate that a user's function gives for a step; ConfigError if it is none."""
    try:
        rate = float(function(step))
    except Exception as reason:  # whatever it is, it is the user's
        raise ConfigError(
            f"learning_rate: the function failed for step {step} ({one_line(reason)}); give one of "
            "the step alone that returns a finite number of at least 0"
        ) from reason
    if not 0 <= rate < math.inf:
        raise ConfigError(
            f"learning_rate: the function gave {rate} for step {step}; return a finite number of "
            "at least 0"
        )
    return rate
