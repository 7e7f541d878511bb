"""Reads files of published runs: sizes, layout, batch, training, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from axsparse.config.section import FromList, Rate, Section
from axsparse.config.yaml_dialect import YamlLoader
from axsparse.planner.cluster import Precision
from axsparse.runtime.errors import ConfigError, MissingInputError
from published.transformer import Family, Recompute

TABLES = Path(__file__).parent / "tables"
"""The folder of the bundled tables."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=10**9)]
MOST_SIMULATED = 2_000_000
"""Microbatches of a replica times pieces of the model: more take minutes to simulate."""


class ModelSizes(Section):
    """A decoder-only transformer."""

    family: Family = "gpt"
    num_layers: Size
    hidden_size: Size
    num_heads: Size
    vocab_size: Size
    sequence_length: Size
    tie_embeddings: bool | None = None
    """null: tied for gpt, not for llama."""
    num_kv_heads: Size | None = None
    """null: as many as heads."""
    intermediate_size: Size | None = None
    """null: 4 h for gpt; 8/3 h, rounded up to a multiple of 256, for llama."""
    head_dim: Size | None = None
    """null: hidden_size / num_heads."""


class RunLayout(Section):
    """How the devices share the work; there are data × tensor × pipeline of them."""

    data: Size = 1
    tensor: Size = 1
    pipeline: Size = 1
    chunks: Size = 1
    """Pieces of the model on each stage, for Megatron's interleaved schedule."""
    split: Literal["even", "balanced", "fractions"] | Annotated[tuple[int, ...], FromList] = "even"
    """`even`: equal numbers of blocks, the first and last pieces fewer where it does not divide;
    `balanced`: by cost; `fractions`: equal work, parts of blocks allowed; or the number of blocks
    of each piece, in the order of the model."""
    order: Literal["tensor-data-pipeline", "tensor-pipeline-data"] | None = None
    """Which neighbours in rank are near each other, nearest first; null: Megatron's
    tensor-data-pipeline, and axsparse's tensor-pipeline-data for the message-driven schedule."""


class RunBatch(Section):
    """Sequences of a step, over all replicas, and of a microbatch."""

    global_: Annotated[int, Field(ge=1, le=10**9, alias="global")]
    micro: Size = 1


class RunTraining(Section):
    """How the run trained."""

    precision: Precision = "fp16"
    gradients: Precision | None = None
    """The precision in which gradients are reduced; null: fp32 for bf16, else `precision`."""
    recompute: Recompute = "none"
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """1: masters and moments are sharded over the replicas; 2: gradients, too; 3: weights, too,
    which are gathered for every forward and backward."""
    schedule: Literal["1f1b", "gpipe", "message-driven"] = "1f1b"
    sparsity: Rate = 0.0
    """Of the blocks' matrices, with SAMO's compressed state."""
    attention: Literal["fused", "standard"] | None = None
    """Whether scores are stored; null: fused for llama, else what the cluster's software had."""
    sequence_parallel: bool | None = None
    """Whether norms and dropouts are divided over the tensor group; null: with fused attention and
    with selective recomputation."""
    slack: Annotated[int, Field(ge=0)] | None = None
    """message-driven: activations in flight beyond the stages; null: 1."""


class Profiled(Section):
    """Measured seconds of a microbatch on a middle stage, in the place of predicted ones."""

    forward: Positive
    backward: Positive
    """Both halves of a backward together."""
    message: Annotated[float, Field(ge=0.0)] = 0.0
    """Sending one microbatch to a neighbour."""


class Published(Section):
    """What the run was reported to reach."""

    seconds_per_step: Positive | None = None
    samples_per_second: Positive | None = None
    """Over all devices."""
    tokens_per_second_per_gpu: Positive | None = None
    tflops_per_gpu: Positive | None = None
    flops: Literal["megatron", "model"] | None = None
    """How TFLOP/s were counted; null: megatron if all is recomputed, else model."""
    memory_gb: Positive | None = None
    fits: bool | None = None


class RunRow(Section):
    """One published run."""

    name: str
    model: ModelSizes
    layout: RunLayout = RunLayout()
    batch: RunBatch
    training: RunTraining = RunTraining()
    profiled: Profiled | None = None
    fit: bool = False
    published: Published = Published()

    @property
    def devices(self) -> int:
        return self.layout.data * self.layout.tensor * self.layout.pipeline

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.batch.global_ // (self.layout.data * self.batch.micro)


class _File(Section):
    cluster: str = "selene-a100"
    source: str = ""
    rows: list[RunRow]


@dataclass(frozen=True)
class RunFile:
    """A file of published runs."""

    name: str
    cluster: str
    """A bundled cluster's name, or a file: of a relative one, beside this file or from here."""
    source: str
    """Where the figures were published."""
    rows: Sequence[RunRow]


