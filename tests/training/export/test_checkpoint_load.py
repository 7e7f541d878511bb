"""The weights of a run in memory, as plain torch takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.resuming import ran
from support.runs import summed_loss, tiny_config, vector_data
from torch import Tensor, nn

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

STEPS = 4


def modules() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))


def config_of(**sections: object) -> Config:
    return tiny_config(
        train={"steps": STEPS, "eval_every": 2, "eval_steps": "all"},
        batch={"global_batch_size": 12, "microbatch_size": 3},
        checkpoint={"every": 2},
        pruning={"sparsity": 0.9},
        **sections,
    )


def model_of(config: Config) -> Model:
    del config
    return ax.from_sequential(modules(), summed_loss)


def loss_in_plain_torch(state: dict[str, Tensor]) -> float:
    """The mean loss of the validation data, by modules that know nothing of axsparse."""
    plain = modules()
    plain.load_state_dict(state)
    inputs, targets = vector_data(samples=30).read(np.arange(30))
    with torch.no_grad():
        return float(summed_loss(plain.eval()(*inputs), targets)) / 30


@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_plain_torch_has_the_loss_that_the_run_reported(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    looked: list[ax.Trainer] = []
    ran(
        layout,
        config_of(),
        tmp_path / "run",
        model=model_of,
        data=vector_data(),
        validation=vector_data(samples=30),
        look=looked.append,
    )
    reported = looked[0].last_evaluation

    state = ax.load(tmp_path / "run")

    assert reported is not None
    assert loss_in_plain_torch(state) == pytest.approx(reported.loss, rel=1e-5)
    pruned = state["0.weight"]
    assert (pruned == 0).sum() == round(0.9 * pruned.numel())


def test_a_step_a_checkpoint_and_the_weights_of_training_can_be_asked_for(tmp_path: Path) -> None:
    config, run = config_of(precision="bf16"), tmp_path / "run"
    ran((1, 1), config, run, model=model_of, data=vector_data())

    newest, earlier = ax.load(str(run)), ax.load(run, step=2)
    rounded = ax.load(run / "checkpoints" / "step-2", trained=True)

    assert not torch.equal(newest["3.weight"], earlier["3.weight"])
    assert (earlier["3.weight"].dtype, rounded["3.weight"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.allclose(rounded["3.weight"].float(), earlier["3.weight"], rtol=0.01)
    assert rounded["1.running_mean"].dtype == torch.float32


def test_what_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ran((1, 1), config_of(), run, model=model_of, data=vector_data())

    with pytest.raises(MissingInputError, match="holds no checkpoint"):
        ax.load(tmp_path)
    with pytest.raises(MissingInputError, match="has no checkpoint of step 3; choose one of 4, 2"):
        ax.load(run, step=3)
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        ax.load(run / "checkpoints" / "step-2", step=2)
    file = next((run / "checkpoints" / "step-4").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="step-4"):
        ax.load(run)
