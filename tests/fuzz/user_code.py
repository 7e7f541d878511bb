"""Draws what users write around a model: losses, data sets, callbacks, start values, and random
numbers of every source; and judges each by a few runs.

Whatever was drawn, a run is refused in one line, or it does not depend on the layout, on a
recomputation, on where it was stopped and went on, or on the state of anybody's random numbers
before it. All runs are in this process and take milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.runs import random_init, tiny_config
from torch import Tensor, nn

from axsparse.config.load import LoadedConfig
from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.data.order import samples_of_step
from axsparse.models.layer import InitFunction, Layer, Model
from axsparse.runtime.errors import AxsparseError, StoppedError
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.build import build
from axsparse.training.trainer import Trainer

WIDTH, CLASSES, SAMPLES, STEPS, CHANGES_AFTER = 6, 3, 16, 4, 1
PADDING = -100
"""The target that `F.cross_entropy` leaves out."""
STOPS = {2: (2, None), 3: (1, 3, None)}
"""After which steps the runs of a chain stop, by how many there are."""
LAYOUTS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
SOURCES = ("torch", "dropout", "python", "numpy")
LOSSES = (
    *("sum", "sum of flattened", "by class", "trained"),
    *("mean", "mean, scalar beside", "mean of flattened"),
    *(f"noise by {source}" for source in SOURCES),
)
MEANS = tuple(name for name in LOSSES if name.startswith("mean"))
COUNTS = ("none", "-1", "0", "0.5", "nan")
CALLBACKS = (
    *("none", "freezes", "thaws", "raises dropout", "starts to draw", "gradients off"),
    *("draws", "evaluates"),
)
DATA = ("plain", "padded", "two inputs", "doubles")
INITS = ("none", "keyed", "own generator", "torch", "python", "numpy")
NOISE = ("", *(f"{source} {when}" for source in SOURCES for when in ("training", "always")))
ROUNDING = 1e-5
"""Relative, of losses on several replicas, whose sums have another order."""


class FoundError(AssertionError):
    """What a program shows to be wrong."""


@dataclass(frozen=True)
class Program:
    """What a user has written; plain values, and one line of JSON."""

    noise: tuple[str, ...] = ("", "", "")
    """Of each layer: the source of its random numbers, and when it draws; "" for none."""
    declared: bool = True
    """Whether layers that draw say `random=True`."""
    loss: str = "sum"
    count: str = "none"
    """What `count_targets` returns instead of the truth."""
    data: str = "plain"
    callback: str = "none"
    init: str = "none"
    microbatch: int = 2
    recompute: int = 0
    split_backward: bool = False
    at_step: int = 0
    """When masks are drawn."""
    optimizer: str = "adamw"
    chain: tuple[tuple[int, int], ...] = ((2, 1), (1, 1))
    """Layouts of runs of which each goes on where the one before was stopped."""

    def line(self) -> str:
        changed = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        return json.dumps(changed)

    @staticmethod
    def read(line: str) -> Program:
        raw = json.loads(line)
        if "chain" in raw:
            raw["chain"] = tuple((stages, replicas) for stages, replicas in raw["chain"])
        return Program(**{**raw, "noise": tuple(raw.get("noise", ("", "", "")))})


def draw(rng: Random) -> Program:
    """A program with one to three peculiarities."""
    peculiar: dict[str, Callable[[], Any]] = {
        "noise": lambda: tuple(rng.choice(NOISE) for _ in range(3)),
        "declared": lambda: rng.random() < 0.5,
        "loss": lambda: rng.choice(LOSSES),
        "count": lambda: rng.choice(COUNTS),
        "data": lambda: rng.choice(DATA),
        "callback": lambda: rng.choice(CALLBACKS),
        "init": lambda: rng.choice(INITS),
    }
    chosen = rng.sample(sorted(peculiar), rng.choice((1, 1, 2, 2, 3)))
    return Program(
        **{name: peculiar[name]() for name in chosen},
        microbatch=rng.choice((1, 2)),
        recompute=rng.choice((0, 1)),
        split_backward=rng.random() < 0.3,
        at_step=rng.choice((0, 2)),
        optimizer=rng.choice(("adamw", "sgd")),
        chain=tuple(rng.choice(LAYOUTS) for _ in range(rng.choice((2, 2, 3)))),
    )


def items(program: Program) -> set[int]:
    """The numbers of the known faults, those in `test_user_code.py`, that a program touches."""
    noise = [each for each in program.noise if each]
    found = {
        1: program.loss.startswith("noise"),
        2: program.callback in ("raises dropout", "starts to draw"),
        3: any(each.startswith(("python", "numpy")) for each in noise),
        4: program.init not in ("none", "keyed"),
        5: any(each.endswith("always") for each in noise),
        6: program.callback == "gradients off",
        8: program.loss in MEANS,
        9: program.loss == "trained" or program.callback == "freezes",
        10: program.count != "none",
    }
    return {number for number, touched in found.items() if touched}


def smaller(program: Program) -> Iterable[Program]:
    """The program with one peculiarity less."""
    usual = Program()
    for name in asdict(program):
        if getattr(program, name) != getattr(usual, name):
            yield replace(program, **{name: getattr(usual, name)})
    for at, noise in enumerate(program.noise):
        if noise:
            yield replace(program, noise=(*program.noise[:at], "", *program.noise[at + 1 :]))


# -- what the user has written ----------------------------------------------------------------


def drawn(source: str, like: Tensor) -> Tensor:
    """Random numbers of a source, in the shape of a tensor."""
    if source == "torch":
        return torch.rand_like(like)
    if source == "dropout":
        return F.dropout(torch.ones_like(like), 0.4)
    if source == "numpy":
        return torch.from_numpy(np.random.rand(*like.shape)).to(like)
    return torch.tensor([random.random() for _ in range(like.numel())]).view_as(like)  # noqa: S311


class Noisy(nn.Module):
    """A linear layer that draws random numbers: by itself, or once a callback has raised `p`."""

    def __init__(self, noise: str, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)
        self.dropout = nn.Dropout(0.0)
        self.noise = noise
        self.p = 0.0

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = x + sum(others)
        y = self.dropout(torch.tanh(self.linear(x)))
        source, _, when = self.noise.partition(" ")
        if source and (self.training or when == "always"):
            y = y + 0.3 * drawn(source, y)
        return F.dropout(y, self.p, self.training) if self.p else y


class Summed(nn.Module):
    """The loss; some have a weight of their own, which is to be trained or refused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "trained":
            self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, logits: Tensor, *others: Tensor) -> Tensor:
        targets = others[-1]
        kind, _, source = self.kind.partition(" by ")
        if kind == "noise":
            logits = logits + 0.3 * drawn(source, logits)
        weight = torch.tensor([0.5, 1.0, 2.0]) if self.kind == "by class" else None
        reduction = "mean" if kind.startswith("mean") else "sum"
        if self.kind.endswith("flattened"):  # the last layer has made a row of each target
            targets = targets.flatten()
        total = F.cross_entropy(logits.float(), targets, weight, reduction=reduction)
        return total + len(targets) * self.scale**2 if kind == "trained" else total


