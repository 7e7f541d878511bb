"""Stages hold as much as plans count, by the allocator's word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from photos import classifier
from support.allocated import peak_of_torch
from support.exhaustive import by_default
from support.runs import tiny_config
from support.sums import Sums
from torch import Tensor, nn
from wideresnet101 import Head

from axsparse.config.model_config import GptConfig
from axsparse.models.layer import Layer
from axsparse.models.model_profile import ModelProfile, profile
from axsparse.models.teacher import Teacher
from axsparse.models.zoo.gpt import gpt
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.pipeline.policy import Action, Kind, Schedule
from axsparse.pipeline.stage import Key, Stage, StageTeacher
from axsparse.pipeline.weight_gradients import StageProducts
from axsparse.planner.layout_search import Layout
from axsparse.planner.profiled_model import CUT_LOSS_BYTES, ProfiledModel
from axsparse.planner.stage_memory import is_recomputed
from axsparse.runtime.communication import Direction
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW
from axsparse.tensor_parallel.dry_run import SilentGroup, profile_of_tp_shard
from axsparse.tensor_parallel.modules import Sharding, sharded_loss

SAMPLES, MICROBATCHES = 4, 6
TOKENS, WIDTH, WORDS = 64, 64, 1000
GPT = gpt(
    GptConfig(
        num_layers=4, hidden_size=WIDTH, num_heads=4, sequence_length=TOKENS, vocab_size=WORDS
    ),
    TOKENS,
)


def convolution(inputs: int, outputs: int, last: Callable[[], nn.Module]) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(), last())


HALVING = partial(nn.MaxPool2d, 2)
CNN = classifier(
    "cnn",
    [
        Layer("a", partial(convolution, 3, 32, nn.Identity)),
        Layer("b", partial(convolution, 32, 64, HALVING)),
        Layer("c", partial(convolution, 64, 128, nn.Identity)),
        Layer("d", partial(convolution, 128, 128, HALVING)),
        Layer("head", partial(Head, 128, 7), kind="head"),
    ],
    32,
)
CUTS = {
    "gpt": (GPT, 3),
    "cnn": (CNN, 2),
    "gpt and its teacher": (replace(GPT, teacher=Teacher(GPT, 1.0, 1.0)), 3),
    "gpt of 2 tensor-parallel ranks": (GPT, 3),
    "gpt of 4 tensor-parallel ranks": (GPT, 3),
}
"""Models of two stages, and how many layers the first one has."""
CASES = [(name, stage, every) for name in CUTS for stage in (0, 1) for every in (0, 1, 2)]


def members_of(name: str) -> int:
    """The number of tensor-parallel ranks of each stage."""
    return int(name.split()[2]) if "ranks" in name else 1


def samples_of(name: str, stage: int) -> tuple[Tensor, Tensor | None]:
    """A microbatch's inputs of a stage, and its targets."""
    if name.startswith("gpt"):
        words = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % WORDS
        return (torch.randn(SAMPLES, TOKENS, WIDTH), words) if stage else (words, None)
    if stage:
        return torch.randn(SAMPLES, 64, 16, 16), torch.arange(SAMPLES)
    return torch.randn(SAMPLES, 3, 32, 32), None


def teacher_of(teacher: Teacher, stage: int, cut: int) -> StageTeacher:
    """The part of a teacher on a stage, at other weights than the model."""
    numbers = range(cut, len(GPT.layers)) if stage else range(cut)
    runners = []
    for layer in teacher.layers(numbers):
        module = layer.build()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.03)
        runners.append(LayerRunner(layer.name, module, is_recomputed=False))
    return StageTeacher(runners, teacher.distilled)


