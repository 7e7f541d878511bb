"""One training step: microbatches in, weights out. `Step.train_step` is the step on one screen.

Behind it are the counters of a run (`Position`), the checks that replicas have the same weights and
masks, and the steps that update nothing: why, how often, and when that ends the run.

A step is skipped if its loss or a gradient is not finite, or if its loss is a number that is too
large to believe, a spike. All ranks receive the same verdict and judge alike, so that an error
about skipped steps is raised on all ranks.

A step spikes if its mean loss L exceeds the median M of the last `window` good steps by more
than ln(ratio), that is if exp(L) > ratio · exp(M). A difference in nats means the same at a
loss of 10 and at one of 0.1; a ratio of losses would miss spikes at first and see too many at
the end. The median is hardly moved by a single bad step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from axsparse.config.schema import Config, SpikesConfig, num_microbatches
from axsparse.data.batches import Batch
from axsparse.data.prefetch import Prefetcher
from axsparse.data_parallel.agreement import NOTHING, Agreement, Notice, Report, Verdict
from axsparse.models.module_buffers import slots
from axsparse.pruning.methods.masking import Change
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import ConfigError, DataError, TrainingError, everywhere
from axsparse.runtime.grid import Grid
from axsparse.runtime.launcher import write_line
from axsparse.samo.backend import to_host
from axsparse.samo.fixed_point import Fit, Units
from axsparse.samo.masks import bits_digest, masks_digest, weights_digest
from axsparse.samo.optim.gradient_norm import clip_factor, norm_partials
from axsparse.samo.optim.optimizer import Hyper, LearningRate, learning_rate, own_learning_rate
from axsparse.samo.optim.update import update
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, saved_steps
from axsparse.training.checkpoint.manifest import FirstBad, Progress, SpikeHistory
from axsparse.training.layer_check import check_layers, is_checked
from axsparse.training.parts import Parts

MOST_NAMED = 4
"""A warning names at most this many parameters or buffers."""


class Step:
    """Runs training steps, one after the other, on the parts of one rank."""

    def __init__(self, parts: Parts) -> None:
        """All ranks call this together; TrainingError if replicas have other weights or masks than
        replica 0."""
        config = parts.run.config
        self.position = Position(config, parts.run.learning_rate)
        """Where in its schedule the run stands."""
        self.skips = SkippedSteps(parts)
        """The steps that updated nothing."""
        self._config = config
        self._parts = parts
        self._parameters = [
            (f"{layer.spec.name}.{name}", parameter, parameter.requires_grad)
            for layer in parts.layers
            for name, parameter in layer.module.named_parameters()
        ]
        self._units: Units | None = None
        """The units of exact sums; None where gradients are summed as numbers."""
        if config.samo.gradient == "exact":
            self._units = Units(num_microbatches(config.batch))
        self._checks_layers = is_checked(parts.run.model, config.train.check_layers)
        """Whether the coming step compares the layers with plain torch first."""
        self._named: dict[str, set[str]] = {}
        self._buffers_are_compared = parts.place.grid.g_data == 1
        self._prefetcher: Prefetcher | None = None
        self._read_ahead: Batch | None = None
        _refuse_unequal(weights_digest(parts.layers), parts, UNEQUAL_WEIGHTS)
        self._agreement = self._make_agreement()

    @torch.inference_mode(mode=False)
    @torch.enable_grad()  # whoever calls may have switched gradients off
    def train_step(self, notice: Callable[[], Notice] = lambda: NOTHING) -> Verdict:
        """Train on the next batch; the loss and norm returned were measured before the update.

        If the loss or a gradient is not finite anywhere, or the loss spikes, no rank updates.
        All ranks receive what `notice` returns with the agreement; it is called when everything
        else is computed. TrainingError on all ranks once too many steps in a row could not update,
        or once replicas are found to have other weights.
        """
        self.check_layers()
        step = self.position.steps_done + 1
        verdict = self._gradients(self._next_batch(), notice)
        refuse_drifted_weights(verdict, step, self._parts.place.grid)
        spike = self.skips.spike_of(step, verdict)
        if verdict.finite and spike is None:
            with self._parts.phases("collective"):
                self._parts.statistics.finish()
            self._clip_and_update(verdict)
        else:
            self._parts.statistics.undo()
        self._warn_of_own_buffers()
        self.skips.record(step, verdict, spike)
        self.position.steps_done = step
        return replace(verdict, spike=spike is not None)

    @torch.inference_mode(mode=False)
    @torch.enable_grad()
    def check_layers(self) -> None:
        """Compare the layers with plain torch by the first batch, if that is wanted and not done.

        All ranks call this together; ConfigError on all of them for a layer that differs.
        """
        if self._checks_layers:
            self._checks_layers = False
            self._refuse_frozen()
            self._read_ahead = self._next_batch()
            check_layers(self._parts, self._read_ahead)

    def _gradients(self, batch: Batch, notice: Callable[[], Notice] = lambda: NOTHING) -> Verdict:
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
                refuse_partial_gradients(self._parts)
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
                    self._parts.data.training.training, self.position.steps_done
                )
            return self._prefetcher.get(self.position.steps_done)

    def _begin_step(self) -> None:
        """Open a step, whose first gradient of each parameter overwrites that of the last step."""
        self._refuse_frozen()
        if self._units is not None:
            ties = self._parts.survey.ties
            for layer in self._parts.layers:
                for tensor in layer.state.tensors:
                    tensor.unit = self._units.unit(ties.get(tensor.name, tensor.name))
        self._parts.collector.begin()
        self._parts.sync.begin()
        self._parts.statistics.begin()

    def _refuse_frozen(self) -> None:
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
            parts.loss_scale.scale,
            parts.statistics.before_forward,
            lambda is_last: parts.collector.microbatch(is_last=is_last),
        )
        self._name_once(
            f"warning: {parts.place}: its microbatches of step {self.position.steps_done + 1} gave "
            "no gradient to {}; it counts as zero (freeze what no sample ever uses)",
            parts.collector.finish(),
        )
        self._name_once(
            f"{parts.place}: pipeline.split_backward leaves unsplit, since they have gradients "
            "besides that of one call of their layer: {}",
            parts.engine.unsplit,
        )
        return losses

    def _all_reduce_gradients(self) -> None:
        """Wait for the sums over tied weights and replicas, which began while layers computed."""
        self._parts.sync.finish()

    @property
    def _compares_replicas(self) -> bool:
        """Whether the present step is one of those that compare replicas."""
        every, step = self._config.train.compare_replicas_every, self.position.steps_done + 1
        return bool(every) and step % every == 0

    def _digest(self) -> int:
        """A hash of the weights that this rank answers for; 0 if there are none."""
        with self._parts.phases("optimizer"):
            return weights_digest(self._parts.layers)

    def _agree(
        self,
        losses: Sequence[Tensor],
        notice: Callable[[], Notice] = lambda: NOTHING,
        digest: int = 0,
    ) -> Verdict:
        """Tell all ranks the loss, the norm, and whether both are finite."""
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
            report = Report(each, partials, notice(), is_finite, digest, fits)
            return self._agreement.reach(report, parts.loss_scale.scale)

    def _fits(self, largest: Mapping[TensorState, float]) -> dict[str, Fit]:
        """How exact sums fit their units, from the largest entry of each tensor; both uses of a
        tied weight count as its first."""
        fits: dict[str, Fit] = {}
        for tensor, most in largest.items():
            assert self._units is not None, "sums of numbers note no largest entry"
            fit = self._units.fit(most / tensor.unit)
            first = self._parts.survey.ties.get(tensor.name, tensor.name)
            if fit is not None:
                fits[first] = max(fit, fits.get(first, fit))
        return fits

    def _clip_and_update(self, verdict: Verdict) -> None:
        """Clip by the global norm, step the optimizer on kept entries, write the dense weights."""
        parts, settings = self._parts, self._config.optimizer
        self.position.updates += 1
        hyper = Hyper(
            step=self.position.updates,
            learning_rate=self.position.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        with parts.phases("optimizer"):
            factor = clip_factor(verdict.grad_norm, settings.clip_norm)
            update(
                [layer.state for layer in parts.layers],
                parts.run.optimizer,
                hyper,
                factor / parts.loss_scale.scale,
                own={
                    name: replace(
                        hyper,
                        learning_rate=self.position.rate_of(group.peak),
                        weight_decay=group.weight_decay,
                    )
                    for name, group in parts.run.groups.items()
                },
                updated=parts.weights.updated,
                visits=iter if parts.offload is None else parts.offload.visits,
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
            self.skips.rescale(self.position.steps_done + 1, verdict)

    def follow_masks(self, change: Change) -> None:
        """Adapt counters and the agreement; all ranks call this together after masks changed."""
        self.position.follow_masks(rewound=change.rewound, changed=change.changed)
        if change.changed:
            self._agreement = self._make_agreement()
            self.skips.spikes.forget()

    def progress(self, *, evaluated: bool, masked: bool) -> Progress:
        """Where training stands, for a checkpoint between two steps.

        `evaluated` says that the evaluation after the last step is done, `masked` that the masks
        have been changed for the coming step.
        """
        return Progress(
            step=self.position.steps_done,
            evaluated=evaluated,
            masked=masked,
            loss_scale=self._parts.loss_scale.scale,
            spikes=self.skips.spikes.history(),
            exponents={} if self._units is None else dict(self._units.exponents),
            **{name: getattr(owner, name) for name, owner in self._counters().items()},
        )

    def restore(self, progress: Progress) -> None:
        """Go on from where a checkpoint stood; called before the first step."""
        self.position.steps_done = progress.step
        self._checks_layers = self._config.train.check_layers is True
        self._parts.loss_scale.scale = progress.loss_scale
        self.skips.spikes.restore(progress.spikes)
        if self._units is not None:
            self._units.exponents.update(progress.exponents)
        for name, owner in self._counters().items():
            setattr(owner, name, getattr(progress, name))

    def _counters(self) -> dict[str, object]:
        """By the name under which a checkpoint keeps a counter, the object that has this
        attribute."""
        position, skips, scale = self.position, self.skips, self._parts.loss_scale
        return {
            **dict.fromkeys(("updates", "schedule_start", "masks_changed"), position),
            **dict.fromkeys(("not_finite", "spiked", "last_good", "first_bad"), skips),
            **dict.fromkeys(("good_steps", "skipped_at_floor"), scale),
        }

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
        if not parts.place.is_last:
            return 1.0
        each = parts.data.training.targets_per_sample
        if each is not None:
            return float(each * self._config.batch.global_batch_size)
        with parts.phases("collective"):
            count = torch.tensor([batch.num_targets], dtype=torch.float64)
            parts.replicas.exchange(Op.ALL_REDUCE, count)
        if not count:
            raise DataError(
                f"data: none of the samples of step {self.position.steps_done + 1} has a target "
                "that counts; raise batch.global_batch_size, or leave such samples out"
            )
        return count.item()

    def _make_agreement(self) -> Agreement:
        """Check that replicas keep the same entries, and lay out the vector of the agreement."""
        parts, transport = self._parts, self._parts.transport
        _refuse_unequal(masks_digest(parts.layers), parts, UNEQUAL_MASKS)
        kept = {
            tensor.name: tensor.kept
            for layer in parts.layers
            for tensor in layer.state.owned
            if parts.place.member == 0 or tensor.shard is not None
        }
        names = parts.run.counted
        self._counted = [name for name in names if name in kept]
        return Agreement(transport.world, transport.backoff, parts.place, names, kept)

    def _warn_of_own_buffers(self) -> None:
        """Warn, after the first step, of buffers that each replica has in its own way.

        Checkpoints hold the first replica's, from which all replicas resume.
        """
        if self._buffers_are_compared:
            return
        self._buffers_are_compared = True
        parts = self._parts
        names = [
            f"{parts.layers[number].spec.name}.{name}"
            for number, name in parts.statistics.different()
        ]
        self._name_once(
            f"warning: {parts.place}: each replica has its own {{}}; checkpoints hold the first "
            "replica's, so that a run that resumes goes on otherwise if training depends on them",
            names,
        )

    def _name_once(self, text: str, names: Sequence[str]) -> None:
        """Print a text, in which "{}" stands for those of the names that it has not named before,
        if there are any.

        Of the replicas of a stage, the first one prints it.
        """
        known = self._named.setdefault(text.rpartition("{}")[2], set())
        new = [name for name in names if name not in known]
        known.update(new)
        if new and self._parts.place.replica == 0:
            more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
            write_line(text.format(f"{', '.join(new[:MOST_NAMED])}{more}"))


class Position:
    """The counters of a run, between two steps; the same on all ranks."""

    def __init__(self, config: Config, learning_rate: LearningRate | None = None) -> None:
        """`config` has every `auto` resolved; `learning_rate` is a schedule of the user's own."""
        self.steps_done = 0
        """Steps since the run began, skipped ones included."""
        self.updates = 0
        """Steps that updated the weights since the last rewinding."""
        self.schedule_start = 0
        """The value of `steps_done` at the last rewinding, where the learning rate began anew."""
        self.masks_changed: int | None = None
        """The value of `steps_done` at the last change of masks; None before the first."""
        self._config = config
        self._own_rate = learning_rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the coming step."""
        return self.rate_of(self._config.optimizer.learning_rate)

    def rate_of(self, peak: float) -> float:
        """The learning rate of the coming step for parameters with this peak.

        After a rewinding the schedule begins anew, and its descent ends where it would have
        ended without the rewinding. After a change of masks the rate rises linearly to the
        schedule's over `pruning.rewarm_steps` steps. A function of the user's own stands for all of
        the schedule; for a parameter with another peak, the rate that it gives is scaled in
        proportion to the peak.
        """
        schedule = self._config.schedule
        assert schedule.decay_steps != "auto", "the configuration is resolved"
        rewarming = 1.0
        if self.masks_changed is not None and self._config.pruning.rewarm_steps:
            since = self.steps_done - self.masks_changed + 1
            rewarming = min(1.0, since / self._config.pruning.rewarm_steps)
        step = self.steps_done - self.schedule_start
        if self._own_rate is not None:
            usual = self._config.optimizer.learning_rate
            return rewarming * own_learning_rate(self._own_rate, step) * (peak / usual)
        return rewarming * learning_rate(
            step,
            schedule,
            peak=peak,
            decay_steps=max(schedule.decay_steps - self.schedule_start, schedule.warmup_steps, 1),
        )

    def follow_masks(self, *, rewound: bool, changed: bool) -> None:
        """Take note that the masks before the coming step were rewound or changed."""
        if rewound:
            self.updates, self.schedule_start = 0, self.steps_done
        if changed:
            self.masks_changed = self.steps_done


UNEQUAL_WEIGHTS = (
    "weights: replica {replica} starts at others than replica 0 on stage {stage}; draw them from "
    "torch's generator, which has the same seed everywhere, or in `init` from the one that is "
    "given, on hosts of one kind"
)
UNEQUAL_MASKS = (
    "masks: replica {replica} keeps other entries than replica 0 on stage {stage}; masks must "
    "depend on seed, names and weights only"
)


def _refuse_unequal(digest: int, parts: Parts, text: str) -> None:
    """TrainingError if a replica of this stage has another digest than replica 0.

    All replicas call this together. `text` names {replica} and {stage}.
    """
    replicas = parts.replicas
    digests = torch.zeros(replicas.size, dtype=torch.float64)
    digests[replicas.rank] = digest
    replicas.exchange(Op.ALL_REDUCE, digests)
    first, *others = digests.tolist()
    for replica, other in enumerate(others, 1):
        if other != first:
            raise TrainingError(text.format(replica=replica, stage=parts.place.stage))


def refuse_partial_gradients(parts: Parts) -> None:
    """ConfigError if tensor-parallel ranks have other gradients of a parameter that all of them
    have, or other buffers. All ranks call this together."""
    group = parts.members
    if group is None:
        return
    states = [layer.state for layer in parts.layers]
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
    for layer in parts.layers:
        kept = (slot for slot in slots(layer.module) if slot.persists)
        full |= {f"{layer.spec.name}.{slot.name}: this buffer": slot.tensor for slot in kept}
    digests = torch.tensor([bits_digest(values) for values in full.values()], dtype=torch.float64)
    for what, of_ranks in zip(full, group.gather_rows(digests).t().tolist(), strict=True):
        if len(set(of_ranks)) > 1:
            raise ConfigError(
                f"{what} differs between the ranks of stage {parts.place.stage}, so that it sees "
                'some heads or features only; make its module "replicated" in Layer.tp_plan, move '
                'it in front of the colwise module, or make that "gather_output"'
            )


def refuse_drifted_weights(verdict: Verdict, step: int, grid: Grid) -> None:
    """TrainingError on all ranks if a replica has come to other weights than replica 0."""
    if verdict.drifted is not None:
        place = grid.place(verdict.drifted)
        raise everywhere(
            TrainingError(
                f"step {step}: weights: replica {place.replica} has come to others than replica 0 "
                f"on stage {place.stage}; look for code that writes to weights beside the "
                "optimizer (through .data in a forward, say), or for bad memory of a host; resume "
                "from a checkpoint before that"
            )
        )


# -- steps that update nothing ------------------------------------------------------------


@dataclass(frozen=True)
class Spike:
    """A step whose loss is too large."""

    step: int
    """The number of the step, from 1."""
    loss: float
    usual: float
    """The median loss of the good steps before it."""

    def __str__(self) -> str:
        return f"spike: the loss is {self.loss:.4g}, the usual one {self.usual:.4g}"


class SpikeRule:
    """Judges each loss by the losses before it, alike on every rank."""

    def __init__(self, settings: SpikesConfig) -> None:
        self.in_a_row = 0
        """Number of spikes since the last good step."""
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)

    def judge(self, step: int, loss: float) -> Spike | None:
        """The spike that a finite loss is; None if the loss is good, which is then remembered."""
        if self._settings.rule == "none":
            return None
        if len(self._losses) == self._settings.window:
            usual = median(self._losses)
            if loss - usual > math.log(self._settings.ratio):
                self.in_a_row += 1
                return Spike(step, loss, usual)
        self._losses.append(loss)
        self.in_a_row = 0
        return None

    def forget(self) -> None:
        """Forget the losses so far, since they say nothing about a network with other masks."""
        self._losses.clear()

    def history(self) -> SpikeHistory:
        """The state of the rule, which `restore` reads."""
        return SpikeHistory(losses=tuple(self._losses), in_a_row=self.in_a_row)

    def restore(self, history: SpikeHistory) -> None:
        """Continue with the history of a checkpoint."""
        self._losses.extend(history.losses)
        self.in_a_row = history.in_a_row


LONGEST_REASON = 1000
"""Letters of a reason that a checkpoint keeps."""


class SkippedSteps:
    """Counts skipped steps and gives up once there are too many in a row."""

    def __init__(self, parts: Parts) -> None:
        self.not_finite = 0
        """Steps that were skipped because loss or gradients were not finite."""
        self.spiked = 0
        """Steps that were skipped because the loss spiked."""
        self.reason: str | None = None
        """Why the last step updated nothing; None if it did update."""
        self.last_good = 0
        """The last step that updated the weights; 0 before the first."""
        self.first_bad: FirstBad | None = None
        """The first of the steps in a row that were skipped at the smallest loss scale."""
        self._settings = parts.run.config.spikes
        self.spikes = SpikeRule(self._settings)
        self._parts = parts

    def spike_of(self, step: int, verdict: Verdict) -> Spike | None:
        """The spike of step number `step`; None if its loss is usual or not finite."""
        return self.spikes.judge(step, verdict.loss) if verdict.finite else None

    def record(self, step: int, verdict: Verdict, spike: Spike | None) -> None:
        """Take note of step number `step`, and let the loss scale follow it.

        TrainingError on all ranks once too many steps in a row could not update.
        """
        self.reason = None
        if spike is not None:
            self._record_spike(spike)
            return
        if verdict.finite:
            self.last_good = step
        else:
            self.not_finite += 1
            self.reason = self._culprit(verdict)
        self.rescale(step, verdict)

    def rescale(self, step: int, verdict: Verdict) -> None:
        """Let the loss scale follow the verdict of step number `step`.

        TrainingError on all ranks once the smallest scale has failed too often.
        """
        scale = self._parts.loss_scale
        scale.update(finite=verdict.finite, loss_is_finite=math.isfinite(verdict.loss))
        if scale.skipped_at_floor == 0:
            self.first_bad = None
        elif self.first_bad is None:
            self.first_bad = FirstBad(step=step, what=self._culprit(verdict))
        if not scale.exhausted:
            return
        first = self.first_bad
        assert first is not None, "patience is 1 or more"
        raise self._given_up(
            f"step {first.step}: {first.what}, and no step could update for {scale.patience} in a "
            f"row, up to step {step} (loss_scale.patience)"
        )

    def _record_spike(self, spike: Spike) -> None:
        """Count a step that is skipped for a spike; TrainingError after too many in a row."""
        patience = self._settings.patience
        if self.spikes.in_a_row >= patience:
            raise self._given_up(
                f"step {spike.step}: {spike}, and {patience} steps in a row were skipped for that "
                "(spikes.patience)"
            )
        self.reason = str(spike)
        self.spiked += 1

    def _given_up(self, why: str) -> TrainingError:
        """The error of a run whose steps do not update any more.

        It names the newest checkpoint whose weights a step has trained on, if there is one: a later
        one may hold ruined weights, so that a run that goes on from it would end again at once.
        """
        mend, run = "lower optimizer.learning_rate, or look at the data", self._parts.run_dir
        steps = [] if run is None else saved_steps(run / CHECKPOINTS)
        before = next((step for step in steps if step < self.last_good), None)
        if before is not None:
            mend += (
                f"; weights were good up to step {before}: axsparse checkpoint prune {run} --after "
                f"{before}, then --resume auto"
            )
        return everywhere(TrainingError(f"{why}; {mend}"))

    def _culprit(self, verdict: Verdict) -> str:
        """The rank, stage and replica whose loss or gradient is not finite, and which tensor's.

        A loss that is not finite spoils all gradients, so gradients are named only where every
        loss is finite. Where the gradients of each replica are finite by themselves, their sum
        is too large for its type, and the stage is named instead of a rank.
        """
        parts = self._parts
        grid = parts.place.grid
        if verdict.bad_loss is not None:
            rank = grid.rank(grid.g_inter - 1, verdict.bad_loss)
            return f"{grid.place(rank)}: the loss is not finite"
        assert verdict.culprit is not None, "a loss or a gradient is not finite"
        stage = parts.run.stage_of(verdict.culprit)
        shard = int(verdict.culprit.rpartition("#")[2]) if "#" in verdict.culprit else 0
        column = grid.column(stage, shard)
        # A single replica sums nothing, so that its gradients are looked at only once.
        bad = [rank for rank in column if rank in verdict.bad_ranks or len(column) == 1]
        where = str(grid.place(bad[0])) if bad else f"stage {stage}, summed"
        text = f"{where}: the gradient of {verdict.culprit} is not finite"
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:LONGEST_REASON]

    def summary(self) -> list[str]:
        """What the end of a run says of its skipped steps; empty if there were none."""
        said = []
        if self.not_finite:
            said.append(f"{self.not_finite} skipped with numbers that were not finite")
        if self.spiked:
            said.append(f"{self.spiked} skipped for a spike of the loss")
        return said
