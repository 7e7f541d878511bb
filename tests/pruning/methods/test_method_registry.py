"""Settings that leave a pruning method nothing to do are refused, and scores fit the method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor

from axsparse.runtime.errors import AxsparseError, TrainingError


def refusal(g_inter: int = 1, **sections: Any) -> AxsparseError:
    config = tiny_config(**sections)
    with pytest.raises(AxsparseError) as caught:
        train_in_process(g_inter, 1, tiny_gpt(config), config, token_data())
    return caught.value


def test_a_search_that_settles_on_nothing_ends_the_run_and_says_how_far_it_was() -> None:
    error = refusal(
        2,
        pruning={**{"method": "early-bird", "interval": 1, "until_step": 7}, **{"threshold": 1e-6}},
    )

    assert isinstance(error, TrainingError) and error.on_all_ranks
    assert str(error).startswith(
        "step 7: early-bird: no mask has settled by pruning.until_step (last: churn 0."
    )
    assert "pruning.threshold is above); search longer, raise the threshold" in str(error)


def test_a_score_of_ones_own_decides_in_every_layout() -> None:
    config = tiny_config(pruning={"method": "custom", "distribution": "global"}, train={"steps": 1})
    masks = []
    for g_inter, g_data in ((1, 1), (3, 1), (2, 2)):
        ranks = train_in_process(
            g_inter, g_data, tiny_gpt(config), config, token_data(), score=_score
        )
        masks.append(
            {
                tensor.name: tensor.index.positions().tolist()
                for trainer, _ in ranks
                for layer in trainer.layers
                for tensor in layer.state.owned
                if tensor.name != "head.weight"  # the embedding's second use, on some stages
            }
        )

    assert masks[0] == masks[1] == masks[2]
    assert masks[0]["block0.fc2.weight"][:3] == [0, 1, 2]


def _score(name: str, weight: Tensor) -> Tensor:
    """Keeps early columns, whatever their weights."""
    return torch.arange(weight.shape[1], 0, -1).float().expand_as(weight)
