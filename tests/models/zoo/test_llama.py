"""The Llama family: parameter counts, rotary positions, start values, flops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import assert_bitwise, built_modules, tiny_config, train_in_process
from torch import Tensor

from axsparse.config.model_config import LlamaConfig
from axsparse.config.schema import DataConfig, PipelineConfig
from axsparse.data.dataset import TokenDataset
from axsparse.models.layer import as_tuple
from axsparse.models.survey import survey
from axsparse.models.zoo.llama import (
    Attention,
    llama,
    rotary_frequencies,
)


def config(**settings: Any) -> LlamaConfig:
    sizes = {
        **{"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 10, "intermediate_size": 36, "vocab_size": 50, "sequence_length": 16},
    }
    return LlamaConfig(**{**sizes, **settings})


@pytest.mark.parametrize(
    ("tied", "bias", "normed"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_the_number_of_parameters_follows_its_formula(tied: bool, bias: bool, normed: bool) -> None:
    h, d, n, k, inner, v = 24, 10, 4, 2, 36, 50
    block = 2 * h * n * d + 2 * h * k * d + 3 * h * inner + 2 * h
    block += (n + 2 * k) * d * bias + 2 * d * normed

    settings = config(tie_embeddings=tied, qkv_bias=bias, qk_norm=normed)

    assert survey(llama(settings, 16)).num_params == 2 * block + (2 - tied) * v * h + h


def test_llama_3_8b_has_its_size() -> None:
    eight = LlamaConfig(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        tie_embeddings=False,
    )

    assert survey(llama(eight, 8)).num_params == 8_030_261_248


def test_flops_are_those_of_the_matrix_products() -> None:
    s, h, d, n, k, inner, v = 7, 24, 10, 4, 2, 36, 50
    matrices = 2 * s * (2 * h * n * d + 2 * h * k * d + 3 * h * inner)
    attention = 2 * (2 * s * s * n * d)

    flops = [layer.flops for layer in survey(llama(config(), s)).layers]

    assert flops == [0, *[matrices + attention] * 2, 2 * s * h * v]


def test_scaling_stretches_long_wavelengths_and_leaves_short_ones() -> None:
    plain = rotary_frequencies(config(rope_theta=1000.0))
    scaled = rotary_frequencies(
        config(
            rope_theta=1000.0,
            rope_factor=4.0,
            rope_low_factor=1.0,
            rope_high_factor=3.0,
            rope_original_length=60,
        )
    )

    ratios = (plain / scaled).tolist()
    waves = [2 * math.pi / frequency for frequency in plain.tolist()]
    assert waves[0] < 60 / 3 < waves[1] < 60 / 1 < waves[2]
    assert ratios[0] == 1
    assert 1 < ratios[1] < 4
    assert ratios[2:] == pytest.approx([4, 4, 4])


def separated_data() -> TokenDataset:
    """Samples of 16 tokens, most of them of several documents, which end with token 0."""
    tokens = np.random.default_rng(4).integers(0, 8, 40 * 16 + 1, dtype=np.uint8)
    return TokenDataset("separated", "0", 50, tokens, 16, separator=0)


@pytest.mark.parametrize("kind", [{}, {"qkv_bias": True, "qk_norm": True, "rope_factor": 2.0}])
def test_a_document_among_others_is_read_as_if_it_were_alone(kind: dict[str, Any]) -> None:
    *body, head = built_modules(llama(config(**kind), 16))

    def states(*flow: Tensor) -> Tensor:
        for module in body:
            flow = as_tuple("", module(*flow))
        hidden: Tensor = head(*flow)[0]
        return hidden

    (tokens, starts), _ = separated_data().read(np.arange(6))
    packed = states(tokens, starts)

    documents = 0
    for row, begins in enumerate(starts.tolist()):
        for begin in sorted(set(begins)):
            end = begin + begins.count(begin)
            alone = states(tokens[row : row + 1, begin:end])
            torch.testing.assert_close(packed[row : row + 1, begin:end], alone)
            documents += 1
    assert documents > 12
    assert not torch.allclose(packed, states(tokens), atol=1e-3)


def test_positions_begin_anew_with_each_document() -> None:
    """Attention itself depends on differences of positions only."""
    attention = Attention(config())
    starts = torch.tensor([[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]])

    plain = torch.stack(attention.turns(torch.zeros(1, 5, 24), None))
    found = torch.stack(attention.turns(torch.zeros(2, 5, 24), starts))

    assert torch.equal(found[:, 0, 0], plain[:, [0, 1, 0, 1, 2]])
    assert torch.equal(found[:, 1, 0], plain[:, [0, 1, 2, 3, 0]])


def test_separate_documents_train_alike_in_every_pipeline_and_recomputed() -> None:
    settings = tiny_config(
        model=config().model_dump(),
        data={"separate_documents": True},
        train={"steps": 3, "eval_every": 3, "eval_steps": 2},
    )
    again = settings.model_copy(update={"pipeline": PipelineConfig(checkpoint_activations=1)})
    data = separated_data()
    model = llama(config(), 16, separate=True)

    [(trainer, reference)] = train_in_process(1, 1, model, settings, data, validation=data)
    assert trainer.last_evaluation is not None
    for g_inter, asked in ((2, again), (4, settings)):
        for one, trace in train_in_process(g_inter, 1, model, asked, data, validation=data):
            assert_bitwise(trace, reference)
            assert one.last_evaluation == trainer.last_evaluation
    run_on = settings.model_copy(update={"data": DataConfig()})
    plain = TokenDataset("run on", "0", 50, data.tokens, 16)
    [(_, trace)] = train_in_process(1, 1, llama(config(), 16), run_on, plain)
    assert trace.losses != reference.losses


def test_plans_count_the_mask_of_documents() -> None:
    run_on, apart = (
        survey(llama(config(), 64, separate=separate), torch.bfloat16).layers[1].activations
        for separate in (False, True)
    )

    assert run_on is not None and apart is not None
    assert apart.saved - run_on.saved >= 2 * 64 * 64
    assert apart.outputs - run_on.outputs == 4 * 64
