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
    for kind in ("int32", "uint16", "mask"):
        config = tiny_config(
            precision=precision, samo={"index": kind}, pruning=pruning, train={"steps": 4}
        )
        ranks[kind] = train_in_process(*layout, tiny_gpt(config), config, data)

    used = {kind: sum(t.state_bytes().index for t, _ in runs) for kind, runs in ranks.items()}
    assert used["mask"] < used["uint16"] < used["int32"]
    for kind in ("uint16", "mask"):
        for (_, ours), (_, reference) in zip(ranks[kind], ranks["int32"], strict=True):
            assert_bitwise(ours, reference)


def test_auto_is_uint16() -> None:
    config = tiny_config(train={"steps": 1})
    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert trainer.config.samo.index == "uint16"
    kinds = {
        type(tensor.index).__name__
        for layer in trainer.parts.layers
        for tensor in layer.state.owned
    }
    assert kinds == {"FullIndex", "Uint16Index"}
