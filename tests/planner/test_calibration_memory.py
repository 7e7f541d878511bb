"""What drawing masks from samples takes, as planned and as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.allocated import peak_of_torch
from support.hf import SMALL_LLAMA
from support.runs import tiny_config, token_data, train_in_process
from torch import Tensor

from axsparse.config.load import made_in_python
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.survey import survey
from axsparse.models.zoo.model_registry import named_model
from axsparse.planner.run_workload import workload
from axsparse.pruning.calibration import CalibratedMasks, Calibration, Tensors
from axsparse.pruning.targets import kept_at_start, what_is_pruned
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.precision import DTYPES

SAMPLES = 24


def config(method: str, precision: str, samples: int = SAMPLES) -> Config:
    sizes = {"hidden_size": 96, "intermediate_size": 264, "sequence_length": 12}
    return tiny_config(
        model={**SMALL_LLAMA.model_dump(), **sizes},
        pruning={"method": method, "sparsity": 0.6, "calibration_samples": samples},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 1},
        precision=precision,
    )


class RandomStart:
    """Start values of every parameter, made anew whenever they are read."""

    fingerprint = "random"

    def __init__(self, model: Model) -> None:
        self.shapes = survey(replace(model, example=None)).shapes

    def read(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(self.shapes[name], generator=generator) / 10


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_the_peak_is_that_of_live_bytes(
    method: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(method, precision)
    model = named_model(made_in_python(asked, "tiny"))
    model = replace(model, start=RandomStart(model))
    surveyed = survey(model, DTYPES[asked.precision])
    kept = kept_at_start(asked, *what_is_pruned(asked, surveyed))
    loads = workload(asked, surveyed, "tiny", kept, ADAMW).stages(1, 1)
    assert loads is not None
    peaks: list[int] = []

    def measured(self: Calibration, samples: Sequence[Tensors]) -> CalibratedMasks:
        found: list[CalibratedMasks] = []
        peaks.append(peak_of_torch(lambda: found.append(draw(self, samples))))
        return found[0]

    draw = Calibration.draw
    monkeypatch.setattr(Calibration, "draw", measured)
    train_in_process(1, 1, model, asked, token_data())

    planned = loads[0].calibration(2)
    assert 0.9 * planned < peaks[0] < planned


def test_more_samples_take_more_and_another_method_nothing() -> None:
    peaks = []
    for method, samples in (("wanda", 24), ("wanda", 240), ("magnitude", 24)):
        asked = config(method, "bf16", samples)
        surveyed = survey(named_model(made_in_python(asked, "tiny")), torch.bfloat16)
        kept = kept_at_start(asked, *what_is_pruned(asked, surveyed))
        subject = workload(asked, surveyed, "tiny", kept, ADAMW)
        for stages in (1, 2):
            loads = subject.stages(stages, 1)
            assert loads is not None
            peaks.append([load.calibration(2) for load in loads])

    one, two, many, many_of_two, other, _ = peaks
    # Of 24 samples of 12 tokens the activations of a layer, 96 wide, are 55 kB.
    assert many[0] - one[0] == pytest.approx(9 * 24 * 12 * 96 * 2, rel=0.01)
    assert two[0] < one[0]
    assert len(many_of_two) == 2
    assert other == [0.0]
