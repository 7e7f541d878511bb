"""The GPTs of the paper as formulas: hyper-parameters in, what a stage takes out.

The split is even, finer than layers: embedding and head are spread like everything else,
since a head of 50,304 words on a stage of one or two layers would double its time. Bytes
of state are the paper's, with gradients in both precisions and a copy of the weights:
20 a parameter dense, 2 + 24 f pruned. For layers as they are, survey the model.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from axsparse.planner.cluster import Precision
from axsparse.planner.workload import Fits, StageLoad, value_bytes
from axsparse.samo.state_bytes import StateBytes, TensorSize, tensor_bytes

GRADIENT_BYTES = 2 + 4
"""∇θ16 and ∇θ32 (section III-D)."""
COPY_BYTES = 2
"""Of the compressed half weights, made when masters become weights (section III-C)."""
MOMENTS = 2


@dataclass(frozen=True, kw_only=True)
class GptFormula:
    """A GPT with activation recomputation, trained by AdamW in mixed precision."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    density: float = 1.0
    """f: kept part of the blocks' matrices; embeddings and head stay dense."""
    precision: Precision = "fp16"

    @property
    def is_pruned(self) -> bool:
        return self.density < 1

    @property
    def most_stages(self) -> int:
        """A block has two halves, attention and MLP."""
        return 2 * self.layers

    @property
    def body_flops(self) -> float:
        """Of a sample's forward through the blocks."""
        s, h = self.sequence, self.hidden
        return 24.0 * s * h**2 * (1 + s / (6 * h)) * self.layers

    @property
    def head_flops(self) -> float:
        return 2.0 * self.sequence * self.vocabulary * self.hidden

    @property
    def sample_flops(self) -> float:
        """Narayanan et al. (2021), with recomputation:

        F / B = 96 · s · l · h² · (1 + s / 6h + V / 16 l h)
        """
        return 4 * self.body_flops + 3 * self.head_flops

    @property
    def body_params(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def embedding_params(self) -> int:
        """Words, which are the head's weight as well, and positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def num_params(self) -> int:
        return self.body_params + self.embedding_params

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        """Equal loads but for the loss; `g_data` changes nothing without sharding, and gradients
        are in fp32 for any number of microbatches."""
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
            building=0.0,  # made elsewhere: the memory of a GPU sees the state only
            saved=0.0,  # as well
            held=number * width * s * h,
            working=s * (34 * h + 5 * self.heads * s),
            logits=6.0 * s * self.vocabulary if stage == g_inter - 1 else 0.0,
            outputs=float(width * s * h),
        )

    def _state(self, g_inter: int) -> StateBytes:
        """A stage's share; a tied weight on two stages has two full states."""
        words = self.vocabulary * self.hidden
        kept = round(self.density * self.body_params)
        sizes = [
            TensorSize(self.body_params, kept),
            TensorSize(self.embedding_params, self.embedding_params),
            TensorSize(words, words, is_alias=g_inter == 1),
        ]
        whole = StateBytes.sum(
            tensor_bytes(
                size,
                half=self.precision != "fp32",
                gradient_bytes=GRADIENT_BYTES,
                moments=MOMENTS,
            )
            for size in sizes
        )
        return StateBytes(*(-(-part // g_inter) for part in astuple(whole)))
