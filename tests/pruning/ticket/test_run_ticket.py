"""Tickets of runs are drawn under one layout and used under any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.config.schema import Config
from axsparse.runtime.errors import ConfigError
from axsparse.training.trainer import Trainer

LAYOUTS = [(1, 1), (3, 1), (2, 2)]


def drawn(path: Path, config: Config, g_inter: int, g_data: int) -> list[Trainer]:
    """Train, and have all ranks save their masks at the end."""
    trainers: dict[int, Trainer] = {}
    world_size = g_inter * g_data

    def note(trainer: Trainer) -> None:
        trainers[trainer.parts.place.rank] = trainer
        close = trainer.close

        def save_and_close() -> None:
            if trainer.steps_done == config.train.steps:
                trainer.save_ticket(path)
            close()

        trainer.close = save_and_close  # type: ignore[method-assign]  # the last moment of a run

    train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data(), before=note)
    return [trainers[rank] for rank in range(world_size)]


def positions(trainers: list[Trainer]) -> dict[str, list[int]]:
    return {
        tensor.name: tensor.index.positions().tolist()
        for trainer in trainers
        for layer in trainer.parts.layers
        for tensor in layer.state.owned
    }


def test_a_ticket_is_the_same_file_in_every_layout_and_gives_the_same_run(
    tmp_path: Path,
) -> None:
    search = tiny_config(
        pruning={
            **{"method": "early-bird", "interval": 1, "until_step": 7},
            **{"threshold": 0.5, "include": "all"},
        },
        schedule={"warmup_steps": 1},
    )
    files = []
    for g_inter, g_data in LAYOUTS:
        path = tmp_path / f"{g_inter}x{g_data}"
        masks = positions(drawn(path, search, g_inter, g_data))
        files.append(path)
    # Replicas add in another order, but these masks do not depend on the last bits.
    assert len({path.read_bytes() for path in files}) == 1

    start = tiny_config(pruning={"ticket": str(files[0]), "include": "all"}, train={"steps": 4})
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(start), start, token_data())
    for g_inter, g_data in LAYOUTS[1:2]:
        ranks = train_in_process(g_inter, g_data, tiny_gpt(start), start, token_data())
        for trainer, trace in ranks:
            assert_bitwise(trace, reference)
            for name, kept in positions([trainer]).items():
                assert kept == masks[name], name


def test_a_model_of_which_nothing_is_pruned_has_no_ticket(tmp_path: Path) -> None:
    config = tiny_config(samo={"enabled": False}, train={"steps": 1})

    with pytest.raises(ConfigError, match=r"ticket: nothing of this model is pruned; set pruning"):
        drawn(tmp_path / "ticket", config, 1, 1)
