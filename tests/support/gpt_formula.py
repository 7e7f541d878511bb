"""The paper's GPTs as formulas: what each stage computes and holds, from the hyper-parameters.

Every stage has the same share of everything, fractions of layers included. Embedding and head are
shared out as well: a head of 50,304 words would double the time of a stage of one or two layers.
Bytes of state are the paper's, with gradients in both precisions and a copy of the weights: 20 a
parameter dense, 2 + 24 f pruned. `ProfiledModel` has real layers instead, and
`published` the layers of any transformer by formula.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial
from operator import mul

from axsparse.planner.cluster import Precision
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import Fits, StageLoad, value_bytes
from axsparse.samo.state_bytes import StateBytes, StateFormat, TensorSize, tensor_bytes

GRADIENT_BYTES = 2 + 4
"""Bytes of a gradient entry: ∇θ16 and ∇θ32 (section III-D)."""
COPY_BYTES = 2
"""Bytes a kept entry of the compressed half weights that are made when masters become weights
(section III-C)."""
MOMENTS = 2
"""Moments of AdamW."""


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
            TensorSize(self.body_params, kept),
            TensorSize(self.embedding_params, self.embedding_params),
            TensorSize(words, words, is_alias=g_inter == 1),
        ]
        stored = StateFormat(
            half=self.precision != "fp32", gradient_bytes=GRADIENT_BYTES, moments=MOMENTS
        )
        whole = StateBytes.sum(tensor_bytes(size, stored) for size in sizes)
        return StateBytes(*(-(-part // g_inter) for part in astuple(whole)))
