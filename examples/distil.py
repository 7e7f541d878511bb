"""A pruned language model learns from its dense self: mpirun -n 2 python examples/distil.py …

    distil.py prune_llama.yaml OUT model.from=FOLDER data.path=TOKENS train.steps=200 …

Every stage has the teacher's layers beside the student's: same weights at first, never trained,
never pruned, two bytes a parameter in bf16. OUT is a Hugging Face folder of the student, like
FOLDER.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axsparse as ax
from axsparse.config.load import load_config
from axsparse.config.model_config import Family
from axsparse.data.sources import open_datasets
from axsparse.models.layer import StartValues
from axsparse.models.losses import linear_cross_entropy
from axsparse.models.start_weights import WHOLE_FILE
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.files.safetensors import header_of, write_safetensors
from axsparse.training.export import as_in_hf, hf_files

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

    values: StartValues

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
    assert model.loss is linear_cross_entropy, "this model changes its logits after the head"
    layers = [
        replace(layer, build=partial(Pair, layer.build, is_first=number == 0))
        for number, layer in enumerate(model.layers)
    ]
    ties = [
        ax.Tie(*(with_role(model, role, name) for name in (tie.first, tie.second)))
        for tie in model.ties
        for role in ("student", "teacher")
    ]
    return replace(model, layers=layers, ties=ties, start=Twice(model.start), loss=distillation)


def distillation(
    hidden: Tensor, weight: Tensor, hint: Tensor, teaching: Tensor, targets: Tensor
) -> Tensor:
    """(1 − α) · cross entropy + α · T² · KL(teacher ‖ student at T), summed (Hinton et al. 2015).

    Hidden states (B, S, H) and weights (V, H) of student and teacher, targets (B, S). Evaluations
    get the student's cross entropy alone.
    """
    if not torch.is_grad_enabled():
        return linear_cross_entropy(hidden, weight, targets)
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


def main(job: ax.Job) -> None:
    config, out, *settings = sys.argv[1:]
    loaded = load_config(config, settings)
    if job.transport.rank == 0:
        Path(out).mkdir()  # An old folder is not written to; better to know now than at the end.
    model = distilled(named_model(loaded))
    trainer = ax.build(job, model, partial(open_datasets, loaded), loaded)
    trainer.train()
    weights = trainer.state_dict()
    if weights is not None:  # on rank 0
        student = {plain(name): w for name, w in weights.items() if ".student." in name}
        write_folder(Path(out), loaded.config.model, student)


def write_folder(path: Path, settings: Family, weights: Mapping[str, Tensor]) -> None:
    """Write the model of these settings for transformers, with the tokenizer of `model.from`."""
    for name, content in hf_files(settings, torch.float32, None)[0].items():
        (path / name).write_bytes(content)
    tensors = dict(as_in_hf(settings, name, weight) for name, weight in weights.items())
    headers = {name: header_of(w) for name, w in tensors.items()}
    write_safetensors(path / WHOLE_FILE, headers, iter(tensors.values()))


if __name__ == "__main__":
    ax.run(main)
