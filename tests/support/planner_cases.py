"""A cluster of round numbers, the study's GPTs, costs by hand, and a profile of four layers.

Stages of the study's GPTs have the same share of everything, fractions of layers included.
Embedding and head are shared out as well: a head of 50,304 words would double the time of a stage
of one or two layers. Bytes of state are the paper's, with gradients in both precisions and a copy
of the weights: 20 a parameter dense, 2 + 24 f pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, astuple, dataclass, fields, replace
from functools import partial
from operator import mul
from typing import Any

import torch
from support.cases import merged
from support.runs import tiny_config, tiny_gpt

from axsparse.config.load import configure
from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config, num_microbatches
from axsparse.models.layer import Model
from axsparse.models.layer_cost import Activations
from axsparse.models.model_profile import LayerInfo, ModelProfile, ParameterInfo, profile
from axsparse.pipeline.policy import Schedule, ScheduleName
from axsparse.planner.auto_layout import configured_schedule
from axsparse.planner.cluster import Cluster, Precision, load_cluster
from axsparse.planner.layout_search import Layout, Plan, SearchRequest, plan
from axsparse.planner.profiled_model import ProfiledModel, state_format
from axsparse.planner.stage_memory import Fits, StageLoad, value_bytes
from axsparse.planner.step_cost import StageSeconds, StepCosts
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.precision import DTYPES
from axsparse.samo.state_bytes import StateBytes, StateFormat, TensorSize, stage_bytes, tensor_bytes
from axsparse.tensor_parallel.dry_run import profile_of_tp_shard
from axsparse.training.trainer import Trainer

SUMMIT = load_cluster("summit")


def cluster(**constants: Any) -> Cluster:
    """Summit but for some constants."""
    return replace(SUMMIT, **constants)


def formula(config: str, density: float = 1.0) -> GptFormula:
    """A bundled GPT as formulas."""
    loaded = configure(config)
    model = of_family(loaded.model, GptConfig)
    return GptFormula(
        config=loaded,
        profile=ModelProfile([], ties={}),
        kept={},
        optimizer=ADAMW,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        sequence=model.sequence_length,
        vocabulary=model.vocab_size,
        density=density,
    )


def load_of(**sizes: Any) -> StageLoad:
    """A load of these sizes, and of 0 for all others."""
    zero = {each.name: 0 for each in fields(StageLoad) if each.default is MISSING}
    return StageLoad(**{**zero, "layers": "", "state": StateBytes(), **sizes})


def uniform(
    g_inter: int,
    forward: float,
    backward: float,
    *,
    message: float = 0.0,
    all_reduce: float = 0.0,
    optimizer: float = 0.0,
    compress: float = 0.0,
) -> StepCosts:
    """Equal stages."""
    return StepCosts(
        stages=[StageSeconds(forward, backward, compress)] * g_inter,
        messages=[message] * (g_inter - 1),
        all_reduce=[all_reduce] * g_inter,
        optimizer=[optimizer] * g_inter,
    )


def schedule(name: ScheduleName = "message-driven", extra_in_flight: int = 1) -> Schedule:
    return Schedule(name, extra_in_flight)


def planned(config: str, density: float = 1.0, machine: Cluster = SUMMIT, **request: Any) -> Plan:
    """The plan of a bundled GPT, with full backwards and all memory of a device by default."""
    request = {
        **{"split_backward": False, "rank_budget": machine.memory_bytes},
        **request,
    }
    return plan(SearchRequest(model=formula(config, density), cluster=machine, **request))


def layer(name: str, rows: int, flops: float, saved: int = 100) -> LayerInfo:
    return LayerInfo(
        name,
        "block",
        (
            ParameterInfo(f"{name}.weight", (rows, 10), trained=True),
            ParameterInfo(f"{name}.frozen", (7,), trained=False),
        ),
        flops,
        activations=Activations(inputs=20, saved=saved, outputs=30, widest=50),
    )


FOUR_LAYERS = ModelProfile(
    [layer("a", 10, 1e3), layer("b", 40, 4e3, 700), layer("c", 20, 2e3), layer("d", 10, 3e3)],
    ties={},
)
KEPT = {"b.weight": 40, "c.weight": 20}
SETTINGS = {
    "precision": "bf16",
    "samo": {"gradient": "fp32", "index": "int32"},
    "pipeline": {"checkpoint_activations": 1},
}


def profiled(
    profile: ModelProfile = FOUR_LAYERS, kept: dict[str, int] | None = None, **sections: Any
) -> ProfiledModel:
    """The model of a profile, with some settings."""
    config = tiny_config(**merged(SETTINGS, sections))
    return ProfiledModel(config, profile, KEPT if kept is None else kept, ADAMW)


def unpruned(config: Config, info: ModelProfile | None = None, **facts: Any) -> ProfiledModel:
    """The dense GPT of a configuration, or another profile of it."""
    model = tiny_gpt(config)
    info = info or profile(model, DTYPES[config.precision])
    return ProfiledModel(config.named("tiny"), info, {}, ADAMW, model, **facts)


def of_three_axes(
    room: float,
    gpus: int = 8,
    g_tensor: int = 1,
    *,
    global_batch_size: int = 8,
    stages: Sequence[int] | None = None,
    **constants: Any,
) -> Plan:
    """The plan of a GPT of four heads in so many bytes a device."""
    subject = unpruned(tiny_config(model={"num_heads": 4}, samo={"enabled": False}))
    machine = cluster(**{"peak_fp32": 1e9, "overhead_bytes": 0.0, "gpus_per_node": 8} | constants)
    return plan(
        SearchRequest(
            model=subject,
            cluster=machine,
            gpus=gpus,
            global_batch_size=global_batch_size,
            g_inter=stages,
            g_tensor=g_tensor,
            schedules=[schedule(extra_in_flight=0)],
            split_backward=False,
            microbatch_sizes=[1],
            rank_budget=room,
        )
    )


def planned_bytes(trainer: Trainer, model: Model) -> tuple[int, int]:
    """By formula: the state of a rank, given how many entries its masks keep of each tensor, and
    the bytes that it sends to the other tensor-parallel ranks of its stage in a step."""
    run, coords = trainer.plan, trainer.coords
    grid, config = coords.grid, run.config
    tp_rank = Grid(1, 1, grid.g_tensor).coords(coords.tp_rank)
    here = profile_of_tp_shard(model, profile(model, run.dtype), tp_rank, run.dtype)
    tensors = [tensor for layer in trainer.layers for tensor in layer.state.tensors]
    kept = {here.ties.get(tensor.name, tensor.name): tensor.kept for tensor in tensors}
    microbatches = num_microbatches(config.batch, grid.g_data)
    loads = ProfiledModel(config, here, kept, run.optimizer).stages(
        grid.g_inter, grid.g_data, microbatches=microbatches
    )
    assert loads is not None
    load = loads[coords.stage]
    assert load.numbers == run.stages[coords.stage]
    stored = state_format(config, run.optimizer, grid.g_data)
    layers = [here.layers[number] for number in load.numbers]
    state = stage_bytes(layers, here.ties, kept, stored, coords.replica)
    schedule = configured_schedule(config.pipeline)
    layout = Layout(grid, schedule, config.batch.microbatch_size, microbatches)
    return state.total, layout.sum_bytes(load)


GRADIENT_BYTES = 2 + 4
"""Bytes of a gradient entry: ∇θ16 and ∇θ32 (section III-D)."""
COPY_BYTES = 2
"""Bytes a kept entry of the compressed half weights that are made when masters become weights
(section III-C)."""


@dataclass(frozen=True, kw_only=True)
class GptFormula(ProfiledModel):
    """A GPT with activation recomputation, trained by AdamW in mixed precision."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    density: float = 1.0
    """f: the fraction of the blocks' matrices that is kept; embeddings and head stay dense."""

    @property
    def precision(self) -> Precision:
        return "fp16"

    @property
    def recomputes(self) -> bool:
        return True

    @property
    def is_pruned(self) -> bool:
        return self.density < 1

    @property
    def most_stages(self) -> int:
        """A block can be cut between its two halves, attention and MLP."""
        return 2 * self.layers

    @property
    def body_flops(self) -> float:
        """Flops of a sample's forward through the blocks."""
        s, h = self.sequence, self.hidden
        return 24.0 * s * h**2 * (1 + s / (6 * h)) * self.layers

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.vocabulary * self.hidden

    @property
    def sample_flops(self) -> float:
        """Flops of a sample with recomputation (Narayanan et al., 2021):

        F / B = 96 · s · l · h² · (1 + s / 6h + V / 16 l h)
        """
        return 4 * self.body_flops + 3 * self.head_flops

    @property
    def body_params(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def embedding_params(self) -> int:
        """Embeddings of words, whose weight is the head's as well, and of positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def num_params(self) -> int:
        return self.body_params + self.embedding_params

    def tp_shard(self, g_tensor: int) -> GptFormula:
        """Layers are not sharded."""
        assert g_tensor == 1
        return self

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        """Loads are equal but for the loss. `g_data` and `microbatches` change
        nothing: nothing is sharded, and gradients always add up in fp32."""
        assert g_data >= 1 and microbatches >= 1
        loads = [self._stage(stage, g_inter) for stage in range(g_inter)]
        if fits is not None and not all(map(fits, range(g_inter), loads)):
            return None
        return loads

    def _stage(self, stage: int, g_inter: int) -> StageLoad:
        s, h, width = self.sequence, self.hidden, value_bytes(self.precision)
        body = self.body_flops / g_inter
        kept = round(self.density * self.body_params) + self.embedding_params
        widest = max(12 * h**2, self.vocabulary * h)
        copies = COPY_BYTES * kept / g_inter + width * widest if self.is_pruned else 0.0
        number = self.layers / g_inter
        return StageLoad(
            layers=f"{number:g} blocks",
            flops=body + self.head_flops / g_inter,
            moved=0.0,
            again_flops=body,
            again_moved=0.0,
            trained=self.num_params // g_inter,
            kept=kept // g_inter,
            state=self._state(g_inter),
            temporary=copies,
            building=0.0,  # the state is built and saved in the host's memory, not the GPU's
            saved=0.0,
            held=number * width * s * h,
            working=s * (34 * h + 5 * self.heads * s),
            loss_bytes=partial(mul, 6.0 * s * self.vocabulary * (stage == g_inter - 1)),
            outputs=float(width * s * h),
            # Four matrices of a block read 7 h values a token and write 9 h.
            deferred=number * width * s * 16 * h,
            weight_flops=24.0 * s * h**2 * number,
        )

    def _state(self, g_inter: int) -> StateBytes:
        """A stage's share of the state; a tied weight on two stages has its state twice."""
        words = self.vocabulary * self.hidden
        kept = round(self.density * self.body_params)
        sizes = [
            *[TensorSize(self.body_params // self.layers, kept // self.layers)] * self.layers,
            TensorSize(self.embedding_params, self.embedding_params),
            TensorSize(words, words, is_alias=g_inter == 1),
        ]
        stored = StateFormat(DTYPES[self.precision], torch.float32, ADAMW.moments)
        whole = sum((tensor_bytes(size, stored) for size in sizes), StateBytes())
        whole = replace(whole, gradient=whole.gradient * GRADIENT_BYTES // 4)
        return StateBytes(*(-(-part // g_inter) for part in astuple(whole)))
