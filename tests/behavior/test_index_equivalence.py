"""How kept positions are stored changes no bit of a training."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.exhaustive import each_once
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process


@pytest.mark.parametrize(
    ("layout", "pruning", "precision"),
    each_once([(1, 1), (2, 2)], [{}, {"include": "all"}, {"at_step": 2}], ["fp32", "bf16"]),
    ids=str,
)
def test_training_with_every_encoding_is_bitwise_training_with_int32(
    layout: tuple[int, int], pruning: Mapping[str, object], precision: str
) -> None:
    data = token_data()
    ranks = {}
    for kind in ("int32", "mask", "auto"):
        config = tiny_config(
            precision=precision, samo={"index": kind}, pruning=pruning, train={"steps": 4}
        )
        ranks[kind] = train_in_process(*layout, tiny_gpt(config), config, data)

    used = {kind: sum(t.state_bytes().index for t, _ in runs) for kind, runs in ranks.items()}
    assert used["auto"] <= used["mask"] < used["int32"]
    for kind in ("mask", "auto"):
        for (_, ours), (_, reference) in zip(ranks[kind], ranks["int32"], strict=True):
            assert_bitwise(ours, reference)


@pytest.mark.parametrize(("sparsity", "encoding"), [(0.9, "MaskIndex"), (0.98, "Int32Index")])
def test_auto_takes_the_encoding_of_fewer_bytes(sparsity: float, encoding: str) -> None:
    config = tiny_config(pruning={"sparsity": sparsity}, train={"steps": 1})
    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())

    kinds = {
        type(tensor.index).__name__
        for layer in trainer.parts.layers
        for tensor in layer.state.owned
    }
    assert kinds == {"FullIndex", encoding}


def test_the_encoding_of_run_folders_of_before_is_read_as_auto() -> None:
    assert tiny_config(samo={"index": "uint16"}).samo.index == "auto"
