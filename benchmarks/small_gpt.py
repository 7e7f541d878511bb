"""The small GPTs that `make bench` trains on one rank, on drawn tokens or given ones."""

from __future__ import annotations

import torch

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.trainer import Trainer, build


def config_of(
    layers: int, hidden: int, tokens: int, words: int = 512, **sections: object
) -> Config:
    """Settings of a GPT in bf16 whose microbatches are one sequence, without evaluations.

    `heads` and `microbatches` may be among the sections; complete sections take the place of these.
    """
    heads = sections.pop("heads", max(1, hidden // 64))
    return Config.model_validate(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_heads": heads,
                "sequence_length": tokens,
                "vocab_size": words,
            },
            "batch": {
                "global_batch_size": sections.pop("microbatches", 2),
                "microbatch_size": 1,
            },
            "precision": "bf16",
            "pruning": {"sparsity": 0.9, "method": "random"},
            "train": {"steps": 10**6, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
            **sections,
        }
    )


def trainer_of(config: Config, data: TokenDataset | None = None, *, quiet: bool = True) -> Trainer:
    """A trainer on one rank; tokens are drawn where none are given, and a quiet one has no run
    directory."""
    settings = of_family(config.model, GptConfig)
    if data is None:
        generator = torch.Generator().manual_seed(1)
        words, tokens = settings.vocab_size, settings.sequence_length
        drawn = torch.randint(words, (64 * tokens + 1,), generator=generator).numpy()
        data = TokenDataset("random", "0", words, drawn.astype("uint16"), tokens)
    datasets = Datasets(data, None)
    return build(
        Job(LocalTransport(LocalWorld(1), 0)),
        gpt(settings, settings.sequence_length),
        lambda: datasets,
        config.with_origins("benchmarks", {}),
        grid=Grid(1, 1),
        quiet=quiet,
    )
