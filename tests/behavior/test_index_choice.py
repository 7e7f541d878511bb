"""Which encoding of kept positions `samo.index: auto` takes."""

from __future__ import annotations

import pytest
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process


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
