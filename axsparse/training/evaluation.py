"""Evaluates a model on validation batches; the results are the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from axsparse.data.batches import Batches, Prefetcher
from axsparse.pipeline.engine import Engine
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import DataError, everywhere
from axsparse.runtime.exchange import exact_sum, sum_by_owner
from axsparse.runtime.grid import RankCoords
from axsparse.samo.backend import to_host


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, the same on all ranks."""

    loss: float
    """Mean loss of a target."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The fraction of the targets that each of the model's metrics counted, by its name."""
    samples: int = 0
    """How many samples of the validation data it was made on."""
    available: int = 0
    """How many samples the validation data has."""


# Reason: the engine and its data, the ranks that take part, and the callback for progress.
def evaluate(
    engine: Engine,
    batches: Batches,
    number: int | Literal["all"],
    metrics: Sequence[str],
    *,
    transport: Transport,
    coords: RankCoords,
    after_batch: Callable[[int, int], object] = lambda _done, _wanted: None,
) -> Evaluation:
    """Evaluate the first `number` validation batches, or all of them.

    `after_batch` is called with how many batches are done and how many are wanted.

    All ranks call this together. Only forward passes are run. Losses of entire microbatches, which
    no layout divides, are added exactly and rounded once, so that their order does not matter.
    `metrics` names the model's metrics. DataError on all ranks if no target counts.
    """
    available = batches.num_evaluation_batches
    asked = available if number == "all" else min(number, available)
    losses: list[float] = []
    counts = [0.0] * len(metrics)
    targets = 0.0
    with Prefetcher(batches.evaluation, first_step=0, end=asked) as prefetcher:
        for step in range(asked):
            batch = prefetcher.get(step)
            for loss, *counted in (row.tolist() for row in to_host(engine.evaluate(batch))):
                if coords.tp_rank:  # all tensor-parallel ranks of the last stage have the same
                    continue
                losses.append(loss)
                counts = [total + count for total, count in zip(counts, counted, strict=True)]
            if coords.is_last and coords.tp_rank == 0:
                targets += batch.num_targets
            after_batch(step + 1, asked)
    rows = sum_by_owner(transport.world, transport.backoff, [*exact_sum(losses), targets, *counts])
    sums, remainders, *columns = (list(column) for column in zip(*rows, strict=True))
    total_targets, *totals = map(sum, columns)
    if not total_targets:
        raise everywhere(DataError("data: none of the samples of an evaluation has a target"))
    loss, _ = exact_sum([*sums, *remainders])
    return Evaluation(
        loss / total_targets,
        {name: total / total_targets for name, total in zip(metrics, totals, strict=True)},
        samples=min(asked * batches.global_batch_size, batches.num_samples),
        available=batches.num_samples,
    )