class Played:
    """A stage that plays the actions of its schedule; gradients arrive as soon as a forward ran."""

    def __init__(self, name: str, stage: int, every: int, schedule: Schedule) -> None:
        model, cut = CUTS[name]
        layers = model.layers[cut:] if stage else model.layers[:cut]
        modules = [(layer.name, layer.build()) for layer in layers]
        loss, g_tensor = model.loss, members_of(name)
        if g_tensor > 1:
            # Sums have wrong values, and all their memory.
            group = SilentGroup(Grid(1, 1, g_tensor).coords(g_tensor - 1))
            for layer, (_, module) in zip(layers, modules, strict=True):
                Sharding(group).shard(layer, module)
                for parameter in module.parameters():
                    if parameter.is_meta:
                        empty = nn.Parameter(torch.empty(parameter.shape))
                        torch.utils.swap_tensors(parameter, empty)
            loss = sharded_loss(model, group) or loss
        for _, module in modules:
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)
        sums = Sums(nn.ModuleList(module for _, module in modules), is_dropping=True)
        self._stage = Stage(
            [
                LayerRunner(name, module, is_recomputed=is_recomputed(number, every))
                for number, (name, module) in enumerate(modules)
            ],
            loss=loss if stage else None,
            metrics={},
            input_dtype=None,
            seed=0,
            products=StageProducts([each for _, each in modules], sums.collector, is_split=True),
            teacher=None if model.teacher is None else teacher_of(model.teacher, stage, cut),
        )
        self._stage._loss_is_known = g_tensor > 1  # Wrong sums differ from call to call.
        self._is_last = bool(stage)
        self._number, self._schedule = stage, schedule
        self._inputs, self._targets = samples_of(name, stage)

    def step(self) -> None:
        shapes: dict[int, list[torch.Size]] = {}
        for action in self._actions():
            number = action.microbatch
            if action.kind is Kind.FORWARD:
                inputs = self._inputs.clone()
                inputs.requires_grad_(inputs.is_floating_point())
                taught = self._stage.teach((inputs.detach().clone(),), Key(0, 0))
                outputs = self._stage.forward(
                    number, (inputs,), Key(0, 0), self._targets, 1.0, taught
                )
                del taught
                shapes[number] = [] if self._is_last else [output.shape for output in outputs]
                del inputs, outputs
            elif action.kind is Kind.BACKWARD:
                gradients = [torch.ones(shape) for shape in shapes[number]]
                self._stage.backward(number, gradients, 1.0)
                del gradients
            else:
                self._stage.weight_gradients(number)

    def _actions(self) -> Iterator[Action]:
        policy = self._schedule.policy(stage=self._number, g_inter=2, microbatches=MICROBATCHES)
        for number in range(MICROBATCHES * self._number):
            policy.arrived(Direction.FORWARD, number)
        while not policy.finished:
            action = policy.next()
            assert action is not None
            yield action
            if action.kind is Kind.FORWARD and not self._is_last:
                policy.arrived(Direction.BACKWARD, action.microbatch)


def planned(profiled: ModelProfile, name: str, stage: int, every: int) -> tuple[Schedule, float]:
    """The schedule as training has it, and the bytes of a stage in addition to its state."""
    cut = CUTS[name][1]
    sections = {"checkpoint_activations": every}
    config = tiny_config(pipeline=sections, layout={"split": [cut, len(profiled.layers) - cut]})
    subject = ProfiledModel(config, profiled, {}, ADAMW, CUTS[name][0])
    loads = subject.tp_shard(members_of(name)).stages(2, 1, microbatches=MICROBATCHES)
    assert loads is not None
    schedule = Schedule("message-driven", 1, split_backward=True)
    layout = Layout(Grid(2, 1), schedule, SAMPLES, MICROBATCHES)
    memory = layout.stage_memory(stage, replace(loads[stage], building=0.0), 0.0)
    beside = memory.activations + memory.working + memory.logits + memory.temporary
    return layout.schedule, beside


@pytest.mark.parametrize(
    ("name", "stage", "every"),
    by_default(
        [
            *[("gpt", 1, 0), ("cnn", 1, 2)],
            ("gpt of 4 tensor-parallel ranks", 0, 1),
            ("gpt and its teacher", 1, 1),
        ],
        CASES,
    ),
)
def test_a_stage_holds_what_is_planned_and_little_less(name: str, stage: int, every: int) -> None:
    profiled = profile(CUTS[name][0], torch.float32)
    schedule, beside = planned(profiled, name, stage, every)
    played = Played(name, stage, every, schedule)
    played.step()  # The first microbatch of a run is whole.

    peak = peak_of_torch(played.step)

    assert 0.5 * beside < peak <= 1.05 * beside


@pytest.mark.parametrize(("g_tensor", "words"), [(2, 2048), (4, 2048), (2, 40_000)])
def test_the_loss_of_a_sharded_vocabulary_takes_what_is_planned(g_tensor: int, words: int) -> None:
    """Also where logits are computed again, of 40,000 words."""
    tokens, samples = 32, 4
    config = GptConfig(
        num_layers=1, hidden_size=8, num_heads=8, sequence_length=tokens, vocab_size=words
    )
    model, coords = gpt(config, tokens), Grid(1, 1, g_tensor).coords(g_tensor - 1)
    weight = torch.randn(words // g_tensor, 8, requires_grad=True)
    hidden = torch.randn(samples, tokens, 8, requires_grad=True)
    targets = torch.arange(samples * tokens).view(samples, tokens)
    loss = sharded_loss(model, SilentGroup(coords))
    assert loss is not None

    def step() -> None:
        loss(hidden, weight, targets).backward()

    step()  # Gradients are there from now on.
    peak = peak_of_torch(step)

    profiled = profile_of_tp_shard(model, profile(model), coords, torch.float32)
    assert profiled.loss_logits is not None
    planned = CUT_LOSS_BYTES * profiled.loss_logits(samples)
    beside = weight.nbytes + 3 * hidden.nbytes
    assert 0.9 * planned < peak <= planned + beside
