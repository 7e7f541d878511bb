"""Plans for a configured model: profile it, find its pruned tensors, and search the layouts.

This is what `axsparse plan` and `ax.plan_for` call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from axsparse.config.schema import Config
from axsparse.config.validate import check_config, check_offload
from axsparse.models.layer import Model, check_model
from axsparse.models.model_profile import profile
from axsparse.models.teacher import with_teacher
from axsparse.models.zoo.model_registry import model_without_weights
from axsparse.planner.auto_layout import has_costs, resolve_grid, run_request
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout_search import NoLayoutError, Plan, plan
from axsparse.planner.profiled_model import ProfiledModel, copied_bytes
from axsparse.planner.stage_memory import gigabytes, memory_budget
from axsparse.planner.what_fits import DoesNotFitError, fewest_devices, least_memory
from axsparse.pruning.criteria import Score, configured_criterion
from axsparse.pruning.targets import Targets, kept_at_start, starts_pruned, what_is_pruned
from axsparse.runtime.errors import ConfigError, check_kind, check_kinds
from axsparse.samo.optim.update import optimizer_of
from axsparse.samo.precision import DTYPES

Method = Literal["start", "dense", "samo"]
"""`start`: as the run begins, which is dense if masks are found later; `dense`: without pruning;
`samo`: with as many kept entries as the run ends with."""
BATCH, MICROBATCH = "batch.global_batch_size", "batch.microbatch_size"
RECOMPUTED = "pipeline.checkpoint_activations"
"""Settings that a plan chooses where nobody has set them."""


@dataclass(frozen=True)
class PlannedModel:
    """A configured model that has been profiled, ready to be planned."""

    dense: ProfiledModel
    """The model without pruning."""
    targets: Targets | None
    notes: Sequence[str]

    @property
    def config(self) -> Config:
        return self.dense.config

    def profiled(self, method: Method) -> ProfiledModel:
        """The trained model; ConfigError for `samo` if nothing is pruned."""
        if method == "dense" or (
            method == "start" and not starts_pruned(self.config, self.targets)
        ):
            return self.dense
        if self.targets is None:
            raise ConfigError(
                f"{self.config.where('pruning.sparsity')}: nothing is pruned, so that there is no "
                "SAMO to compare with; set it above 0 (and samo.enabled to true)"
            )
        kept = kept_at_start(self.config, self.targets) if method == "start" else None
        return replace(self.dense, kept=kept or self.targets.kept())

    def rank_budget(self, cluster: Cluster) -> float:
        limit = self.config.layout.memory_per_rank
        budget = memory_budget(
            cluster.memory_bytes,
            cluster.overhead_bytes,
            on_host=self.dense.on_host,
            limit=None if limit == "auto" else limit * 1e9,
        )
        return budget.nbytes

    def batch(self, gpus: int) -> int:
        """Samples of a step: the configuration's batch; if unset, at least one for each device."""
        batch = self.config.batch.global_batch_size
        return batch if BATCH in self.config.origins else max(batch, gpus)

    def plan(
        self,
        method: Method,
        cluster: Cluster,
        gpus: int,
        microbatch_sizes: Sequence[int] | None = None,
    ) -> Plan:
        """The plan; DoesNotFitError if nothing fits, which names a sufficient memory and number of
        devices.

        Where nothing fits and `pipeline.checkpoint_activations` is unset, activations are
        recomputed.
        """
        own = self.config
        for tried in self._tried(gpus):
            model, budget = tried.profiled(method), tried.rank_budget(cluster)
            request = replace(
                run_request(model, cluster, gpus, tried._stages(gpus), budget),
                microbatch_sizes=microbatch_sizes,
                usual_size=own.batch.microbatch_size if MICROBATCH in own.origins else None,
            )
            try:
                found = plan(request)
            except NoLayoutError as error:
                failed = error
                continue
            before, after = own.by_key(), tried.config.by_key()
            return replace(
                found, taken={key: after[key] for key in after if after[key] != before[key]}
            )
        # The least memory is that of weights which are sparse at rest, where that is open.
        *_, model = request.model, *request.others.values()
        request = replace(request, model=model, others={})
        least = least_memory(request)
        if least is None:
            raise failed
        fewest = fewest_devices(request) if own.layout.g_data == "auto" else None
        raise DoesNotFitError(request, failed.rejected, least, fewest) from None

    def _tried(self, gpus: int) -> Iterator[PlannedModel]:
        """This model with a batch for this many devices; then also with activations recomputed."""
        changes: dict[str, object] = {BATCH: self.batch(gpus)}
        yield replace(self, dense=self.dense.with_values(changes))
        if not (RECOMPUTED in self.config.origins or self.dense.recomputes):
            changes[RECOMPUTED] = 1
            yield replace(self, dense=self.dense.with_values(changes))

    def _stages(self, gpus: int) -> list[int] | None:
        """The numbers of stages that the configuration allows; None: all. ConfigError if the
        layout that it gives does not divide the devices."""
        config, layout = self.config, self.config.layout
        self.dense.shards(layout.g_tensor, gpus)
        grid = resolve_grid(config, gpus, self.dense.most_stages, way="plan for {}")
        is_open = layout.g_inter == layout.g_data == layout.split == "auto"
        return None if is_open else [grid.g_inter]


