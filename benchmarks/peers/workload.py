"""The workload of every contender: sizes of the model, the layouts, and who runs. Loads no
torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

Precision: TypeAlias = Literal["fp32", "bf16"]
Pruner: TypeAlias = Literal["dense", "step", "prune", "samo"]
"""Dense training; pruned weights set to zero after each step; torch.nn.utils.prune; compressed
state."""
Framework: TypeAlias = Literal["plain", "ddp", "fsdp2", "pipelining", "deepspeed", "axsparse"]

SPARSITY = 0.9
"""Fraction of every block matrix that is pruned; all other parameters stay dense."""
SEED = 1


@dataclass(frozen=True)
class Size:
    """A GPT, and the batch of a step."""

    name: str
    blocks: int
    width: int
    heads: int
    tokens: int
    """Of one sequence."""
    vocabulary: int
    microbatches: int = 8
    """Of one sequence each, in a step, over all replicas."""

    @property
    def layers(self) -> int:
        """The blocks, the embedding before them and the head after them."""
        return self.blocks + 2

    @property
    def block_parameters(self) -> int:
        """Twelve squares of the width in four matrices, their biases, and two norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """Embeddings of tokens and positions, blocks, and the head with its norm."""
        ends = (2 * self.vocabulary + self.tokens + 2) * self.width
        return self.blocks * self.block_parameters + ends

    @property
    def kept(self) -> int:
        """Parameters that stay when the block matrices are pruned."""
        matrices = [3, 1, 4, 4]
        dropped = sum(round(SPARSITY * count * self.width**2) for count in matrices)
        return self.parameters - self.blocks * dropped

    def split(self, stages: int) -> list[int]:
        """Layers of each stage, such that the largest matrix work of a stage is smallest.

        Looking a token up costs nothing next to a product. Among equal splits the one whose first
        stages are fullest is taken, since the last stage computes the loss as well.
        """
        block, head = 12 * self.width, self.vocabulary
        costs = [0, *[block] * self.blocks, head]

        def rank(cuts: tuple[int, ...]) -> tuple[int, list[int]]:
            bounds = [0, *cuts, self.layers]
            work = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            return max(work), [-cut for cut in cuts]

        cuts = min(itertools.combinations(range(1, self.layers), stages - 1), key=rank)
        return [b - a for a, b in itertools.pairwise([0, *cuts, self.layers])]


SIZES = {
    size.name: size
    for size in (
        Size("tiny", blocks=4, width=128, heads=2, tokens=32, vocabulary=256),
        Size("small", blocks=8, width=512, heads=8, tokens=256, vocabulary=8192),
        Size("wide", blocks=4, width=1024, heads=16, tokens=128, vocabulary=8192),
    )
}


@dataclass(frozen=True)
class Case:
    """One contender in one layout."""

    name: str
    framework: Framework
    stages: int = 1
    replicas: int = 1
    masking: Pruner = "dense"
    variant: str = ""
    """A setting of the framework. Only the fastest variant of a contender counts."""
    only: Precision | None = None
    """The precision in which the variant differs from others; None for both."""
    is_floor: bool = False
    """Replicas that never communicate: the least time there can be. Their losses mean nothing."""

    @property
    def layout(self) -> str:
        return f"{self.stages}x{self.replicas}"

    @property
    def ranks(self) -> int:
        return self.stages * self.replicas

    @property
    def is_masked(self) -> bool:
        return self.masking != "dense"

    @property
    def family(self) -> str:
        """The contender whose variants compete."""
        return f"{self.name} {self.layout}"

    @property
    def key(self) -> str:
        return f"{self.family} {self.variant}".strip()

    def at(self, stages: int, replicas: int) -> Case:
        return replace(self, stages=stages, replicas=replicas)


@dataclass(frozen=True)
class Run:
    """One start of one contender, as its ranks read it."""

    case: Case
    size: Size
    precision: Precision
    steps: int
    """Timed ones."""
    warmup: int

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> Run:
        fields: dict[str, Any] = json.loads(text)
        case, size = Case(**fields.pop("case")), Size(**fields.pop("size"))
        return Run(case, size, **fields)


OURS_DENSE = Case("axsparse dense", "axsparse")
OURS_SAMO = Case("axsparse SAMO", "axsparse", masking="samo")
OURS_SAMO_MASK = Case("axsparse SAMO", "axsparse", masking="samo", variant="mask")
OURS_SHARDED = Case("axsparse SAMO sharded", "axsparse", masking="samo", variant="sharded")
PLAIN = Case("plain torch", "plain")
PLAIN_MASKED = Case("plain torch, masked after the step", "plain", masking="step")
FLOOR = Case("no communication", "ddp", 1, 2, variant="silent", is_floor=True)
DDP = Case("DDP", "ddp", 1, 2)
DDP_MASKED = Case("DDP, masked after the step", "ddp", 1, 2, masking="step")
DDP_PRUNE = Case("DDP, nn.utils.prune", "ddp", 1, 2, masking="prune")
FSDP2 = (
    Case("FSDP2", "fsdp2", 1, 2, variant="gathered"),
    Case("FSDP2", "fsdp2", 1, 2, variant="resharded"),
    Case("FSDP2", "fsdp2", 1, 2, variant="gathered, bf16 sums", only="bf16"),
)
PIPELINING = Case("torch 1F1B", "pipelining", 2, 1)
PIPELINING_MASKED = Case("torch 1F1B, masked after the step", "pipelining", 2, 1, masking="step")
DEEPSPEED = (
    Case("DeepSpeed", "deepspeed", 1, 2),
    Case("DeepSpeed", "deepspeed", 1, 2, variant="bf16 sums", only="bf16"),
)


def cases_of_layout(layout: str) -> list[Case]:
    """Everyone who takes part in a layout, ours included."""
    stages, replicas = map(int, layout.split("x"))
    ours = [OURS_DENSE, OURS_SAMO, OURS_SAMO_MASK, *([OURS_SHARDED] if replicas > 1 else [])]
    if layout == "1x1":
        peers = [PLAIN, PLAIN_MASKED]
    elif stages == 1:
        peers = [FLOOR, DDP, DDP_MASKED, DDP_PRUNE, *FSDP2, *DEEPSPEED]
    else:
        peers = [PIPELINING, PIPELINING_MASKED, *DEEPSPEED]
    return [case.at(stages, replicas) for case in (*peers, *ours)]


def cases_for(layouts: Sequence[str], precision: Precision) -> list[Case]:
    """The cases of some layouts, preceded by their references for losses."""
    found = [PLAIN, PLAIN_MASKED]
    for layout in layouts:
        found += [case for case in cases_of_layout(layout) if case not in found]
    return [case for case in found if case.only in (None, precision)]


REFERENCES = {False: PLAIN.key, True: PLAIN_MASKED.key}
"""Whose losses the others' have to agree with, by whether weights are masked."""


def missing_references(cases: Sequence[Case]) -> list[str]:
    """The keys of cases that are not among these, though their losses are references for some of
    these."""
    keys = {case.key for case in cases}
    return sorted({REFERENCES[case.is_masked] for case in cases} - keys)
