"""What an optimizer over compressed state is: named moments, and functions over blocks of entries.

`samo/optim/update.py` cuts each tensor's kept entries into blocks and calls an optimizer's
functions for each. So an optimizer knows nothing of masks, half precision, sharding or devices: it
sees 1-D fp32 tensors, be they all entries of a dense tensor or the kept entries of a pruned one.

Adding an optimizer:
  1. Write `samo/optim/<name>.py` with the functions and one `Optimizer` (`adamw.py` is elementwise,
     `lamb.py` needs sums over whole tensors). The recurrence stands in its module docstring.
  2. Add the name to the literal of `OptimizerConfig.name` in `config/schema.py`, with the settings
     it needs. Settings that `Hyper` has reach the functions at every call; others are passed when
     the `Optimizer` is made, as `sgd(momentum, nesterov=…)` does.
  3. Register it in `samo/optim/optimizer_registry.py`: in `OPTIMIZERS`, or as a branch of
     `optimizer_of` if it is made from settings.
  4. Write `tests/samo/optim/test_<name>.py`, which holds kept entries against a dense masked run,
     write the dense rule into `tests/support/oracle.py` (LAMB's is `tests/support/dense_lamb.py`)
     and rows of it into `tests/behavior/test_state_equivalence.py`, and add the name to the lists
     in `test_resume.py` and `test_step_memory.py` beside it. All of these must pass.
  5. A kernel for GPUs is optional (`kernel`). Its source goes into `samo/cuda/source/step.cuh` and
     `samo/cuda/step_kernel.py`, its reference into `tests/support/kernel_reference.py`, and
     `tests/samo/cuda/test_kernels_emulated.py` must pass. So are loops for CPUs (`loop`), in
     `samo/host/`, which `tests/samo/host/test_host_step.py` holds against the functions.

The names of moments are names in files: mask, master, value and buffer are taken. An example, the
sign of the gradient without weight decay:

    def apply(block: Block, statistics: Tensor | None, hyper: Hyper) -> None:
        block.master.add_(block.grad.sign(), alpha=-hyper.learning_rate)

    SIGN_SGD = Optimizer(
        moments=(), update_moments=lambda block, hyper: None, statistics=None, apply=apply
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from axsparse.samo.optim.hyper import Hyper

if TYPE_CHECKING:
    from axsparse.samo.optim.tensor_slot import TensorSlot


@dataclass(frozen=True)
class Block:
    """Consecutive kept entries of one tensor during its update: 1-D fp32 tensors of one length, at
    most `shards.BLOCK`, on one device."""

    grad: Tensor
    """The gradient, already unscaled and clipped. No function changes it."""
    master: Tensor
    """The master weights before the step; `apply` changes them in place."""
    moments: Mapping[str, Tensor]
    """Each moment by its name; views of the state, which `update_moments` changes in place."""


WholeStep: TypeAlias = "Callable[[Sequence[TensorSlot], Hyper, float], None]"
"""The whole step of some tensors, in place: slots, settings, and the factor of all gradients."""


@dataclass(frozen=True)
class Optimizer:
    """An update rule, which is called for every block once a step in the order of its functions:
    `update_moments`, `statistics` if there is one, and `apply`."""

    moments: tuple[str, ...]
    """Names of the rule's states, also in checkpoints: one fp32 value a kept entry each, zero
    before the first step. Empty if the rule keeps no state."""
    update_moments: Callable[[Block, Hyper], None]
    """`update_moments(block, hyper)` adds the gradient to the block's moments, in place. It reads
    `block.master`, if at all, as it was before the step."""
    statistics: Callable[[Block, Hyper], Tensor] | None
    """`statistics(block, hyper)` returns fp64 sums over the block, `(num_statistics,)`, from
    updated moments, and changes nothing. They are added over all blocks of the tensor, on all
    replicas, before `apply` is called. None if the rule is elementwise."""
    apply: Callable[[Block, Tensor | None, Hyper], None]
    """`apply(block, statistics, hyper)` moves the block's master weights, in place, from updated
    moments. `statistics` are the tensor's sums, fp64 `(num_statistics,)` on the host, or
    None if the rule is elementwise."""
    num_statistics: int = 0
    """How many sums `statistics` returns."""
    kernel: WholeStep | None = None
    """`kernel(slots, hyper, gradient_factor)` does the whole step of some tensors on a GPU, in
    place, by kernels with the operations of the functions above in their order. None if there is
    no kernel: then the functions above are called on a GPU too."""
    loop: WholeStep | None = None
    """The same for tensors on a CPU, by compiled loops, which have the bits of the functions above
    where torch joins multiplications and additions into one rounding, as on all x86 processors of
    the last ten years. None if there are no loops."""
