"""Runs and clusters of round numbers for the tests of predictions of published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.published.piece_loads import transformer
from axsparse.planner.published.run_file import RunRow
from axsparse.planner.published.transformer import Transformer

SMALL: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 1536,
    "num_heads": 16,
    "vocab_size": 51200,
    "sequence_length": 2048,
}


def run(
    *,
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    samples: int = 16,
    micro: int = 2,
    published: dict[str, Any] | None = None,
    **training: Any,
) -> RunRow:
    """A small GPT on one device, but for what is said."""
    return RunRow.model_validate(
        {
            "name": "run",
            "model": {**SMALL, **(model or {})},
            "layout": layout or {},
            "batch": {"global": samples, "micro": micro},
            "training": training,
            "published": published or {},
        }
    )


def model_of(sizes: dict[str, Any], **training: Any) -> Transformer:
    """The transformer of these sizes."""
    return transformer(run(model=sizes, **training), fused=False)


def llama(*sizes: int) -> Transformer:
    """Layers, hidden size, heads, heads of keys, width of the MLP, vocabulary, sequence."""
    names = (
        *("num_layers", "hidden_size", "num_heads", "num_kv_heads"),
        *("intermediate_size", "vocab_size", "sequence_length"),
    )
    return model_of({"family": "llama", **dict(zip(names, sizes, strict=True))})


def selene(**constants: Any) -> Cluster:
    """Selene but for some constants."""
    return replace(load_cluster("selene-a100"), **constants)
