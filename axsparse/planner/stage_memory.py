"""The memory that a rank may plan with, and the compute, messages and memory of one stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from axsparse.pipeline.policy import Kind, Schedule
from axsparse.planner.cluster import Precision
from axsparse.runtime.communication import NO_SUM, Sums
from axsparse.samo.state_bytes import StateBytes

if TYPE_CHECKING:
    from axsparse.models.model_profile import LayerInfo


def no_bytes(_: int) -> float:
    return 0.0


@dataclass(frozen=True)
class StageLoad:
    """The compute, memory and messages of one stage of one replica.

    Numbers "for a sample" are multiplied by the microbatch size where they are used.
    """

    layers: str
    flops: float
    """Flops of the forward, for a sample."""
    moved: float
    """Bytes that the forward writes to memory, for a sample."""
    again_flops: float
    """The part of `flops` that the backward recomputes."""
    again_moved: float
    """The part of `moved` that the backward writes again."""
    trained: int
    """Trained parameters: entries of the dense gradients of a backward."""
    kept: int
    """Trained parameters that are not pruned: gradient entries that are reduced and updated."""
    state: StateBytes
    """Bytes of model state on one rank, sharded or not."""
    temporary: float
    """Bytes of dense gradients: one layer's, and freed ones that the C library keeps meanwhile."""
    building: float
    """Bytes in addition to the state while it is built: the largest tensor's start values in fp32,
    and the temporaries of scoring a tensor by its gradient."""
    saved: float
    """Bytes that a rank holds for a checkpoint while training continues."""
    held: float
    """Bytes of activations from a forward to its backward, for a sample."""
    working: float
    """Bytes of one layer's activations while its backward runs, for a sample."""
    outputs: float
    """Bytes that go to the next stage and come back as gradients, for a sample. A teacher's are
    among them, which do not come back."""
    sum_bytes: int | None = None
    """Bytes in which replicas sum a gradient entry; None for the bytes of a weight."""
    numbers: range = range(0)
    """The numbers of the stage's layers in the model; empty where a formula has no layers."""
    calibration: Callable[[int], float] = no_bytes
    """Bytes, by the samples of a microbatch, of drawing masks from calibration samples before there
    is state."""
    deferred: float = 0.0
    """Bytes from a split backward to its weight gradients, for a sample."""
    weight_flops: float = 0.0
    """Flops of the weight gradients that a split backward leaves for later, for a sample."""
    loss_bytes: Callable[[int], float] = no_bytes
    """Bytes of the loss, by the samples of a microbatch. They do not grow in proportion where the
    loss computes some of its logits at a time."""
    taught_flops: float = 0.0
    """Flops of the forward of the teacher's layers, for a sample; they are not among `flops`."""
    taught_moved: float = 0.0
    """Bytes that this forward writes to memory, for a sample."""
    expanded: float = 0.0
    """Bytes of the weights that are sparse at rest, once dense: each microbatch writes them before
    its forward and before its backward."""
    gathered: float = 0.0
    """Bytes of the kept weights that replicas gather before each forward and each backward but a
    step's first."""
    forward_sums: Sums = NO_SUM
    """The sums over tensor-parallel ranks in a forward."""
    backward_sums: Sums = NO_SUM
    """The same in a backward, layers that it computes again included."""

    @property
    def deferred_size(self) -> float:
        """The memory of a deferred microbatch, in units of one in flight."""
        return self.deferred / self.held if self.deferred and self.held else 1.0


Fits: TypeAlias = Callable[[int, StageLoad], bool]
"""`fits(stage, load)` says whether a rank has memory for this load on the stage of this number."""


def value_bytes(precision: Precision) -> int:
    return 4 if precision == "fp32" else 2


HOST_SHARE = 0.8
"""The part of a host's memory that a run plans with. The rest is a margin: other processes, the
page cache, and freed blocks that the C library keeps."""
HOST_OVERHEAD = 0.4e9
"""Bytes that Python, torch and MPI take of a rank on a CPU (0.36 GB where that was measured)."""
GPU_OVERHEAD = 3.0e9
"""Bytes of a GPU that a plan leaves to the CUDA context (1.05 GB on an H100), to NCCL's connections
(some 2 GB, assumed), to workspaces of cuBLAS, and to holes between torch's blocks."""


@dataclass(frozen=True)
class MemoryBudget:
    nbytes: float
    """Bytes that the process may take, everything included."""
    overhead: float

    @property
    def for_model(self) -> float:
        return self.nbytes - self.overhead


UNLIMITED = MemoryBudget(math.inf, 0.0)


def memory_budget(
    found: float, overhead: float, *, on_host: bool, limit: float | None = None
) -> MemoryBudget:
    """The memory budget of a rank that has `found` bytes of its host or its GPU.

    `limit` are the bytes that the user allows it (`layout.memory_per_rank`), in place of `found`.
    Of a host's memory without a limit the rest after the overhead counts by `HOST_SHARE`.
    """
    if limit is not None:
        return MemoryBudget(limit, overhead)
    if on_host:
        return MemoryBudget(overhead + HOST_SHARE * (found - overhead), overhead)
    return MemoryBudget(found, overhead)


