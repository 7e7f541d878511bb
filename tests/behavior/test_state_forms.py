"""In which forms a run stores its state; that all forms train alike, the table says."""

from __future__ import annotations

import pytest
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.config.load import load_config
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError


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


def test_only_bf16_weights_are_the_upper_half_of_a_master() -> None:
    loaded = load_config(None, ["samo.split_master=true", "precision=fp16"])

    with pytest.raises(ConfigError) as refused:
        check_config(loaded)

    assert str(refused.value) == (
        "samo.split_master (--set): fp16 weights are not the upper half of fp32 masters; "
        "choose precision bf16, or false"
    )


def test_sgd_without_momentum_keeps_no_optimizer_state() -> None:
    plain, heavy = (
        tiny_config(optimizer={"name": "sgd", "momentum": momentum}, precision="bf16")
        for momentum in (0.0, 0.9)
    )

    bytes_of = [
        train_in_process(1, 1, tiny_gpt(c), c, token_data())[0][0].state_bytes()
        for c in (plain, heavy)
    ]

    assert bytes_of[0].optimizer == 0
    assert bytes_of[1].optimizer == bytes_of[1].master