class Last(nn.Module):
    """A last layer that returns something else than a row of logits a sample."""

    def __init__(self, noise: str, kind: str) -> None:
        super().__init__()
        self.inner = Noisy(noise, CLASSES)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        if self.kind.endswith("flattened"):
            return y.repeat_interleave(2, 0)
        # As mixtures of experts have a penalty beside what they predict.
        return (y, y.square().mean()) if self.kind == "mean, scalar beside" else y


def init_of(kind: str) -> InitFunction | None:
    """Start values of a parameter."""
    if kind == "none":
        return None
    if kind == "keyed":
        return random_init
    own = torch.Generator().manual_seed(7)

    def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if kind == "own generator":
            return torch.randn(shape, generator=own) * 0.3
        if kind == "torch":
            return torch.randn(shape) * 0.3
        if kind == "numpy":
            return torch.from_numpy(np.random.randn(*shape)).float() * 0.3
        return torch.tensor([random.gauss(0, 0.3) for _ in range(math.prod(shape))]).view(shape)

    return init


class Written(ArrayDataset):
    """Some points and their classes; `count_targets` may return what is not so."""

    def __init__(self, program: Program) -> None:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        if program.data == "padded":
            targets[::3] = PADDING
        if program.loss.endswith("flattened"):
            targets = torch.stack([targets, targets], 1)
        odd: dict[str, Any] = {"two inputs": (x, x.abs() / 2), "doubles": x.double()}
        super().__init__(odd.get(program.data, x), targets)
        self._said = program.count
        if program.count != "none" or program.data == "padded":
            self.targets_per_sample = None

    def count_targets(self, targets: Tensor) -> int:
        if self._said == "none":
            return int((targets != PADDING).sum())
        said: Any = float(self._said)
        return int(said) if said == said and said == int(said) else said


def make_model(program: Program) -> Model:
    makes: list[Callable[[], nn.Module]] = [
        *(partial(Noisy, noise, WIDTH) for noise in program.noise[:2]),
        partial(Last, program.noise[2], program.loss),
    ]
    init = init_of(program.init)
    layers = [
        Layer(
            f"{number}",
            make,
            kind="head" if number == 2 else "block",
            init=init,
            random=bool(noise) and program.declared,
        )
        for number, (make, noise) in enumerate(zip(makes, program.noise, strict=True))
    ]
    return Model(layers, Summed(program.loss), name="written")