SMALL_BLOCKS = 10e6
"""Bytes that threads, MPI and small tensors take once steps run, as seen under an enforced limit.
They come on top of an overhead that was measured before the first step."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one rank at the worst moment of its step, by category."""

    weight: float
    """Weights at rest, and the memory in which sparse weights are expanded."""
    index: float
    gradient: float
    master: float
    optimizer: float
    """Optimizer state; if state is offloaded, the part of it that is on the GPU for its update."""
    activations: float
    """Activations of the microbatches in flight, and inputs of deferred weight gradients."""
    working: float
    """Temporary memory of one layer's backward: gradients of activations, and the activations
    themselves if it recomputes them."""
    logits: float
    temporary: float
    """One layer's dense gradient and the optimizer's copies. Where making the largest tensor takes
    more than a step needs in addition to the state, it is that tensor instead; and where drawing
    masks from samples takes more than all of that with the state, it is the difference."""
    checkpoint: float
    """Copies that wait to be written to disk while training continues."""
    overhead: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def stage_memory(
    load: StageLoad, *, microbatch_size: int, in_flight: float, overhead: float
) -> StageMemory:
    """The memory of a stage that holds as much as `in_flight` microbatches in flight
    (`peak_in_flight`)."""
    state = load.state
    activations = microbatch_size * in_flight * load.held
    working = microbatch_size * load.working
    logits = load.loss_bytes(microbatch_size)
    of_step = activations + working + logits
    return StageMemory(
        weight=state.weight + state.expanded,
        index=state.index,
        gradient=state.gradient,
        master=state.master,
        optimizer=state.optimizer + state.staged,
        activations=activations,
        working=working,
        logits=logits,
        temporary=max(
            load.temporary,
            load.building - of_step,
            load.calibration(microbatch_size) - state.total - of_step,
        ),
        checkpoint=load.saved,
        overhead=overhead,
    )


def most_in_flight(schedule: Schedule, *, stage: int, g_inter: int, microbatches: int) -> int:
    """The most microbatches that a stage has in flight at a time under this schedule."""
    if schedule.name == "gpipe":
        return microbatches
    if stage == g_inter - 1:
        return 1  # the last stage runs each backward directly after its forward
    return min(microbatches, g_inter - stage + schedule.extra_in_flight)


def peak_in_flight(
    schedule: Schedule, *, stage: int, g_inter: int, microbatches: int, size: float = 1.0
) -> float:
    """The most that the schedule lets a stage hold at a time, in units of a microbatch in flight,
    of which a deferred one takes `size`."""
    if schedule.split_backward and schedule.name in ("1f1b", "gpipe"):
        return _most_of_order(schedule, stage, g_inter, microbatches, size)
    most = most_in_flight(schedule, stage=stage, g_inter=g_inter, microbatches=microbatches)
    if not schedule.split_backward:
        return most
    together = min(microbatches, 2 * schedule.bound(stage, g_inter))
    return max(most + size * (together - most), size * together)


@cache
def _most_of_order(
    schedule: Schedule, stage: int, g_inter: int, microbatches: int, size: float
) -> float:
    change = {Kind.FORWARD: 1.0, Kind.BACKWARD: size - 1, Kind.WEIGHT: -size}
    actions = schedule.order(stage, g_inter, microbatches)
    return max(accumulate(change[each.kind] for each in actions))


def gigabytes(n: float) -> str:
    """12_340_000_000 is "12.3"; below 0.1 GB two digits are kept: 1_234_000 is "0.0012"."""
    return f"{n / 1e9:.1f}" if n >= 1e8 else f"{n / 1e9:.2g}"


def needed(need: float, rank_budget: float) -> str:
    """ "18.2 GB of 16.0", with as many digits as the two numbers need to differ."""
    for digits in range(1, 10):
        texts = f"{need / 1e9:.{digits}f}", f"{rank_budget / 1e9:.{digits}f}"
        if texts[0] != texts[1]:
            break
    return f"{texts[0]} GB of {texts[1]}"


def activation_memory(
    layers: Sequence[LayerInfo], checkpoint_activations: int
) -> tuple[int, int, int]:
    """Bytes of the activations that a stage of these layers holds for one sample: from its forward
    to its backward, more while one layer's backward runs, and from a split backward to the weight
    gradients, or at its fullest moment if that is more than before and after it.

    Of a recomputed layer only the inputs are kept, and its other activations exist while its
    backward runs. In a backward the gradients of two activations exist at a time. Layers without
    known costs (of a model without example) count nothing.
    """
    working = 0
    counted: list[tuple[int, int]] = []
    for number, layer in enumerate(layers):
        if layer.activations is None:
            continue
        kept, again = layer.activations.inputs, 0
        if is_recomputed(number, checkpoint_activations):
            again = layer.activations.saved
        else:
            kept += layer.activations.saved
        counted.append((kept, layer.activations.deferred))
        # Next to the buffer of a sum are the sum so far and the sum with another partner's.
        summing = 2 * layer.activations.summing
        working = max(working, again + 2 * layer.activations.widest + summing)
    total, deferred = sum(kept for kept, _ in counted), 0
    last = layers[-1].activations
    outputs = 0 if last is None else last.outputs
    # A backward frees the activations of its layers from the last one on, while deferred inputs
    # pile up.
    most = remaining = total
    for kept, later in reversed(counted):
        remaining, deferred = remaining - kept, deferred + later
        most = max(most, remaining + deferred)
    total += outputs
    if most > max(total, deferred):
        deferred = most
    return total, working, deferred


def is_recomputed(number: int, checkpoint_activations: int) -> bool:
    """Whether the backward recomputes the layer of this number within its stage: every
    `checkpoint_activations`-th one, from the first on; 0: none."""
    return checkpoint_activations > 0 and number % checkpoint_activations == 0
