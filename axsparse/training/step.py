"""One training step: microbatches in, weights out. `Step.train_step` is the step on one screen.

Behind it are the checks that replicas have the same weights and masks, and the steps that update
nothing: why, and when that ends the run. All ranks receive the same verdict and decide alike, so
that an error about skipped steps is raised on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from axsparse.config.schema import num_microbatches
from axsparse.data.batches import Batch, Batches, Prefetcher
from axsparse.data_parallel.gradient_sync import GradientSync, WeightGather
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.data_parallel.step_consensus import (
    NOTHING,
    Flags,
    LocalStats,
    StepConsensus,
    StepResult,
)
from axsparse.models.start_weights import some_of
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine
from axsparse.pruning.methods.pruner import MaskUpdate
from axsparse.runtime.communication import Op, Transport
from axsparse.runtime.errors import ConfigError, DataError, TrainingError, everywhere, printable
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR
from axsparse.runtime.process import write_line
from axsparse.samo.backend import to_host
from axsparse.samo.fixed_point import UnitFit, Units
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.masks import masks_digest, weights_digest
from axsparse.samo.offload import Offload
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import clip_factor, norm_partials, update
from axsparse.samo.shards import Replicas
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, saved_steps
from axsparse.training.layer_check import check_layers, is_checked
from axsparse.training.plan import RunPlan
from axsparse.training.progress import FirstBad, Progress
from axsparse.training.run_directory import RunDir

PATIENCE = 10
"""Skipped steps in a row at the lowest loss scale, which bf16 and fp32 always have, after which the
run ends."""
LONGEST_REASON = 1000
"""Letters of a reason that a checkpoint keeps."""


@dataclass(eq=False)
class Step:
    """Runs training steps, one after the other, on one rank; they count in `progress`."""

    plan: RunPlan
    progress: Progress
    batches: Batches
    layers: Sequence[BuiltLayer]
    engine: Engine
    collector: GradientCollector
    sync: GradientSync
    weights: WeightGather
    statistics: RunningStatistics
    replicas: Replicas
    offload: Offload | None
    transport: Transport
    phases: Phases
    run_dir: RunDir | None
    says: Callable[[str], None]

    def __post_init__(self) -> None:
        """All ranks construct this together; TrainingError if replicas have other weights or masks
        than replica 0."""
        self._config, self._coords = self.plan.config, self.plan.coords
        self._states = [layer.state for layer in self.layers]
        self._parameters = [
            (layer.spec.full_name(name), parameter, parameter.requires_grad)
            for layer in self.layers
            for name, parameter in layer.module.named_parameters()
        ]
        self._together = 0
        """The microbatches that all replicas run together, since they gather weights."""
        if self.plan.gathers_weights:
            self._together = num_microbatches(self._config.batch, self._coords.grid.g_data)
        self._units: Units | None = None
        """The units of exact sums; None where gradients are summed as numbers."""
        if self._config.samo.gradient == "exact":
            self._units = Units(num_microbatches(self._config.batch), self.progress.exponents)
        checks = self._config.train.check_layers
        self.checks_layers = (
            checks is True if self.progress.step else is_checked(self.plan.model, checks)
        )
        """Whether the coming step compares the layers with plain torch first."""
        self._named: set[str] = set()
        """The parameters without a gradient that were named."""
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        self._reject_unequal(weights_digest(self.layers), UNEQUAL_WEIGHTS)
        self._consensus = self._make_consensus()

    def train_step(self, notice: Callable[[], Flags] = lambda: NOTHING) -> StepResult:
        """Train on the next batch; the loss and norm returned were measured before the update.

        If the loss or a gradient is not finite anywhere, no rank updates. All ranks receive what
        `notice` returns with the agreement; it is called when everything else is computed.
        TrainingError on all ranks once too many steps in a row could not update, or once replicas
        are found to have other weights.
        """
        self.check_layers()
        step = self.progress.step + 1
        verdict = self._gradients(self._next_batch(), notice)
        self._reject_drifted(step, verdict)
        if verdict.finite:
            self._clip_and_update(verdict)
        else:
            self.statistics.undo()
            self.restore_weights()
        self._rescale(step, verdict)
        self.progress.end_step(is_skipped=not verdict.finite)
        return verdict

    def check_layers(self) -> None:
        """Compare the layers with plain torch by the first batch, if that is wanted and not done.

        All ranks call this together; ConfigError on all of them for a layer that differs.
        """
        if self.checks_layers:
            self.checks_layers = False
            self._reject_frozen()
            self._read_ahead = self._next_batch()
            line = check_layers(
                *(self.plan, self.layers, self.engine, self.collector),
                *(self.transport, self._read_ahead),
            )
            if line:
                self.says(line)

    def _gradients(self, batch: Batch, notice: Callable[[], Flags]) -> StepResult:
        """The verdict of all ranks on a batch, computed again in other units where exact sums did
        not fit."""
        while True:
            self._begin_step()
            losses = self._forward_backward(batch)
            self.sync.finish()  # the sums over tied weights and replicas, begun meanwhile
            digest, every = 0, self._config.train.compare_replicas_every
            if every and (self.progress.step + 1) % every == 0:
                with self.phases("optimizer"):
                    digest = weights_digest(self.layers)
            verdict = self._agree(losses, notice, digest)
            if self._units is None or not verdict.finite or self._units.follow(verdict.fits):
                self.statistics.keep()
                return verdict
            self.statistics.undo()

    # -- the parts of a step, in their order ----------------------------------------------

    def _next_batch(self) -> Batch:
        batch, self._read_ahead = self._read_ahead, None
        if batch is not None:
            return batch
        with self.phases("data"):
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self.batches.training, self.progress.step)
            return self._prefetcher.get(self.progress.step)

    def _begin_step(self) -> None:
        """Open a step, whose first gradient of each parameter overwrites the last step's."""
        self._reject_frozen()
        self._note_writes()
        if self._units is not None:
            ties = self.plan.profile.ties
            for state in self._states:
                for tensor in state.tensors:
                    tensor.unit = self._units.unit(ties.get(tensor.name, tensor.name))
        self.collector.begin()
        self.sync.begin()
        self.statistics.begin(may_repeat=self._units is not None)

    def _reject_frozen(self) -> None:
        """ConfigError if a parameter was frozen or thawed, which its moments would not follow."""
        for name, parameter, trains in self._parameters:
            if parameter.requires_grad is not trains:
                why = "for which the optimizer has no state"
                way = "end the run, and resume it with a model in which it is thawed"
                if trains:
                    why = "which the optimizer does not follow (momentum and weight decay go on)"
                    way = "give it a rate in optimizer.learning_rates"
                raise ConfigError(
                    f"{name}: requires_grad was set to {parameter.requires_grad} after build, "
                    f"{why}; set it in the layer's build, or {way}"
                )

    def _forward_backward(self, batch: Batch) -> list[Tensor]:
        """Run all microbatches; returns their losses on the last stage, nothing elsewhere."""
        losses = self.engine.train(
            batch,
            self._count_targets(batch),
            self.progress.loss_scale,
            lambda is_last: self.collector.microbatch(is_last=is_last),
            together=self._together,
        )
        for state in self._states:
            state.reject_writes()
        new = [name for name in self.collector.finish() if name not in self._named]
        self._named.update(new)
        if new and self._coords.replica == 0:
            write_line(
                f"warning: {self._coords}: its microbatches of step {self.progress.step + 1} gave "
                f"no gradient to {some_of(new)}; it counts as zero (freeze "
                "what no sample ever uses)"
            )
        return losses

    def _agree(
        self, losses: Sequence[Tensor], notice: Callable[[], Flags], digest: int
    ) -> StepResult:
        with self.phases("optimizer"):
            squares = norm_partials(self._states, self._counted)
            exact = [state for state in self._states if state.is_exact]
            extremes = [*self.sync.own_extremes, *(layer.most for layer in exact)]
            # Losses, extremes and squares reach the host in one copy.
            values = iter(to_host([*losses, *extremes, *squares.values()]))
        each = [float(next(values)) for _ in losses]
        ends = [end for _ in extremes for end in next(values).tolist()]
        partials = {name: next(values) for name in squares}
        summed = [tensor for layer in exact for tensor in layer.tensors]
        fits = self._fits(dict(zip(summed, ends[len(ends) - len(summed) :], strict=True)))
        with self.phases("collective"):
            is_finite = all(map(math.isfinite, ends))
            report = LocalStats(each, partials, notice(), is_finite, digest, fits)
            return self._consensus.reach(report, self.progress.loss_scale)

    def _fits(self, largest: Mapping[TensorState, float]) -> dict[str, UnitFit]:
        """How exact sums fit their units, by the largest entries; a tied weight counts once."""
        fits: dict[str, UnitFit] = {}
        for tensor, most in largest.items():
            assert self._units is not None, "sums of numbers note no largest entry"
            fit = self._units.fit(most / tensor.unit)
            first = self.plan.profile.ties.get(tensor.name, tensor.name)
            if fit is not None:
                fits[first] = max(fit, fits.get(first, fit))
        return fits

    def _clip_and_update(self, verdict: StepResult) -> None:
        """Clip by the global norm, step the optimizer on kept entries, write the dense weights."""
        settings, progress = self._config.optimizer, self.progress
        progress.updates += 1
        hyper = Hyper(
            step=progress.updates,
            learning_rate=self.learning_rate(settings.learning_rate),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        with self.phases("optimizer"):
            factor = clip_factor(verdict.grad_norm, settings.clip_norm)
            update(
                self._states,
                self.plan.optimizer,
                hyper,
                factor / progress.loss_scale,
                own={
                    name: replace(
                        hyper,
                        learning_rate=self.learning_rate(group.peak),
                        weight_decay=group.weight_decay,
                    )
                    for name, group in self.plan.groups.items()
                },
                updated=self.weights.updated,
                staged_layers=iter if self.offload is None else self.offload.staged_layers,
            )
        self.weights.finish()
        self._note_writes()

    def _note_writes(self) -> None:
        for state in self._states:
            state.note_writes()

    # -- between steps --------------------------------------------------------------------

    def score_gradients(self) -> float:
        """Compute the gradients of the coming step's batch and leave them in the state, multiplied
        by the loss scale, which is returned.

        Nothing is updated. The loss scale is lowered until the gradients are finite.
        """
        batch = self._read_ahead = self._next_batch()
        while True:
            with self.statistics.unchanged():
                verdict = self._gradients(batch, lambda: NOTHING)
            if verdict.finite:
                return self.progress.loss_scale
            self._rescale(self.progress.step + 1, verdict)

    def restore_weights(self) -> None:
        """Gather weights again whose memory gradients have taken that no update has used. All
        replicas call this together."""
        self.weights.restore(self._states)

    def follow_masks(self, change: MaskUpdate) -> None:
        """Adapt counters and the agreement; all ranks call this together after masks changed."""
        self.progress.follow_masks(change)
        if change.changed:
            self._consensus = self._make_consensus()

    def learning_rate(self, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak."""
        return self.progress.learning_rate(self._config, self.plan.learning_rate, peak)

    def close(self) -> None:
        """End the thread that reads ahead; safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    # -- steps that update nothing --------------------------------------------------------

    def _rescale(self, step: int, verdict: StepResult) -> None:
        """Let the loss scale follow the verdict of step number `step`.

        TrainingError on all ranks once the smallest scale has failed too often.
        """
        progress = self.progress
        progress.rescale(
            self._config, finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss)
        )
        if progress.skipped_at_floor == 0:
            progress.first_bad = None
        elif progress.first_bad is None:
            progress.first_bad = FirstBad(step=step, what=self.culprit(verdict))
        if progress.skipped_at_floor < PATIENCE:
            return
        first, run = progress.first_bad, self.run_dir
        assert first is not None, "steps were skipped"
        way = "lower optimizer.learning_rate, or look at the data"
        # A later checkpoint may hold ruined weights, from which a run would end again at once.
        steps = [] if run is None else saved_steps(run.folder / CHECKPOINTS)
        before = next((step for step in steps if step < progress.last_good), None)
        if run is not None and before is not None:
            way += (
                f"; weights were good up to step {before}: go on from there by --resume "
                f"{run.path}/{CHECKPOINTS}/step-{before} (in Python resume=) in {ANOTHER_RUN_DIR}"
            )
        raise everywhere(
            TrainingError(
                f"step {first.step}: {first.what}, and no step could update for {PATIENCE} in a "
                f"row, up to step {step}; {way}"
            )
        )

    def culprit(self, verdict: StepResult) -> str:
        """The rank, stage and replica whose loss or gradient is not finite, and which tensor's.

        A loss that is not finite spoils all gradients, so gradients are named only where every
        loss is finite. Where the gradients of each replica are finite by themselves, their sum
        is too large for its type, and the stage is named instead of a rank.
        """
        grid = self._coords.grid
        if verdict.bad_loss is not None:
            rank = grid.rank(grid.g_inter - 1, verdict.bad_loss)
            return f"{grid.coords(rank)}: the loss is not finite"
        assert verdict.culprit is not None, "a loss or a gradient is not finite"
        stage = self.plan.stage_of(verdict.culprit)
        shard = int(verdict.culprit.rpartition("#")[2]) if "#" in verdict.culprit else 0
        column = grid.dp_group(stage, shard)
        # A single replica sums nothing, so that its gradients are looked at only once.
        bad = [rank for rank in column if rank in verdict.bad_ranks or len(column) == 1]
        where = str(grid.coords(bad[0])) if bad else f"stage {stage}, summed"
        text = f"{where}: the gradient of {verdict.culprit} is not finite"
        return printable(text)[:LONGEST_REASON]

    # -- details --------------------------------------------------------------------------

    def _count_targets(self, batch: Batch) -> float:
        """The global number of targets of the step, by which the last stage divides its losses; 1
        on other stages. DataError if there is none."""
        if not self._coords.is_last:
            return 1.0
        each = self.batches.targets_per_sample
        if each is not None:
            return float(each * self._config.batch.global_batch_size)
        with self.phases("collective"):
            count = torch.tensor([batch.num_targets], dtype=torch.float64)
            self.replicas.exchange(Op.ALL_REDUCE, count)
        if not count:
            raise DataError(
                f"data: none of the samples of step {self.progress.step + 1} has a target "
                "that counts; raise batch.global_batch_size, or leave such samples out"
            )
        return count.item()

    def _make_consensus(self) -> StepConsensus:
        """Check that replicas keep the same entries, and lay out the vector of the agreement."""
        self._reject_unequal(masks_digest(self.layers), UNEQUAL_MASKS)
        kept = {
            tensor.name: tensor.kept
            for state in self._states
            for tensor in state.owned
            if self._coords.tp_rank == 0 or tensor.shard is not None
        }
        names = self.plan.counted
        self._counted = [name for name in names if name in kept]
        world, backoff = self.transport.world, self.transport.backoff
        return StepConsensus(world, backoff, self._coords, names, kept)

    def _reject_unequal(self, digest: int, text: str) -> None:
        """TrainingError, of a text with {replica} and {stage}, if a replica has another digest."""
        digests = torch.zeros(self.replicas.size, dtype=torch.float64)
        digests[self.replicas.rank] = digest
        self.replicas.exchange(Op.ALL_REDUCE, digests)
        first, *others = digests.tolist()
        for replica, other in enumerate(others, 1):
            if other != first:
                raise TrainingError(text.format(replica=replica, stage=self._coords.stage))

    def _reject_drifted(self, step: int, verdict: StepResult) -> None:
        """TrainingError on all ranks if a replica has come to other weights than replica 0."""
        if verdict.drifted is not None:
            coords = self._coords.grid.coords(verdict.drifted)
            raise everywhere(
                TrainingError(
                    f"step {step}: weights: replica {coords.replica} has come to others than "
                    f"replica 0 on stage {coords.stage}; look for code that writes to weights "
                    "outside the optimizer (through .data in a forward, say), or for bad memory of "
                    "a host; resume from a checkpoint before that"
                )
            )


UNEQUAL_WEIGHTS = (
    "weights: replica {replica} starts at others than replica 0 on stage {stage}; draw them from "
    "torch's generator, which has the same seed everywhere, or in `init` from the one that is "
    "given, on hosts of one kind"
)
UNEQUAL_MASKS = (
    "masks: replica {replica} keeps other entries than replica 0 on stage {stage}; masks must "
    "depend on seed, names and weights only"
)
