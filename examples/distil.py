"""A pruned language model learns from its dense self: mpirun -n 2 python examples/distil.py …

    distil.py prune_llama.yaml OUT model.from=FOLDER data.path=TOKENS train.steps=200 …

Every stage has the teacher's layers next to the student's: same weights at first, never trained,
never pruned, two bytes a parameter in bf16. OUT is a Hugging Face folder of the student, like
FOLDER.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axsparse as ax

ALPHA, TEMPERATURE = 0.5, 2.0
"""The teacher's part in the loss, and what logits are divided by to compare the two."""
TOKENS = 256
"""Tokens whose logits exist at a time."""


class Pair(nn.Module):
    """One layer of the student and of the teacher; a tensor of the one, then one of the other."""

    def __init__(self, build: Callable[[], nn.Module], *, is_first: bool) -> None:
        super().__init__()
        self.student = build()
        self.teacher = build().requires_grad_(False)
        self.is_first = is_first

    def forward(self, *flow: Tensor) -> tuple[Tensor, ...]:
        half = 0 if self.is_first else len(flow) // 2  # Both read the same tokens.
        own, taught = flow[: half or None], flow[half:]
        with torch.no_grad():
            hints = self.teacher(*taught)
        outputs = self.student(*own)
        return (*_tuple(outputs), *_tuple(hints))


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


@dataclass(frozen=True)
class Twice:
    """Student and teacher start at the same values."""

    values: ax.StartValues

    @property
    def fingerprint(self) -> str:
        return f"twice {self.values.fingerprint}"

    def read(self, name: str) -> Tensor | None:
        return self.values.read(plain(name))


def plain(name: str) -> str:
    """The name of a parameter in the model without a teacher."""
    return name.replace(".student.", ".").replace(".teacher.", ".")


def with_role(model: ax.Model, role: str, name: str) -> str:
    """The name that a parameter of the model has in the student, or in the teacher."""
    owners = (layer.name for layer in model.layers if name.startswith(f"{layer.name}."))
    owner = max(owners, key=len)
    return f"{owner}.{role}{name.removeprefix(owner)}"


def distilled(model: ax.Model) -> ax.Model:
    """A language model that starts at given weights, with itself as its teacher."""
    assert model.start is not None, "a teacher has learnt something: set model.from"
    plain_head = "this model changes its logits after the head"
    assert getattr(model.loss, "__name__", "") == "linear_cross_entropy", plain_head
    layers = [
        replace(layer, build=partial(Pair, layer.build, is_first=number == 0))
        for number, layer in enumerate(model.layers)
    ]
    ties = [
        ax.Tie(*(with_role(model, role, name) for name in (tie.first, tie.second)))
        for tie in model.ties
        for role in ("student", "teacher")
    ]

    def loss(hidden: Tensor, weight: Tensor, *taught: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return model.loss(hidden, weight, taught[-1])
        return distillation(hidden, weight, *taught)

    return replace(
        model,
        layers=layers,
        ties=ties,
        start=Twice(model.start),
        loss=loss,
    )


def distillation(
    hidden: Tensor, weight: Tensor, hint: Tensor, teaching: Tensor, targets: Tensor
) -> Tensor:
    """(1 − α) · cross entropy + α · T² · KL(teacher ‖ student at T), summed (Hinton et al. 2015).

    Hidden states (B, S, H) and weights (V, H) of student and teacher, targets (B, S). Evaluations
    get the student's cross entropy alone.
    """
    rows = (hidden.flatten(0, 1), hint.flatten(0, 1), targets.flatten())
    total = torch.zeros((), device=hidden.device)
    for own, taught, wanted in zip(*(row.split(TOKENS) for row in rows), strict=True):
        # Logits are computed again in the backward instead of being kept.
        part = checkpoint(_of_some, own, weight, taught, teaching, wanted, use_reentrant=False)
        total = total + part
    return total


def _of_some(
    own: Tensor, weight: Tensor, taught: Tensor, teaching: Tensor, wanted: Tensor
) -> Tensor:
    logits, hints = F.linear(own, weight).float(), F.linear(taught, teaching).float()
    learnt = F.log_softmax(logits / TEMPERATURE, dim=-1)
    known = F.log_softmax(hints / TEMPERATURE, dim=-1)
    apart = F.kl_div(learnt, known, reduction="sum", log_target=True)
    return (1 - ALPHA) * F.cross_entropy(logits, wanted, reduction="sum") + (
        ALPHA * TEMPERATURE**2 * apart
    )


def student(name: str) -> str | None:
    """The name of a parameter of the student in the model without a teacher; None for others."""
    return plain(name) if ".student." in name else None


def main() -> None:
    config, out, *settings = sys.argv[1:]
    given = ax.configure(config, settings)
    trainer = ax.Trainer(distilled(ax.named_model(given)), config=given)
    if trainer.rank == 0:
        Path(out).mkdir()  # An old folder is not written to; better to know now than at the end.
    trainer.train()
    trainer.save_hf(out, named=student)


if __name__ == "__main__":
    main()