def planned_model(
    config: Config, cluster: Cluster, model: Model | None = None, score: Score | None = None
) -> PlannedModel:
    """Profile the model of a configuration, or another one, for a plan on this cluster.

    Weights are not read. `score` is a criterion of the user's own. ConfigError for a configuration
    that no run could have, for a model whose layers' costs are not known, and for a score that the
    pruning method cannot use.
    """
    check_config(config)
    config, notes = _in_a_precision_of(cluster, config)
    if model is None:
        model = model_without_weights(config)
    model = with_teacher(model, config, reads_weights=False)
    profiled = profile(model, DTYPES[config.precision])
    if not has_costs(profiled):
        raise ConfigError(
            f"model {model.name}: it has no example, so that nobody knows what its layers compute; "
            "give ax.from_sequential or ax.Model example=…"
        )
    targets = what_is_pruned(config, profiled)
    notes += _notes(config, cluster, targets, score)
    criterion = None if score is None else configured_criterion(config, score)
    check_offload(config, has_gpu=cluster.host_bandwidth is not None)
    dense = ProfiledModel(
        config,
        profiled,
        {},
        optimizer_of(config.optimizer),
        model,
        on_host=cluster.is_of_hosts,
        sees_inputs=criterion is not None and criterion.sees_inputs,
        sees_gradients=criterion is not None and criterion.sees_gradients,
    )
    return PlannedModel(dense, targets, notes)


def _notes(
    config: Config, cluster: Cluster, targets: Targets | None, score: Score | None
) -> Iterator[str]:
    pruning = config.pruning
    if targets is not None and not starts_pruned(config, targets):
        yield (
            f"{pruning.method} starts dense, and so it has to fit; --compare dense,samo shows what "
            "the pruned part would need"
        )
    if config.samo.zero_stage == "auto":
        yield (
            "samo.zero_stage: auto: where there are several replicas, they share masters and "
            "moments, and gather sparse weights where nothing else fits"
        )
    if config.samo.weights == "auto" and targets is not None:
        yield (
            "samo.weights: auto: pruned weights are dense at rest where a number of stages fits so"
        )
    if pruning.method == "custom" and score is None:
        yield (
            "custom: a score that takes inputs or gradient needs memory while it draws masks; "
            "ax.plan_for(…, score=…) counts it"
        )
    if cluster.host_memory_bytes is not None:
        yield (
            f"of the host's {gigabytes(cluster.host_memory_bytes)} GB a rank takes up to "
            f"{gigabytes(copied_bytes(config))} GB for copies of checkpoints, "
            "and messages under way where they go through it"
        )


# Reason: these are the arguments of the Python API, all but the first three optional.
def plan_for(
    model: Model,
    cluster: Cluster | str,
    gpus: int,
    config: Config | None = None,
    *,
    method: Method = "start",
    score: Score | None = None,
) -> Plan:
    """The layouts in which a model can train on `gpus` devices: the recommended one, and all
    others.

    `cluster` is a bundled cluster's name, a file, or a `Cluster`; `config` has everything else
    (default: `Config()`). `score` is the criterion that draws masks, so that its memory is counted.
    Needs no device and no MPI. ConfigError if nothing fits, MissingInputError for an unknown
    cluster.
    """
    check_model("plan_for", model)
    check_kind("plan_for: config", config, Config | None, "make one by ax.configure")
    check_kind("plan_for: cluster", cluster, Cluster | str, "give the name or file of one")
    check_kinds("plan_for", locals(), gpus="whole number")
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    named = (config or Config()).named(model.name)
    return planned_model(named, found, model, score).plan(method, found, gpus)


def _in_a_precision_of(cluster: Cluster, config: Config) -> tuple[Config, list[str]]:
    """Decide `precision: auto`: bf16, or with a note fp16 or fp32 on devices that have no units
    for it, as training decides on a CPU."""
    if config.precision != "auto":
        return config, []
    half = {"bf16": cluster.peak_bf16, "fp16": cluster.peak_fp16}
    least = cluster.peak_fp32 or 0.0
    found = next((name for name, peak in half.items() if (peak or 0.0) > least), "fp32")
    note = f"{cluster.name} has no units for bf16: planned as precision={found}"
    return config.decided({"precision": found}), [] if found == "bf16" else [note]