def weight_of(module: nn.Module) -> nn.Parameter:
    """The matrix of a layer."""
    inner = module.inner if isinstance(module, Last) else module
    return inner.get_parameter("linear.weight")


def call_back(program: Program, trainer: Trainer, steps_done: int) -> None:
    """What the user's callback does after each step, and before the first of a run."""
    is_late = steps_done > CHANGES_AFTER
    for layer in trainer.parts.layers:
        for module in layer.module.modules():
            if isinstance(module, nn.Dropout) and program.callback == "raises dropout":
                module.p = 0.5 * is_late
            if isinstance(module, Noisy) and program.callback == "starts to draw":
                module.p = 0.5 * is_late
        if layer.spec.name == "1" and program.callback in ("freezes", "thaws"):
            weight_of(layer.module).requires_grad_(is_late == (program.callback == "thaws"))
    if program.callback == "draws":  # on each rank something else
        torch.rand(1 + trainer.parts.place.rank)
        np.random.rand(1 + trainer.parts.place.rank)
    if program.callback == "evaluates" and steps_done:
        trainer.evaluate()
    if program.callback == "gradients off" and is_late:
        torch.set_grad_enabled(False)


# -- runs ---------------------------------------------------------------------------------------


@dataclass
class Told:
    """What a run said."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    middle: dict[int, Tensor] = field(default_factory=dict)
    """The weight of the layer that callbacks freeze, by steps done."""
    scale: float | None = None
    """What a loss with a weight has for it."""
    by_hand: float | None = None
    """The first step's loss in plain torch, of one rank; None if random numbers are in it."""
    smallest: float = math.inf
    """The least magnitude of a kept weight of a pruned layer before the first step."""


def run(
    program: Program,
    layout: tuple[int, int],
    folder: Path,
    *,
    recompute: int = 0,
    chance: int = 0,
    stops: int | None = None,
    resume: str | None = None,
) -> Told:
    """Train on ranks of this process; `chance` says where everybody's random numbers begin, and
    `stops` after which step a signal comes."""
    config = tiny_config(
        model={"name": "gpt"},
        batch={"global_batch_size": 4, "microbatch_size": program.microbatch},
        pruning={"sparsity": 0.5, "at_step": program.at_step},
        optimizer={"name": program.optimizer, "learning_rate": 0.05},
        schedule={"warmup_steps": 0},
        pipeline={
            "checkpoint_activations": recompute,
            "split_backward": program.split_backward and layout[0] > 1,
        },
        train={"steps": STEPS, "eval_every": 2, "eval_steps": 1, "log_every": 1000},
        checkpoint={"every": 0},
        watchdog={"timeout": 0.0},
        run_dir=str(folder),
    )
    world: LocalWorld[None] = LocalWorld(layout[0] * layout[1])
    told, failures = Told(), list[AxsparseError]()
    source = LoadedConfig(config, "written", {"run_dir": "--run-dir"})

    def body(rank: int) -> None:
        job = Job(LocalTransport(world, rank))
        model, data = make_model(program), Written(program)
        trainer = build(
            job,
            model,
            lambda: Datasets(data, data),
            source,
            grid=Grid(*layout),
            resume=resume,
            quiet=stops is None and resume is None,
        )
        for layer in trainer.parts.layers:
            if layer.spec.kind == "head":
                continue
            kept = weight_of(layer.module).detach().abs()
            told.smallest = min(told.smallest, float(kept[kept > 0].min()))
        call_back(program, trainer, trainer.steps_done)
        if (
            layout == (1, 1)
            and resume is None
            and not any(program.noise)
            and program.count == "none"
        ):
            told.by_hand = (
                None if program.loss.startswith("noise") else by_hand(trainer, model, data)
            )

        def on_step(step: int, verdict: Any) -> None:
            told.losses[step] = verdict.loss
            call_back(program, trainer, step)
            for layer in trainer.parts.layers:
                if layer.spec.name == "1":
                    told.middle[step] = weight_of(layer.module).detach().clone()
            if step == stops and rank == 0:
                job.stop.hear(signal.SIGUSR1)

        try:
            trainer.train(
                on_step,
                on_evaluation=lambda step, found: told.evaluations.update({step: found.loss}),
            )
        except StoppedError:
            assert stops is not None
        except AxsparseError as failure:
            if not failure.on_all_ranks:
                raise
            failures.append(failure)
        for layer in trainer.parts.layers:
            for name, parameter in layer.module.named_parameters():
                told.weights[f"{layer.spec.name}.{name}"] = parameter.detach().clone()
        if isinstance(model.loss, Summed) and trainer.parts.place.is_last:
            told.scale = float(model.loss.scale) if program.loss == "trained" else None

    torch.manual_seed(chance)
    random.seed(chance)
    np.random.seed(chance)
    try:
        world.run(body)
    finally:
        torch.set_grad_enabled(True)
    if failures:
        raise failures[0]
    return told


