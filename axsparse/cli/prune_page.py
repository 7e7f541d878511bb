"""The page about a model that `axsparse prune` has pruned: its results, in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axsparse.cli.prune_order import PAGE, PruneOrder, setting
from axsparse.config.schema import Config
from axsparse.observe.metrics import perplexity
from axsparse.runtime.console import format_bytes, format_seconds
from axsparse.runtime.errors import writing
from axsparse.runtime.files.atomic import new_path


def write_page(folder: Path, text: str) -> None:
    """Write the page next to the weights; OutputError if that fails."""
    with (
        writing(f"--out: the page in {folder}", "choose another place"),
        new_path(folder / PAGE) as unfinished,
    ):
        unfinished.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Facts:
    """The results of the pruning."""

    before: float
    """The validation loss of the dense model."""
    after: float
    """The validation loss of the pruned model."""
    entries: int
    """The entries of the pruned matrices."""
    kept: int
    """The kept entries of the pruned matrices."""
    export_bytes: int
    """The bytes of the weights that were written, which are fp32."""
    state_bytes: int
    """The bytes of the model state of one rank."""
    peak_bytes: int = 0
    """The most memory that a rank has had."""
    held_out: int = 0
    """The validation samples that the losses are of."""
    pruned: float | None = None
    """The validation loss of the pruned model before adapters; None where there are none."""
    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The error of a token before and after healing, of each layer that was fitted; of the last
    one the loss of a target."""


def page(order: PruneOrder, config: Config, facts: Facts, seconds: dict[str, float]) -> str:
    """The page about a pruned model, in Markdown."""
    pruning = config.pruning
    removed = 1 - facts.kept / facts.entries
    healed = "trained on" if order.heal == "train" else f"healed: {order.heal}"
    half = facts.export_bytes // 2
    pruned = facts.entries - facts.kept
    figures: list[tuple[str, Callable[[float], str]]] = [
        ("validation loss", "{:.4f}".format),
        ("perplexity", lambda loss: f"{perplexity(loss):.3f}"),
    ]
    losses = [facts.before, *([] if facts.pruned is None else [facts.pruned]), facts.after]
    columns = ["dense", *([] if facts.pruned is None else ["pruned"]), "this folder"]
    sizes = [
        ("safetensors, fp32: this folder", facts.export_bytes),
        ("safetensors, bf16 or fp16: `save_pretrained` after `from_pretrained(dtype=…)`", half),
        ("kept entries in bf16 and one bit an entry", half - 2 * pruned + facts.entries // 8),
    ]
    if pruning.pattern == "2:4":
        packed = half - facts.entries + facts.entries // 4
        sizes.append(("2:4 as sparse tensor cores read it: half the entries, 2 bits each", packed))
    lines = [
        f"# {order.out.name}",
        "",
        f"{order.source.name}, of whose pruned matrices {100 * removed:.1f} % of the entries are "
        f"zero (by {pruning.method}), {healed}.",
        "",
        f"| {facts.held_out} validation samples | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {name} | {' | '.join(map(show, losses))} |" for name, show in figures),
        "",
        "| weights in | bytes |",
        "|---|---|",
        *(f"| {name} | {format_bytes(nbytes)} |" for name, nbytes in sizes),
        "",
        "The folder loads in transformers and everything that reads its folders. Zeros alone make "
        "nothing there faster or smaller: their kernels multiply dense matrices. What gains is "
        f"training on with axsparse, whose state is {format_bytes(facts.state_bytes)} a rank here"
        + (
            "; and 2:4 patterns (`pruning.pattern`) on NVIDIA GPUs with sparse tensor cores."
            if pruning.pattern is None
            else f"; and its pattern, {pruning.pattern}, on NVIDIA GPUs with sparse tensor cores."
        ),
        "",
        "```",
        shlex.join(_training_on(order, removed)),
        "```",
        "",
        "| part | time |",
        "|---|---|",
        *(f"| {name} | {format_seconds(value)} |" for name, value in seconds.items()),
        "",
        f"A rank had at most {format_bytes(facts.peak_bytes)} of memory. Both figures are of the "
        "start that wrote this, and not of earlier ones that were cut.",
        "",
        f"To judge it by others: `lm_eval --model hf --model_args pretrained={order.out.name} "
        "--tasks TASKS` (`pip install 'axsparse[eval]'`).",
        "",
    ]
    return "\n".join([*lines, *_errors(facts.blocks)])


def _training_on(order: PruneOrder, removed: float) -> list[str]:
    """The command that trains the folder on, with the zeros that it has."""
    settings = (
        setting("model.from", order.out),
        setting("data.path", order.work / "tokens"),
        "pruning.method=zeros",
        f"pruning.sparsity={removed:.4f}",
    )
    return [
        *("axsparse", "train", "--config", order.config, "--run-dir", f"{order.out}.trained"),
        *(word for each in settings for word in ("--set", each)),
    ]


def _errors(blocks: Mapping[str, tuple[float, float]]) -> list[str]:
    """The table of errors of layers that were fitted, if any was."""
    if not blocks:
        return []
    *_, last = blocks
    return [
        "| layer | error of a token before healing | after |",
        "|---|---|---|",
        *(
            f"| {name}{', loss of a target' * (name == last)} | {before:.4f} | {after:.4f} |"
            for name, (before, after) in blocks.items()
        ),
        "",
    ]
