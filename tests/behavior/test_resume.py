"""A run that was saved, stopped and resumed is the run that was not, under any layout."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.exhaustive import by_default
from support.resuming import Layout, Ran, ran, records_of, same, settings
from support.runs import (
    FEW_MICROBATCHES,
    around_step,
    random_init,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.models.sequential import from_sequential, given_module
from axsparse.training.evaluation import Evaluation
from axsparse.training.trainer import Trainer

STOP, STEPS = 3, 5


def config_of(**sections: Any) -> Config:
    sections = {"train": {"steps": STEPS}, "batch": FEW_MICROBATCHES, **sections}
    return tiny_config(**sections, checkpoint={"every": 0})


def resumes(
    tmp_path: Path,
    config: Config,
    *,
    before: Layout = (2, 1),
    after: Layout = (3, 1),
    stop: int = STOP,
    then: Config | None = None,
) -> Ran:
    """Stops after a step, continues under another layout, and equals the run that did not stop."""
    stopped = ran(before, config, tmp_path / "run", stop_after=stop)
    assert stopped.stopped is not None
    assert stopped.stopped.startswith(f"stopped after step {stop}, saved in ")
    reference = ran(before, config, tmp_path / "whole")

    resumed = ran(after, then or config, tmp_path / "run", resume="auto")

    assert list(resumed.losses) == list(range(stop + 1, config.train.steps + 1))
    same(resumed, reference)
    return reference


@dataclass(frozen=True)
class Case:
    """Settings of a run, what else it is resumed with, and under which layouts."""

    settings: dict[str, Any] = field(default_factory=dict)
    then: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, Layout] = ((2, 1), (3, 1))


SHARD = {"samo": {"zero_stage": 1}}
GATHERED = {"samo": {"weights": "sparse", "zero_stage": 3}}
REPLICAS = (1, 2), (2, 2)
STATES = {
    "fp16": Case({"precision": "fp16", "loss_scale": {"initial": 1024.0, "growth_interval": 3}}),
    "bf16": Case({"precision": "bf16"}),
    "bf16, lamb": Case({"precision": "bf16", "optimizer": {"name": "lamb"}}),
    "dense, untied": Case({"samo": {"enabled": False}, "model": {"tie_embeddings": False}}),
    "recomputed": Case({"pipeline": {"checkpoint_activations": 1}, "model": {"dropout": 0.2}}),
    "another index": Case(
        {"precision": "bf16", "samo": {"index": "int32"}}, {"samo": {"index": "mask"}}
    ),
    "weights dense before": Case({"precision": "bf16"}, {"samo": {"weights": "sparse"}}),
    "weights sparse before": Case({"samo": {"weights": "sparse"}}, {"samo": {"weights": "dense"}}),
    "weights sparse in shards": Case(
        {"precision": "bf16", "samo": {"weights": "sparse"}}, SHARD, REPLICAS
    ),
    "gathered before": Case(GATHERED, {"samo": {"weights": "dense", "zero_stage": 0}}, REPLICAS),
    "gathered after": Case({"precision": "bf16"}, GATHERED, REPLICAS),
    "shards before": Case(SHARD, {"samo": {"zero_stage": 0}}, REPLICAS),
    "shards after": Case({"precision": "bf16"}, SHARD, REPLICAS),
    "shards both times": Case({"precision": "bf16", **SHARD}, layouts=REPLICAS),
}


@pytest.mark.parametrize("what", by_default(list(STATES)[1::3], STATES))
def test_every_kind_of_state_goes_on_as_if_nothing_had_been(what: str, tmp_path: Path) -> None:
    case = STATES[what]
    config, (before, after) = config_of(**case.settings), case.layouts

    resumes(tmp_path, config, before=before, after=after, then=settings(config, **case.then))


METHODS: dict[str, dict[str, Any]] = {
    "once, later": {"method": "magnitude", "at_step": 5},
    "snip": {"method": "snip", "at_step": 4},
    "gradual": {"method": "gradual", "at_step": 1, "interval": 2, "until_step": 9},
    "iterative to step 1": {
        **{"method": "iterative", "at_step": 1, "interval": 3, "until_step": 7},
        **{"rewind_step": 1},
    },
    "early-bird to step 1": {
        **{"method": "early-bird", "interval": 1, "until_step": 8, "threshold": 0.4},
        **{"at_step": 1, "rewind_step": 1},
    },
}


@pytest.mark.parametrize("method", by_default(list(METHODS)[2::2], METHODS))
def test_every_pruning_method_goes_on_where_it_stood(method: str, tmp_path: Path) -> None:
    over_time = {"schedule": {"warmup_steps": 1}, "train": {"steps": 10}}
    reference = resumes(tmp_path, config_of(pruning=METHODS[method], **over_time), stop=4)

    kept = sum(len(value) for key, value in reference.state.items() if key.startswith("kept/"))
    dense = sum(
        value.numel() for key, value in reference.state.items() if key.startswith("weight/")
    )
    assert kept < dense, "the method did something"


def test_a_run_goes_on_without_its_mask_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mask.safetensors"
    config = config_of(pruning={"mask": str(file)})
    shapes = profile(tiny_gpt(config)).shapes
    masks = {name: torch.rand(shapes[name]) < 0.4 for name in shapes if ".fc" in name}
    save_file({name: mask for name, mask in masks.items() if mask.ndim == 2}, file)
    whole = ran((2, 1), config, tmp_path / "whole")
    ran((2, 1), config, tmp_path / "run", stop_after=STOP)
    file.unlink()
    capsys.readouterr()

    resumed = ran((1, 1), config, tmp_path / "run", resume="auto")

    assert list(resumed.losses) == [4, 5]
    same(resumed, whole)
    printed = capsys.readouterr().out
    assert " · pruned by the masks of the checkpoint · " in printed
    assert " (not pruned in the checkpoint) · " in printed


BUFFER_TYPES = [
    *(torch.complex64, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.bool),
]


class Buffered(nn.Module):
    """Parameters of eight bits, which are held in the run's precision, a buffer of every type, and
    some that lie otherwise in memory than they read; `shift` makes other values of most."""

    complex64: Tensor
    conjugate: Tensor

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.trained = nn.Parameter(torch.ones(16).to(torch.float8_e4m3fn))
        self.frozen = nn.Parameter(torch.ones(16).to(torch.float8_e5m2), requires_grad=False)
        for dtype in BUFFER_TYPES:
            bits = torch.arange(shift, shift + 6 * dtype.itemsize, dtype=torch.uint8) % 2
            self.register_buffer(str(dtype).removeprefix("torch."), bits.view(dtype).view(2, 3))
            self.register_buffer(f"{str(dtype).removeprefix('torch.')}_scalar", bits.view(dtype)[1])
        turns = torch.polar(torch.ones(6), torch.arange(6.0)).view(2, 3)
        self.register_buffer("conjugate", turns.conj())
        self.register_buffer("negative", turns.conj().imag)
        self.register_buffer("expanded", torch.tensor([2.0]).expand(4))

    def forward(self, inputs: Tensor) -> Tensor:
        turned: Tensor = self.complex64 * self.conjugate
        outputs: Tensor = self.linear(inputs)
        return outputs * turned.real.sum() * self.trained * self.frozen


def buffered(_: Config, shift: int = 0) -> Model:
    head = Layer("out", partial(nn.Linear, 16, 5), kind="head", init=random_init)
    layers = [Layer("first", partial(Buffered, shift)), head]
    return Model(layers, loss=summed_loss, name="buffered")


def buffered_modules(_: Config, shift: int = 0) -> Model:
    torch.manual_seed(1)
    return from_sequential([Buffered(shift), nn.Linear(16, 5)], summed_loss)


def thawing(_: Config | None = None, *, is_frozen: bool) -> Model:
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).requires_grad_(not is_frozen)
    return from_sequential([body, nn.Linear(16, 16), nn.Linear(16, 5)], summed_loss)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_a_body_that_is_thawed_at_a_resume_begins_as_in_torchs_optimizer(
    layout: Layout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def config(steps: int) -> Config:
        return tiny_config(
            batch={"global_batch_size": 12, "microbatch_size": 3},
            pruning={"sparsity": 0.0},
            optimizer={"clip_norm": 1e6, "weight_decay": 0.0, "learning_rate": 1e-2},
            schedule={"warmup_steps": 0, "decay": "constant"},
            train={"steps": steps},
            checkpoint={"every": 3},
        )

    def run(steps: int, *, is_frozen: bool, resume: str | None = "auto") -> Ran:
        return ran(
            layout,
            config(steps),
            tmp_path / "run",
            model=partial(thawing, is_frozen=is_frozen),
            data=vector_data(),
            resume=resume,
        )

    frozen = run(3, is_frozen=True, resume=None)
    assert not any("/0.0." in name for name in frozen.state)
    run(4, is_frozen=False)
    lines = capsys.readouterr().out
    thawed = run(6, is_frozen=False)  # resumes once more, with the count of its own
    assert "axsparse: trained from here on, with fresh optimizer state: 0.0.weight, 0.0.b" in lines
    assert "trained from here on" not in capsys.readouterr().out

    given = map(given_module, thawing(is_frozen=True).layers)
    module: Any = nn.Sequential(*(each for each in given if each is not None))
    groups = [{"params": list(module[1:].parameters())}]
    stepper = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, betas=config(1).optimizer.betas)
    data = vector_data()
    for step in range(6):
        if step == 3:
            module.requires_grad_(requires_grad=True)
            stepper.add_param_group({"params": list(module[0].parameters())})
        stepper.zero_grad()
        inputs, targets = data.read(samples_of_step(len(data), 12, step, 11))
        (summed_loss(module(*inputs), targets) / 12).backward()
        stepper.step()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(
            thawed.state[f"master/{name}"].view(weight.shape), weight.detach(), rtol=0, atol=2e-5
        )

    again = run(7, is_frozen=True)
    said = "no longer trained, and kept in the precision of the run: 0.0.weight, 0.0.bias"
    assert said in capsys.readouterr().out
    assert again.losses and not any("/0.0." in name for name in again.state)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_a_pruned_weight_that_is_frozen_and_thawed_keeps_its_mask(
    layout: Layout, tmp_path: Path
) -> None:
    def run(steps: int, *, is_frozen: bool, resume: str | None = "auto") -> Ran:
        config = tiny_config(batch=FEW_MICROBATCHES, train={"steps": steps})
        model = partial(thawing, is_frozen=is_frozen)
        run_dir, data = tmp_path / "run", vector_data()
        return ran(layout, config, run_dir, model=model, data=data, resume=resume)

    begun = run(1, is_frozen=False, resume=None)
    for steps in (2, 3):
        run(steps, is_frozen=True)
    thawed = run(4, is_frozen=False)

    positions = begun.state["kept/0.0.weight"]
    assert 0 < len(positions) < 16 * 16
    assert torch.equal(thawed.state["kept/0.0.weight"], positions)


@pytest.mark.parametrize("method", ["iterative to step 1", "early-bird to step 1"])
def test_a_thawed_weight_is_rewound_to_the_value_that_it_was_frozen_with(
    method: str, tmp_path: Path
) -> None:
    module = given_module(thawing(is_frozen=True).layers[0])
    assert module is not None
    name, start_D = "0.0.weight", module.get_parameter("0.weight").detach().view(-1)
    rewound = list[bool]()

    def note(trainer: Trainer) -> None:
        state = trainer.layers[0].state
        if name in state.by_full_name and state.by_full_name[name].kept < start_D.numel():
            rewound.append(torch.equal(state.master(name), start_D[state.mask(name)]))

    for is_frozen in (True, False):
        ran(
            (1, 1),
            config_of(pruning=METHODS[method], train={"steps": 10}),
            tmp_path / "run",
            model=partial(thawing, is_frozen=is_frozen),
            data=vector_data(),
            resume=None if is_frozen else "auto",
            stop_after=STOP if is_frozen else None,
            look=around_step(note),
        )

    assert rewound[0] and not rewound[-1]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("model", "after"), [(buffered, (2, 1)), (buffered_modules, (1, 2))])
def test_buffers_of_every_type_go_on(
    model: Callable[..., Model], after: Layout, tmp_path: Path
) -> None:
    """In place of those that the resumed model begins with."""
    config = config_of(batch={"global_batch_size": 12, "microbatch_size": 3})
    stopped = ran(
        (1, 2), config, tmp_path / "run", stop_after=STOP, model=model, data=vector_data()
    )

    loaded = ran(
        after,
        settings(config, train={"steps": STOP}),
        tmp_path / "run",
        resume="auto",
        model=partial(model, shift=1),
        data=vector_data(),
    )

    assert len(stopped.buffers) == 2 * len(BUFFER_TYPES) + 3
    assert loaded.buffers.keys() == stopped.buffers.keys()
    for name, buffer in stopped.buffers.items():
        found, wanted = (
            tensor.resolve_conj().resolve_neg() for tensor in (loaded.buffers[name], buffer)
        )
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found, wanted))), name


def evaluations(run: Path) -> list[tuple[int, float]]:
    records = records_of(run, "eval_loss")
    return [(record["step"], record["eval_loss"]) for record in records]


@pytest.mark.parametrize("stop", by_default([3], [3, 4]))
def test_every_evaluation_is_there_once(stop: int, tmp_path: Path) -> None:
    """Also the evaluation of the step after which a run was stopped, and of a run that has
    ended."""
    train = {"steps": 6, "eval_every": 2, "eval_steps": 1, "eval_first": True}
    config = config_of(train=train)
    ended = settings(config, checkpoint={"every": 6})
    validation = token_data(12)
    ran((1, 1), config, tmp_path / "whole", validation=validation)

    ran((1, 1), config, tmp_path / "run", stop_after=stop, validation=validation)
    ran((2, 1), ended, tmp_path / "run", resume="auto", validation=validation)
    ran((1, 1), ended, tmp_path / "run", resume="auto", validation=validation)

    assert [step for step, _ in evaluations(tmp_path / "run")] == [0, 2, 4, 6]
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


# -- a signal that comes between steps ------------------------------------------------------


def hears_at_once(trainer: Trainer) -> None:
    """The signal comes to the last rank while the run starts."""
    if trainer.coords.rank == trainer.coords.grid.size - 1:
        trainer._stop.receive(signal.SIGUSR1)


def hears_in_evaluation(after: int) -> Callable[[Trainer], None]:
    """The signal comes to the last rank while it evaluates after this number of steps."""

    def install(trainer: Trainer) -> None:
        evaluate = trainer.evaluate

        def hearing() -> Evaluation | None:
            if trainer.steps_done == after:
                hears_at_once(trainer)
            return evaluate()

        vars(trainer)["evaluate"] = hearing

    return install


def steps_saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("*")}


GRADUAL = {"method": "gradual", "interval": 2, "until_step": 3}
STOPPED: list[tuple[Callable[[Trainer], None], dict[str, Any], list[int]]] = [
    (hears_at_once, {}, []),
    (hears_in_evaluation(0), {}, []),
    (hears_in_evaluation(2), {}, [1, 2]),
    (hears_in_evaluation(2), GRADUAL, [1, 2]),
]
"""When the signal comes, how is pruned, and the steps that are done."""


@pytest.mark.parametrize(("look", "pruning", "done"), by_default(STOPPED[::3], STOPPED))
def test_a_run_that_is_stopped_between_steps_does_no_other_and_goes_on(
    look: Callable[[Trainer], None], pruning: dict[str, Any], done: list[int], tmp_path: Path
) -> None:
    train = {"steps": 4, "eval_every": 2, "eval_steps": 1, "eval_first": True}
    config, validation = config_of(train=train, pruning=pruning), token_data(12)
    whole = ran((2, 2), config, tmp_path / "whole", validation=validation)

    stopped = ran((2, 2), config, tmp_path / "run", look=look, validation=validation)
    resumed = ran((1, 2), config, tmp_path / "run", resume="auto", validation=validation)

    assert list(stopped.losses) == done
    assert steps_saved(tmp_path / "run") == {f"step-{step}" for step in done[-1:]}
    if not done:
        assert stopped.stopped == (
            "stopped before the first step, with nothing to save; start it again"
        )
    same(resumed, whole)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


@pytest.mark.parametrize(
    "look", by_default([hears_at_once], [hears_at_once, hears_in_evaluation(2)])
)
def test_a_run_that_is_stopped_where_it_went_on_does_no_step_and_saves_nothing_again(
    look: Callable[[Trainer], None], tmp_path: Path
) -> None:
    config = config_of(train={"steps": 3, "eval_every": 2, "eval_steps": 1})
    validation = token_data(12)
    whole = ran((2, 1), config, tmp_path / "whole", validation=validation)
    # Without pruning over time, the evaluation after the step is left to the run that goes on.
    ran((2, 1), config, tmp_path / "run", stop_after=2, validation=validation)
    before = (tmp_path / "run" / "checkpoints" / "step-2").stat().st_ino

    again = ran((2, 1), config, tmp_path / "run", look=look, resume="auto", validation=validation)
    after = (tmp_path / "run" / "checkpoints" / "step-2").stat().st_ino
    resumed = ran((2, 1), config, tmp_path / "run", resume="auto", validation=validation)

    assert again.losses == {} and after == before
    assert again.stopped is not None and again.stopped.startswith("stopped after step 2, saved in ")
    assert list(resumed.losses) == [3]
    same(resumed, whole)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")


def test_a_run_of_its_own_that_is_stopped_at_once_saves_what_it_began_with(tmp_path: Path) -> None:
    whole = ran((1, 1), config_of(), tmp_path / "whole")
    ran((1, 1), config_of(), tmp_path / "first", stop_after=2)
    there = str(tmp_path / "first" / "checkpoints" / "step-2")

    stopped = ran((1, 1), config_of(), tmp_path / "own", look=hears_at_once, resume=there)
    resumed = ran((1, 1), config_of(), tmp_path / "own", resume="auto")

    assert stopped.losses == {} and steps_saved(tmp_path / "own") == {"step-2"}
    assert list(resumed.losses) == [3, 4, 5]
    same(resumed, whole)
