"""Reads files of published runs: sizes, layout, batch, training, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from axsparse.config.load import YamlLoader
from axsparse.config.section import FromList, Rate, Section
from axsparse.planner.cluster import Precision
from published.transformer import Family, Recompute

TABLES = Path(__file__).parent / "tables"
"""The folder of the bundled tables."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=10**9)]


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
    """Whether scores are stored; null: fused for llama alone, as Megatron-LM of 2021 and 2022
    stored them."""
    sequence_parallel: bool | None = None
    """Whether norms and dropouts are divided over the tensor group; null: with fused attention and
    with selective recomputation."""
    extra_in_flight: Annotated[int, Field(ge=0)] | None = None
    """message-driven: activations in flight beyond the stages; null: 1."""


class Profiled(Section):
    """Measured seconds of a microbatch on a middle stage, in the place of predicted ones."""

    forward: Positive
    backward: Positive
    """Both halves of a backward together."""
    message: Annotated[float, Field(ge=0.0)] = 0.0
    """Sending one microbatch to a neighbour."""


class Published(Section):
    """The reported results of the run."""

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
    """Whether `constants` were fitted to this run, so that it says nothing of predictions."""
    published: Published = Published()

    @property
    def devices(self) -> int:
        return self.layout.data * self.layout.tensor * self.layout.pipeline

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.batch.global_ // (self.layout.data * self.batch.micro)


class RunFile(Section):
    """A file of published runs."""

    name: str = ""
    """The stem of the file."""
    cluster: str = "selene-a100"
    """A bundled cluster's name, or a cluster file."""
    source: str = ""
    """Where the figures were published."""
    constants: Mapping[Literal["efficiency", "traffic", "nic_efficiency"], Positive] = Field(
        default_factory=dict
    )
    """Constants that replace the cluster's: fitted to the rows marked `fit`."""
    training: RunTraining = RunTraining()
    """How the rows trained that do not say it."""
    rows: Annotated[list[RunRow], Field(min_length=1)]


def bundled_tables() -> list[Path]:
    """The bundled files of published runs."""
    return sorted(TABLES.glob("*.yaml"))


def load_runs(path: Path) -> RunFile:
    """Read a file of runs; OSError or ValueError for one that cannot be read."""
    given = yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)  # noqa: S506 - plain values
    runs = RunFile.model_validate(given)
    rows = [
        row
        if "training" in row.model_fields_set
        else row.model_copy(update={"training": runs.training})
        for row in runs.rows
    ]
    return runs.model_copy(update={"name": path.stem, "rows": rows})
