"""The first lines on the screen, in full."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.runs import of_family
from torch import nn

import axsparse
from axsparse.config.model_config import GptConfig
from axsparse.config.schema import Config
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import ModelProfile, profile
from axsparse.models.zoo.gpt import gpt
from axsparse.observe.banner import ModelLayout, banner
from axsparse.runtime.grid import Grid


def config(**sections: dict[str, Any]) -> Config:
    model = {"num_layers": 5, "hidden_size": 64, "num_heads": 2, "vocab_size": 256}
    return Config.model_validate(
        {
            "model": model,
            "batch": {"global_batch_size": 24, "microbatch_size": 2},
            "precision": "bf16",
            **sections,
        }
    )


def lines(
    settings: Config,
    *,
    grid: Grid | None = None,
    stages: tuple[range, ...] = (range(3), range(3, 7)),
    profiled: ModelProfile | None = None,
    live_bytes: int = 900_000,
    planned: str = "",
    teacher_bytes: int = 0,
) -> list[str]:
    return list(
        banner(
            settings,
            ModelLayout(
                "gpt",
                profiled or profile(gpt(of_family(settings.model, GptConfig), 128)),
                stages,
                grid or Grid(2, 2),
                "mpi (MPICH 4.2)",
                dense_bytes=4_000_000,
                live_bytes=live_bytes,
                teacher_bytes=teacher_bytes,
            ),
            data="stdlib: 12.3k samples",
            metrics=Path("runs/x/metrics.jsonl"),
            planned=planned,
        )
    )


def test_the_banner_says_what_is_trained_where_it_stands_and_what_it_costs() -> None:
    assert lines(config(train={"steps": 100})) == [
        f"axsparse {axsparse.__version__} · gpt 275k parameters · 90 % of the block weights pruned "
        "by magnitude · bf16 · 4 ranks = 2 stages × 2 replicas · mpi (MPICH 4.2)",
        "stage 0: embed, block0–1 (125k, 40 % of the work)   "
        "stage 1: block2–4, head (166k, 60 % of the work)",
        "model state/rank: dense 4.0 MB → SAMO 900 kB",
        "batch 24 = 2 replicas × 6 microbatches × 2 · stdlib: 12.3k samples",
        "100 steps · metrics → runs/x/metrics.jsonl",
    ]


@pytest.mark.parametrize(
    ("sections", "words", "state"),
    [
        ({"pruning": {"sparsity": 0.85, "include": "all"}}, "85 % of all matrices pruned by", ""),
        ({"pruning": {"method": "random"}}, "90 % of the block weights pruned by random", ""),
        ({"pruning": {"at_step": 7}}, "by magnitude after step 7 ·", " until step 7, then SAMO"),
        ({"pruning": {"at_step": 7, "sparsity": 0.0}}, "· dense (pruning.sparsity is 0) ·", ""),
        ({"samo": {"enabled": False}}, "· dense (samo.enabled is false) ·", ""),
        ({"samo": {"enabled": False}, "pruning": {"at_step": 7}}, "· dense (samo.enabled", ""),
    ],
)
def test_what_is_pruned_and_how_long_it_stays_dense_is_said_in_words(
    sections: dict[str, dict[str, Any]], words: str, state: str
) -> None:
    first, _, dense, *_ = lines(config(**sections), live_bytes=4_000_000)

    assert words in first
    if state or "dense (" in words:
        assert dense == f"model state/rank: dense 4.0 MB{state}"


def test_only_runs_of_numbered_layers_are_drawn_together() -> None:
    names = ["a", "b1", "b2", "b4", "c5", "c6x", "d9", "d10", "d11"]
    model = Model(
        [Layer(name, partial(nn.Linear, 1, 1, bias=False)) for name in names],
        loss=lambda output, target: output.sum(),
    )

    text = lines(config(), profiled=profile(model), stages=(range(9),))[1]

    assert text == "stage 0: a, b1–2, b4, c5, c6x, d9–11 (9, 100 % of the work)"


def test_what_was_predicted_and_what_replicas_share_stands_beside_the_state() -> None:
    shared = config(samo={"zero_stage": 1})
    state = "model state/rank: dense 4.0 MB → SAMO 900 kB"

    taught = lines(config(), teacher_bytes=550_000, planned="peak ~1.2 GB")[2]
    assert taught == f"{state} · teacher 550 kB · peak ~1.2 GB"
    assert lines(shared)[2] == f"{state}, optimizer state shared by 2 replicas"
    assert lines(shared, grid=Grid(2, 1))[2] == state
    sparse = config(samo={"weights": "sparse"})
    assert lines(sparse)[2] == f"{state}, weights sparse at rest"
    gathered = lines(config(samo={"weights": "sparse", "zero_stage": 3}))[2]
    assert gathered.startswith(f"{state}, weights sparse at rest and gathered by replicas, ")
