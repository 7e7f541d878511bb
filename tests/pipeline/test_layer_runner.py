"""One layer as it runs: what it keeps for its backward, and how torch.compile fuses it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support import own_models
from support.cuda_on_cpu import compiler
from support.runs import mlp, tiny_config, tiny_gpt, token_data, train_in_process, vector_data
from torch import Tensor, nn

from axsparse.models import losses
from axsparse.models.own_forward import from_module
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.runtime.errors import ConfigError

FUSED_TOLERANCE = 1e-5
"""Of an fp32 loss: operations are fused, in another order (2e-7 seen)."""


class Watched(nn.Module):
    """Has an activation whose end can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.activations: list[weakref.ref[object]] = []

    def forward(self, x: Tensor) -> Tensor:
        activation = np.ones(x.shape, dtype=np.float32)
        self.activations.append(weakref.ref(activation))
        return x * self.weight * torch.from_numpy(activation)


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_activations_are_recomputed_from_the_first_forward_on(is_recomputed: bool) -> None:
    module = Watched()
    layer = LayerRunner("layer", module, is_recomputed=is_recomputed)
    outputs = [layer.train((torch.ones(3),), (0, "layer", step, 0)) for step in range(2)]

    unfinished = [activation() is not None for activation in module.activations]

    assert unfinished == [not is_recomputed] * 2
    for (output,) in outputs:
        output.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 6


def test_a_mode_that_is_set_between_two_steps_stays_set_behind_an_evaluation() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    layer, inputs = LayerRunner("layer", module, is_recomputed=False), (torch.ones(2, 3),)
    modes = []
    for step in range(3):
        layer.train(inputs, (0, "layer", step, 0))
        layer.evaluate(inputs, (0, "layer", step, 0))
        modes.append([each.training for each in module.modules()])
        layer.end_evaluation()
        modes.append([each.training for each in module.modules()])
        module[0].eval()

    assert modes == [[False] * 3, [True] * 3, *[[False] * 3, [True, False, True]] * 2]


class Halves(nn.Linear):
    """Writes to its input in its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.mul_(0.5) if self.calls > 1 else x)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_layer_that_begins_to_write_to_its_input_is_refused_on_every_stage(
    is_first: bool,
) -> None:
    layer = LayerRunner("layer", Halves(3, 3), is_recomputed=False)
    leaf = torch.ones(2, 3, requires_grad=True)
    inputs = (leaf if is_first else 1.0 * leaf,)
    layer.train(inputs, (0, "layer", 0, 0))

    with pytest.raises(ConfigError, match=r"^layer layer: its forward has begun to write to its"):
        layer.train(inputs, (0, "layer", 1, 0))


# -- fused layers ---------------------------------------------------------------------------


# Ten seconds of torch's compiler.
@pytest.mark.exhaustive
# Of torch itself, while it loads its compiler and looks at weights.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler")
def test_fused_layers_train_as_others_do() -> None:
    sections = {"batch": {"global_batch_size": 12, "microbatch_size": 3}, "train": {"steps": 3}}
    settings = tiny_config(**sections)
    fused = tiny_config(**sections, pipeline={"compile": True, "checkpoint_activations": 2})
    [(_, expected)] = train_in_process(1, 1, mlp(2), settings, vector_data())

    [(trainer, trace)] = train_in_process(1, 1, mlp(2), fused, vector_data())

    assert trace.losses == pytest.approx(expected.losses, rel=FUSED_TOLERANCE)
    assert trace.norms == pytest.approx(expected.norms, rel=FUSED_TOLERANCE)
    calls = trainer.engine.stage.layers
    # A bound method is a new object whenever it is asked for.
    assert all(call._run != call._call for call in calls)


def test_what_a_forward_does_between_its_blocks_is_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins take part in it, which torch.compile cannot trace."""
    fused: list[str] = []

    def note(function: Any, **_: object) -> Any:
        fused.append(function.__self__.name)
        return function

    monkeypatch.setattr(torch, "compile", note)
    config = tiny_config(pipeline={"compile": True}, train={"steps": 1})
    data = own_models.words()
    model = from_module(
        own_models.Gpt(), own_models.word_loss, lambda count: data.read(np.arange(count))[0]
    )

    train_in_process(1, 1, model, config, data)

    assert fused == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiles", [False, "loss"])
def test_the_loss_alone_may_be_fused(compiles: object, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[object] = []

    def note(function: Any, **_: object) -> Any:
        fused.append(function)
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(losses, "_is_on_host", lambda hidden: False)
    config = tiny_config(pipeline={"compile": compiles}, train={"steps": 1})

    train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert fused == ([losses._unchunked_cross_entropy] if compiles else [])