@torch.no_grad()
def by_hand(trainer: Trainer, model: Model, data: Written) -> float:
    """The loss of the first step before any update."""
    config = trainer.config
    samples = samples_of_step(len(data), config.batch.global_batch_size, 0, config.seed)
    inputs, targets = data.read(samples)
    outputs: Any = tuple(tensor.float() for tensor in inputs)
    for layer in trainer.parts.layers:
        made = layer.module(*outputs)
        outputs = made if isinstance(made, tuple) else (made,)
    return float(model.loss(*outputs, targets)) / data.count_targets(targets)


# -- judgement ----------------------------------------------------------------------------------


def judge(program: Program, folder: Path) -> str:
    """ "ran", or "refused: …"; raises FoundError for what must not be."""
    rmtree(folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            one = run(program, (1, 1), folder / "one", chance=1)
        except AxsparseError as refusal:
            told = str(refusal)
            if "\n" in told or not told.isprintable():
                raise FoundError(f"a refusal of several lines: {told!r}") from None
            return f"refused: {told[:90]}"
        _must_be_refused(program)
        _learned(program, one)
        if program.callback == "gradients off":
            usual = run(replace(program, callback="none"), (1, 1), folder / "usual", chance=2)
            _compare("item 6: gradients were switched off", one, usual)
        other = run(program, (3, 1), folder / "three", recompute=program.recompute, chance=3)
        _compare("three stages", other, one)
        many = run(program, (1, 2), folder / "replicas", recompute=program.recompute, chance=4)
        _near("two replicas: losses", many.losses, one.losses)
        _near("two replicas: evaluations", many.evaluations, one.evaluations)
        is_exact = all(replicas == 1 for _, replicas in program.chain)
        for number, (layout, stops) in enumerate(
            zip(program.chain, STOPS[len(program.chain)], strict=True)
        ):
            ran = run(
                program,
                layout,
                folder / "chain",
                recompute=program.recompute if number % 2 else 0,
                chance=5 + number,
                stops=stops,
                resume="auto" if number else None,
            )
            name = f"run {number + 1} of a chain"
            if is_exact:
                _compare(name, ran, one, to_the_end=stops is None)
            else:
                _near(f"{name}: losses", ran.losses, one.losses)
                _near(f"{name}: evaluations", ran.evaluations, one.evaluations)
    return "ran"


def _must_be_refused(program: Program) -> None:
    if program.loss in MEANS:
        raise FoundError(f"item 8: a loss that is a mean was trained ({program.loss})")
    if program.count != "none":
        raise FoundError(f"item 10: {program.count} targets were believed")


def _learned(program: Program, one: Told) -> None:
    """The run trains what is to be trained, and nothing else."""
    if len(set(one.losses.values())) < STEPS or not all(map(math.isfinite, one.losses.values())):
        raise FoundError(f"losses: {one.losses}")
    if program.init != "none" and program.at_step == 0 and one.smallest < 0.08:
        raise FoundError(f"item 4: masks keep small weights ({one.smallest:.3f}), of another draw")
    if one.by_hand is not None and not math.isclose(one.losses[1], one.by_hand, rel_tol=ROUNDING):
        raise FoundError(f"the first loss: {one.losses[1]} is not plain torch's {one.by_hand}")
    if program.loss == "trained" and one.scale == 0.5:
        raise FoundError("item 9: the loss's own weight was not trained")
    moves = [not torch.equal(one.middle[n], one.middle[n + 1]) for n in range(2, STEPS)]
    if any(moves) if program.callback == "freezes" else not all(moves):
        raise FoundError(f"a weight moved in steps 3 and 4: {moves} ({program.callback})")


def _compare(name: str, ours: Told, one: Told, *, to_the_end: bool = True) -> None:
    """The same bits."""
    for what in ("losses", "evaluations"):
        mine, other = getattr(ours, what), getattr(one, what)
        if mine != {step: other.get(step) for step in mine} or not ours.losses:
            raise FoundError(f"{name}: {what}: {mine} is not {other}")
    for key, weight in ours.weights.items() if to_the_end else ():
        if not torch.equal(weight, one.weights[key]):
            raise FoundError(f"{name}: {key} differs")


def _near(name: str, ours: dict[int, float], one: dict[int, float]) -> None:
    """The same to rounding."""
    if not all(math.isclose(ours[n], one[n], rel_tol=ROUNDING) for n in ours):
        raise FoundError(f"{name}: {ours} is not {one}")