def bundled_tables() -> list[Path]:
    """The bundled files of published runs."""
    return sorted(TABLES.glob("*.yaml"))


def load_runs(path: Path) -> RunFile:
    """Read a file of runs.

    MissingInputError if it cannot be read, ConfigError in one line for anything in it that is
    unknown, missing or impossible.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MissingInputError(
            f"runs {str(path)!r}: cannot be read ({error.strerror}); name a readable YAML file"
        ) from None
    try:
        given = yaml.load(text, Loader=YamlLoader)  # noqa: S506 - it makes plain values only
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path.name}: not YAML: {problem}; correct it there") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path.name}: no mapping; write `cluster:` and `rows:`")
    try:
        found = _File.model_validate(given)
    except ValidationError as error:
        raise _refusal(path.name, given, error) from None
    if not found.rows:
        raise ConfigError(f"{path.name}: rows is empty; give at least one run")
    for row in found.rows:
        _check(path.name, row)
    return RunFile(path.stem, found.cluster, found.source, found.rows)


def _check(file: str, row: RunRow) -> None:
    """ConfigError for a run that cannot have been."""
    here, layout, model = f"{file}: row {row.name!r}", row.layout, row.model
    share = layout.data * row.batch.micro
    if row.batch.global_ % share:
        raise ConfigError(
            f"{here}: {layout.data} replicas with microbatches of {row.batch.micro} do not divide "
            f"a batch of {row.batch.global_}; correct layout.data, batch.micro or batch.global"
        )
    pieces = layout.pipeline * layout.chunks
    if row.microbatches * pieces > MOST_SIMULATED:
        raise ConfigError(
            f"{here}: {row.microbatches} microbatches in {pieces} pieces (pipeline × chunks) are "
            f"more than the {MOST_SIMULATED} that are simulated; correct batch.global, batch.micro "
            "or layout"
        )
    if isinstance(layout.split, tuple):
        if len(layout.split) != pieces or sum(layout.split) != model.num_layers:
            raise ConfigError(
                f"{here}: layout.split has {len(layout.split)} numbers whose sum is "
                f"{sum(layout.split)}; give {pieces} (pipeline × chunks) whose sum is "
                f"{model.num_layers} (num_layers)"
            )
        if min(layout.split) < 0:
            raise ConfigError(f"{here}: layout.split has a negative number; give blocks")
    elif layout.split != "fractions" and pieces > model.num_layers + 2:
        raise ConfigError(
            f"{here}: {model.num_layers} blocks cannot fill {pieces} pieces (pipeline × chunks); "
            "take fewer"
        )
    if row.fit and not any(
        getattr(row.published, name)
        for name in (
            "seconds_per_step",
            "samples_per_second",
            "tokens_per_second_per_gpu",
            "tflops_per_gpu",
        )
    ):
        raise ConfigError(
            f"{here}: fit is true, but published has no time to fit; give seconds_per_step, "
            "samples_per_second, tokens_per_second_per_gpu or tflops_per_gpu"
        )
    if layout.chunks > 1 and row.training.schedule != "1f1b":
        raise ConfigError(
            f"{here}: layout.chunks {layout.chunks} with schedule {row.training.schedule}; only "
            "1f1b is interleaved"
        )
    _check_heads(here, row)


def _check_heads(here: str, row: RunRow) -> None:
    """ConfigError for heads that nobody can divide so."""
    model = row.model
    if model.num_heads % row.layout.tensor:
        raise ConfigError(
            f"{here}: layout.tensor {row.layout.tensor} does not divide num_heads "
            f"{model.num_heads}; choose a divisor"
        )
    heads = model.num_heads if model.num_kv_heads is None else model.num_kv_heads
    if model.num_heads % heads:
        raise ConfigError(
            f"{here}: num_kv_heads {heads} does not divide num_heads {model.num_heads}; "
            "choose a divisor"
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        raise ConfigError(
            f"{here}: num_heads {model.num_heads} does not divide hidden_size "
            f"{model.hidden_size}; correct one, or give head_dim"
        )


def _refusal(file: str, given: Mapping[Any, Any], error: ValidationError) -> ConfigError:
    """The first mistake of a file in one line, by the names of its row and its key."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"]]
    if len(place) > 1 and place[0] == "rows":
        row = given["rows"][int(place[1])]
        name = row.get("name") if isinstance(row, dict) else None
        file = f"{file}: row {int(place[1]) + 1 if name is None else repr(name)}"
        place = place[2:]
    return ConfigError(f"{file}: {'.'.join(place) or 'it'}: {problem['msg']}; correct it")
