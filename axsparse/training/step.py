"""One training step: microbatches in, weights out. `Step.train_step` is the step on one screen.

Behind it are the checks that replicas have the same weights and masks, and the steps that update
nothing: why, and when that ends the run. All ranks receive the same verdict and decide alike, so
that an error about skipped steps is raised on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from axsparse.config.schema import num_microbatches
from axsparse.data.batches import Batch, Prefetcher
from axsparse.data_parallel.step_consensus import (
    NOTHING,
    Flags,
    LocalStats,
    StepConsensus,
    StepResult,
)
from axsparse.models.module_buffers import slots
from axsparse.pruning.methods.pruner import MaskUpdate
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import ConfigError, DataError, TrainingError, everywhere
from axsparse.runtime.grid import Grid
from axsparse.runtime.process import write_line
from axsparse.samo.backend import to_host
from axsparse.samo.fixed_point import UnitFit, Units
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.masks import bits_digest, masks_digest, weights_digest
from axsparse.samo.optim.gradient_norm import clip_factor, norm_partials
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.optim.update import update
from axsparse.samo.shards import Replicas
from axsparse.samo.tensor_state import TensorState
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, saved_steps
from axsparse.training.layer_check import check_layers, is_checked
from axsparse.training.parts import Parts
from axsparse.training.plan import RunPlan
from axsparse.training.progress import FirstBad, Progress, Spike

MOST_NAMED = 4
"""A warning names at most this many parameters or buffers."""


class Step:
    """Runs training steps, one after the other, on the parts of one rank."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        """The steps count in `progress`. All ranks call this together; TrainingError if replicas
        have other weights or masks than replica 0."""
        config = parts.plan.config
        self.skips = SkippedSteps(parts.plan, parts.run_dir, progress)
        """The steps that updated nothing."""
        self._config = config
        self._parts = parts
        self._progress = progress
        self._parameters = [
            (layer.spec.full_name(name), parameter, parameter.requires_grad)
            for layer in parts.layers
            for name, parameter in layer.module.named_parameters()
        ]
        self._units: Units | None = None
        """The units of exact sums; None where gradients are summed as numbers."""
        if config.samo.gradient == "exact":
            self._units = Units(num_microbatches(config.batch), progress.exponents)
        checks = config.train.check_layers
        self._checks_layers = (
            checks is True if progress.step else is_checked(parts.plan.model, checks)
        )
        """Whether the coming step compares the layers with plain torch first."""
        self._named: dict[str, set[str]] = {}
        self._buffers_are_compared = parts.coords.grid.g_data == 1
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        _reject_unequal(
            weights_digest(parts.layers), parts.replicas, parts.coords.stage, UNEQUAL_WEIGHTS
        )
        self._consensus = self._make_consensus()

    @torch.inference_mode(mode=False)
    @torch.enable_grad()  # whoever calls may have switched gradients off
    def train_step(self, notice: Callable[[], Flags] = lambda: NOTHING) -> StepResult:
        """Train on the next batch; the loss and norm returned were measured before the update.

        If the loss or a gradient is not finite anywhere, or the loss spikes, no rank updates.
        All ranks receive what `notice` returns with the agreement; it is called when everything
        else is computed. TrainingError on all ranks once too many steps in a row could not update,
        or once replicas are found to have other weights.
        """
        self.check_layers()
        step = self._progress.step + 1
        verdict = self._gradients(self._next_batch(), notice)
        reject_drifted_weights(verdict, step, self._parts.coords.grid)
        spike = self.skips.spike_of(step, verdict)
        if verdict.finite and spike is None:
            with self._parts.phases("collective"):
                self._parts.statistics.finish()
            self._clip_and_update(verdict)
        else:
            self._parts.statistics.undo()
        self._warn_of_own_buffers()
        self.skips.record(step, verdict, spike)
        self._progress.end_step()
        return replace(verdict, spike=spike is not None)

    @torch.inference_mode(mode=False)
    @torch.enable_grad()
    def check_layers(self) -> None:
        """Compare the layers with plain torch by the first batch, if that is wanted and not done.

        All ranks call this together; ConfigError on all of them for a layer that differs.
        """
        if self._checks_layers:
            self._checks_layers = False
            self._reject_frozen()
            self._read_ahead = self._next_batch()
            check_layers(self._parts, self._read_ahead)

    def _gradients(self, batch: Batch, notice: Callable[[], Flags] = lambda: NOTHING) -> StepResult:
        """Compute the gradients of a batch, and reach a verdict on them with all ranks.

        Where exact sums did not fit, the gradients are computed again in other units.
        """
        while True:
            self._begin_step()
            losses = self._forward_backward(batch)
            self._all_reduce_gradients()
            digest = 0
            if self._compares_replicas:
                digest = self._digest()
                group, layers = self._parts.tp_group, self._parts.layers
                if group is not None:
                    reject_partial_gradients(group, layers, self._parts.coords.stage)
            verdict = self._agree(losses, notice, digest)
            if self._units is None or not verdict.finite:
                return verdict
            if self._units.follow(verdict.fits):
                return verdict
            self._parts.statistics.undo()

    # -- the parts of a step, in their order ----------------------------------------------

    def _next_batch(self) -> Batch:
        batch, self._read_ahead = self._read_ahead, None
        if batch is not None:
            return batch
        with self._parts.phases("data"):
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(
                    self._parts.data.training.training, self._progress.step
                )
            return self._prefetcher.get(self._progress.step)

    def _begin_step(self) -> None:
        """Open a step, whose first gradient of each parameter overwrites the last step's."""
        self._reject_frozen()
        if self._units is not None:
            ties = self._parts.profile.ties
            for layer in self._parts.layers:
                for tensor in layer.state.tensors:
                    tensor.unit = self._units.unit(ties.get(tensor.name, tensor.name))
        self._parts.collector.begin()
        self._parts.sync.begin()
        self._parts.statistics.begin()

    def _reject_frozen(self) -> None:
        """ConfigError if a callback has frozen a parameter, or has made one train: its moments in
        the optimizer would not follow."""
        for name, parameter, trains in self._parameters:
            if parameter.requires_grad is not trains:
                raise ConfigError(
                    f"{name}: requires_grad was set to {parameter.requires_grad} after build, "
                    "which the optimizer does not follow (momentum and weight decay go on); set it "
                    "in the layer's build, or give it a rate in optimizer.learning_rates"
                )

    def _forward_backward(self, batch: Batch) -> list[Tensor]:
        """Run all microbatches; returns their losses on the last stage, nothing elsewhere.

        Hooks compress every gradient as it appears (`samo/gradient_hooks.py`).
        """
        parts = self._parts
        losses = parts.engine.train(
            batch,
            self._count_targets(batch),
            self._progress.loss_scale,
            parts.statistics.before_forward,
            lambda is_last: parts.collector.microbatch(is_last=is_last),
        )
        self._name_once(
            f"warning: {parts.coords}: its microbatches of step {self._progress.step + 1} gave "
            "no gradient to {}; it counts as zero (freeze what no sample ever uses)",
            parts.collector.finish(),
        )
        self._name_once(
            f"{parts.coords}: pipeline.split_backward leaves unsplit, since they have gradients "
            "besides that of one call of their layer: {}",
            parts.engine.unsplit,
        )
        return losses

    def _all_reduce_gradients(self) -> None:
        """Wait for the sums over tied weights and replicas, which began while layers computed."""
        self._parts.sync.finish()

    @property
    def _compares_replicas(self) -> bool:
        """Whether replicas are compared in the present step."""
        every, step = self._config.train.compare_replicas_every, self._progress.step + 1
        return bool(every) and step % every == 0

    def _digest(self) -> int:
        """A hash of the weights that this rank answers for; 0 if there are none."""
        with self._parts.phases("optimizer"):
            return weights_digest(self._parts.layers)

    def _agree(
        self,
        losses: Sequence[Tensor],
        notice: Callable[[], Flags] = lambda: NOTHING,
        digest: int = 0,
    ) -> StepResult:
        """Agree on all ranks on the loss, the norm, and whether both are finite."""
        parts = self._parts
        with parts.phases("optimizer"):
            squares = norm_partials([layer.state for layer in parts.layers], self._counted)
            exact = [layer.state for layer in parts.layers if layer.state.is_exact]
            extremes = [*parts.sync.own_extremes, *(layer.most for layer in exact)]
            # Losses, extremes and squares reach the host in one copy.
            values = iter(to_host([*losses, *extremes, *squares.values()]))
        each = [float(next(values)) for _ in losses]
        ends = [end for _ in extremes for end in next(values).tolist()]
        partials = {name: next(values) for name in squares}
        summed = [tensor for layer in exact for tensor in layer.tensors]
        fits = self._fits(dict(zip(summed, ends[len(ends) - len(summed) :], strict=True)))
        with parts.phases("collective"):
            is_finite = all(map(math.isfinite, ends))
            report = LocalStats(each, partials, notice(), is_finite, digest, fits)
            return self._consensus.reach(report, self._progress.loss_scale)

    def _fits(self, largest: Mapping[TensorState, float]) -> dict[str, UnitFit]:
        """How exact sums fit their units, from the largest entry of each tensor; both uses of a
        tied weight count as its first."""
        fits: dict[str, UnitFit] = {}
        for tensor, most in largest.items():
            assert self._units is not None, "sums of numbers note no largest entry"
            fit = self._units.fit(most / tensor.unit)
            first = self._parts.profile.ties.get(tensor.name, tensor.name)
            if fit is not None:
                fits[first] = max(fit, fits.get(first, fit))
        return fits

    def _clip_and_update(self, verdict: StepResult) -> None:
        """Clip by the global norm, step the optimizer on kept entries, write the dense weights."""
        parts, settings = self._parts, self._config.optimizer
        progress = self._progress
        progress.updates += 1
        hyper = Hyper(
            step=progress.updates,
            learning_rate=self.learning_rate(settings.learning_rate),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        with parts.phases("optimizer"):
            factor = clip_factor(verdict.grad_norm, settings.clip_norm)
            update(
                [layer.state for layer in parts.layers],
                parts.plan.optimizer,
                hyper,
                factor / progress.loss_scale,
                own={
                    name: replace(
                        hyper,
                        learning_rate=self.learning_rate(group.peak),
                        weight_decay=group.weight_decay,
                    )
                    for name, group in parts.plan.groups.items()
                },
                updated=parts.weights.updated,
                staged_layers=iter if parts.offload is None else parts.offload.staged_layers,
            )
        parts.weights.finish()

    # -- between steps --------------------------------------------------------------------

    def score_gradients(self) -> None:
        """Compute the gradients of the coming step's batch and leave them in the state.

        Nothing is updated. The loss scale is lowered until the gradients are finite.
        """
        batch = self._read_ahead = self._next_batch()
        while True:
            verdict = self._gradients(batch)
            self._parts.statistics.undo()
            if verdict.finite:
                return
            self.skips.rescale(self._progress.step + 1, verdict)

    def follow_masks(self, change: MaskUpdate) -> None:
        """Adapt counters and the agreement; all ranks call this together after masks changed."""
        self._progress.follow_masks(change)
        if change.changed:
            self._consensus = self._make_consensus()

    def learning_rate(self, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak."""
        return self._progress.learning_rate(self._config, self._parts.plan.learning_rate, peak)

    def close(self) -> None:
        """End the thread that reads ahead; safe to call twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    # -- details --------------------------------------------------------------------------

    def _count_targets(self, batch: Batch) -> float:
        """The step's global number of targets, by which the last stage divides its losses.

        Other stages divide nothing and get 1. DataError if the step has no target.
        """
        parts = self._parts
        if not parts.coords.is_last:
            return 1.0
        each = parts.data.training.targets_per_sample
        if each is not None:
            return float(each * self._config.batch.global_batch_size)
        with parts.phases("collective"):
            count = torch.tensor([batch.num_targets], dtype=torch.float64)
            parts.replicas.exchange(Op.ALL_REDUCE, count)
        if not count:
            raise DataError(
                f"data: none of the samples of step {self._progress.step + 1} has a target "
                "that counts; raise batch.global_batch_size, or leave such samples out"
            )
        return count.item()

    def _make_consensus(self) -> StepConsensus:
        """Check that replicas keep the same entries, and lay out the vector of the agreement."""
        parts, transport = self._parts, self._parts.transport
        _reject_unequal(
            masks_digest(parts.layers), parts.replicas, parts.coords.stage, UNEQUAL_MASKS
        )
        kept = {
            tensor.name: tensor.kept
            for layer in parts.layers
            for tensor in layer.state.owned
            if parts.coords.tp_rank == 0 or tensor.shard is not None
        }
        names = parts.plan.counted
        self._counted = [name for name in names if name in kept]
        return StepConsensus(transport.world, transport.backoff, parts.coords, names, kept)

    def _warn_of_own_buffers(self) -> None:
        """Warn, after the first step, of buffers that each replica has in its own way.

        Checkpoints hold the first replica's, from which all replicas resume.
        """
        if self._buffers_are_compared:
            return
        self._buffers_are_compared = True
        parts = self._parts
        names = [
            parts.layers[number].spec.full_name(name)
            for number, name in parts.statistics.different()
        ]
        self._name_once(
            f"warning: {parts.coords}: each replica has its own {{}}; checkpoints hold the first "
            "replica's, so that a run that resumes goes on otherwise if training depends on them",
            names,
        )

    def _name_once(self, text: str, names: Sequence[str]) -> None:
        """Print a text, in which "{}" stands for the names that it has not named before, if there
        are any.

        Of the replicas of a stage, the first one prints it.
        """
        known = self._named.setdefault(text.rpartition("{}")[2], set())
        new = [name for name in names if name not in known]
        known.update(new)
        if new and self._parts.coords.replica == 0:
            more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
            write_line(text.format(f"{', '.join(new[:MOST_NAMED])}{more}"))


UNEQUAL_WEIGHTS = (
    "weights: replica {replica} starts at others than replica 0 on stage {stage}; draw them from "
    "torch's generator, which has the same seed everywhere, or in `init` from the one that is "
    "given, on hosts of one kind"
)
UNEQUAL_MASKS = (
    "masks: replica {replica} keeps other entries than replica 0 on stage {stage}; masks must "
    "depend on seed, names and weights only"
)


def _reject_unequal(digest: int, replicas: Replicas, stage: int, text: str) -> None:
    """TrainingError if a replica of this stage has another digest than replica 0.

    All replicas call this together. `text` names {replica} and {stage}.
    """
    digests = torch.zeros(replicas.size, dtype=torch.float64)
    digests[replicas.rank] = digest
    replicas.exchange(Op.ALL_REDUCE, digests)
    first, *others = digests.tolist()
    for replica, other in enumerate(others, 1):
        if other != first:
            raise TrainingError(text.format(replica=replica, stage=stage))


def reject_partial_gradients(group: TensorGroup, layers: Sequence[BuiltLayer], stage: int) -> None:
    """ConfigError if tensor-parallel ranks have other gradients of a parameter that all of them
    have, or other buffers. All ranks call this together."""
    states = [layer.state for layer in layers]
    for state in states:
        # Replicas may share the state of each rank in another way, as shards keep other numbers of
        # entries.
        state.gather_gradient()
    full = {
        f"{tensor.name}: its gradient": state.gradient_of(tensor)
        for state in states
        for tensor in state.owned
        if tensor.shard is None
    }
    for layer in layers:
        kept = (slot for slot in slots(layer.module) if slot.persists)
        full |= {f"{layer.spec.full_name(slot.name)}: this buffer": slot.tensor for slot in kept}
    digests = torch.tensor([bits_digest(values) for values in full.values()], dtype=torch.float64)
    for what, of_ranks in zip(full, group.gather_rows(digests).t().tolist(), strict=True):
        if len(set(of_ranks)) > 1:
            raise ConfigError(
                f"{what} differs between the ranks of stage {stage}, so that it sees "
                'some heads or features only; make its module "replicated" in Layer.tp_plan, move '
                'it in front of the colwise module, or make that "gather_output"'
            )


def reject_drifted_weights(verdict: StepResult, step: int, grid: Grid) -> None:
    """TrainingError on all ranks if a replica has come to other weights than replica 0."""
    if verdict.drifted is not None:
        coords = grid.coords(verdict.drifted)
        raise everywhere(
            TrainingError(
                f"step {step}: weights: replica {coords.replica} has come to others than replica 0 "
                f"on stage {coords.stage}; look for code that writes to weights beside the "
                "optimizer (through .data in a forward, say), or for bad memory of a host; resume "
                "from a checkpoint before that"
            )
        )


# -- steps that update nothing ------------------------------------------------------------


LONGEST_REASON = 1000
"""Letters of a reason that a checkpoint keeps."""


class SkippedSteps:
    """Counts the skipped steps, and gives up once there are too many in a row."""

    def __init__(self, plan: RunPlan, run_dir: Path | None, progress: Progress) -> None:
        self.reason: str | None = None
        """Why the last step updated nothing; None if it did update."""
        self._config = plan.config
        self._plan = plan
        self._run_dir = run_dir
        self._progress = progress

    def spike_of(self, step: int, verdict: StepResult) -> Spike | None:
        """The spike of step number `step`; None if its loss is usual or not finite."""
        if not verdict.finite:
            return None
        return self._progress.spikes.decide(self._config.spikes, step, verdict.loss)

    def record(self, step: int, verdict: StepResult, spike: Spike | None) -> None:
        """Take note of step number `step`, and let the loss scale follow it.

        TrainingError on all ranks once too many steps in a row could not update.
        """
        self.reason = None
        if spike is not None:
            self._record_spike(spike)
            return
        if verdict.finite:
            self._progress.last_good = step
        else:
            self._progress.not_finite += 1
            self.reason = self._culprit(verdict)
        self.rescale(step, verdict)

    def rescale(self, step: int, verdict: StepResult) -> None:
        """Let the loss scale follow the verdict of step number `step`.

        TrainingError on all ranks once the smallest scale has failed too often.
        """
        progress, patience = self._progress, self._config.loss_scale.patience
        progress.rescale(
            self._config, finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss)
        )
        if progress.skipped_at_floor == 0:
            progress.first_bad = None
        elif progress.first_bad is None:
            progress.first_bad = FirstBad(step=step, what=self._culprit(verdict))
        if progress.skipped_at_floor < patience:
            return
        first = progress.first_bad
        assert first is not None, "patience is 1 or more"
        raise self._given_up(
            f"step {first.step}: {first.what}, and no step could update for {patience} in a "
            f"row, up to step {step} (loss_scale.patience)"
        )

    def _record_spike(self, spike: Spike) -> None:
        """Count a step that is skipped for a spike; TrainingError after too many in a row."""
        patience = self._config.spikes.patience
        if self._progress.spikes.in_a_row >= patience:
            raise self._given_up(
                f"step {spike.step}: {spike}, and {patience} steps in a row were skipped for that "
                "(spikes.patience)"
            )
        self.reason = str(spike)
        self._progress.spiked += 1

    def _given_up(self, why: str) -> TrainingError:
        """The error of a run whose steps do not update any more.

        It names the newest checkpoint whose weights a step has trained on, if there is one: a later
        one may hold ruined weights, so that a run that is resumed from it would end again at once.
        """
        suggestion, run = "lower optimizer.learning_rate, or look at the data", self._run_dir
        steps = [] if run is None else saved_steps(run / CHECKPOINTS)
        before = next((step for step in steps if step < self._progress.last_good), None)
        if before is not None:
            suggestion += (
                f"; weights were good up to step {before}: axsparse checkpoint prune {run} --after "
                f"{before}, then --resume auto"
            )
        return everywhere(TrainingError(f"{why}; {suggestion}"))

    def _culprit(self, verdict: StepResult) -> str:
        """The rank, stage and replica whose loss or gradient is not finite, and which tensor's.

        A loss that is not finite spoils all gradients, so gradients are named only where every
        loss is finite. Where the gradients of each replica are finite by themselves, their sum
        is too large for its type, and the stage is named instead of a rank.
        """
        grid = self._plan.coords.grid
        if verdict.bad_loss is not None:
            rank = grid.rank(grid.g_inter - 1, verdict.bad_loss)
            return f"{grid.coords(rank)}: the loss is not finite"
        assert verdict.culprit is not None, "a loss or a gradient is not finite"
        stage = self._plan.stage_of(verdict.culprit)
        shard = int(verdict.culprit.rpartition("#")[2]) if "#" in verdict.culprit else 0
        column = grid.dp_group(stage, shard)
        # A single replica sums nothing, so that its gradients are looked at only once.
        bad = [rank for rank in column if rank in verdict.bad_ranks or len(column) == 1]
        where = str(grid.coords(bad[0])) if bad else f"stage {stage}, summed"
        text = f"{where}: the gradient of {verdict.culprit} is not finite"
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:LONGEST_REASON]
