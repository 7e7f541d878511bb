"""Flops, parameters and activations of transformers, against formulas of the literature."""

from __future__ import annotations

import pytest
from support.published_runs import SMALL, llama, model_of

from axsparse.planner.published.transformer import Transformer


def test_a_gpts_flops_are_narayanans_formula() -> None:
    s, h, layers, v = 2048, 1536, 16, 51200

    expected = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model_of(SMALL).megatron_flops == pytest.approx(expected, rel=1e-12)


def test_the_work_of_the_parts_adds_up_to_the_models_flops() -> None:
    model = model_of(SMALL)
    whole = model.block(3, 1).times(16).plus(model.embedding(3)).plus(model.head(3, 1))

    assert 3 * whole.flops == pytest.approx(3 * model.model_flops)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (llama(32, 4096, 32, 32, 11008, 32000, 4096), 6.738),  # Llama 2 7B
        (llama(32, 4096, 32, 8, 14336, 128256, 8192), 8.030),  # Llama 3 8B
        (llama(80, 8192, 64, 8, 28672, 128256, 8192), 70.55),  # Llama 3 70B
    ],
)
def test_llamas_have_their_known_numbers_of_parameters(model: Transformer, billions: float) -> None:
    assert model.num_params / 1e9 == pytest.approx(billions, rel=1e-3)


def test_activations_are_korthikantis_table_2() -> None:
    model, tensor = model_of(SMALL), 4
    s, b, h, a = 2048, 2, 1536, 16

    attention = 5 * a * s / (h * tensor)
    assert model.held(b, tensor, "none") == s * b * h * (10 + 24 / tensor + attention)
    assert model.held(b, tensor, "selective") == s * b * h * (10 + 24 / tensor)
    assert model.held(b, tensor, "full") == 2 * s * b * h
    by_sequence = model_of(SMALL, sequence_parallel=True)
    assert by_sequence.held(b, tensor, "selective") == s * b * h * 34 / tensor


def test_fused_attention_skips_masked_scores_and_stores_none() -> None:
    stored, fused = model_of(SMALL), model_of(SMALL, attention="fused")

    assert fused.attention(1, 1).flops == stored.attention(1, 1).flops / 2
    assert fused.attention(1, 1).moved < stored.attention(1, 1).moved / 10
    assert fused.held(1, 1, "none") == stored.held(1, 1, "selective")


def test_more_devices_divide_products_and_not_norms() -> None:
    model = model_of(SMALL)
    one, eight = model.block(2, 1), model.block(2, 8)

    assert eight.flops == pytest.approx(one.flops / 8)
    assert one.moved / 8 < eight.moved < one.moved
    divided = model_of(SMALL, sequence_parallel=True).block(2, 8)
    assert divided.moved < eight.moved
