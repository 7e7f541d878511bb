"""Checks one generated case: trains it on one stage, under a layout, and resumes it under
another."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from fuzz.model_generator import Case, Cut, make_config, make_data, make_model, shapes_of, smaller
from fuzz.model_pieces import PIECES
from support.resuming import Ran, ran
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Model
from axsparse.models.model_profile import ModelProfile, profile
from axsparse.models.module_buffers import slots
from axsparse.runtime.errors import AxsparseError, ConfigError, TrainingError
from axsparse.runtime.grid import Grid
from axsparse.samo.precision import DTYPES
from axsparse.samo.state_bytes import StateFormat, stage_bytes
from axsparse.tensor_parallel.dry_run import profile_of_tp_shard
from axsparse.training.evaluation import Evaluation
from axsparse.training.trainer import Trainer

ROUNDING = 2e-4
"""Of the first step's loss and norm, against additions in torch's own order."""
NOISE = 2e-7
"""Relative, of weights: what it changes of the first step, rounding may change several times."""
DRAWS = {"dropout"}
"""Pieces of cut layers with random numbers."""


class FoundError(AssertionError):
    """A defect that a case shows."""


def judge(case: Case, folder: Path) -> str:
    """How a case went: "ran", or "refused: …" at the start. Raises what shows a fault."""
    rmtree(folder, ignore_errors=True)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        return Judgement(case, folder).judge()


class Judgement:
    """The runs of one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.model = make_model(case)
        self.data = make_data(case)
        self.profiles: dict[tuple[int, int], ModelProfile] = {}
        """By number of tensor-parallel ranks and rank."""
        self.trainers: list[Trainer] = []
        self.by_hand: list[tuple[float, float]] = []
        """Loss and norm of the first step in plain torch, and with noise in the weights."""

    def judge(self) -> str:
        case = self.case
        try:
            whole = Cut((len(case.layers),), members=case.members)
            one = self.run(whole, make_config(case), "one", look=self.look)
        except ConfigError as refusal:
            return self.rejected(refusal)
        except TrainingError as failure:
            for ends in ("nan", "not finite", "early-bird drew no mask"):
                if ends in str(failure):
                    return f"ended: {ends}"
            raise
        except AxsparseError:
            raise
        except Exception as failure:
            self.torch_rejects(failure)
            raise
        self.check_first_step(one)
        evaluated = self.evaluated()
        first, second = case.cuts
        try:
            part = self.run(first, make_config(case, first), "cut", stop_after=case.stop_after)
        except ConfigError as refusal:
            return f"with other settings {self.rejected(refusal)}"
        self.compare("the cut", part, one)
        if part.stopped is None:
            raise FoundError("it did not stop")
        try:
            rest = self.run(second, make_config(case, second), "cut", resume="auto")
        except ConfigError as refusal:
            return f"with other settings {self.rejected(refusal)}"
        self.compare("the resumption", rest, one)
        if str(self.evaluated()) != str(evaluated):
            raise FoundError(f"evaluations: {self.evaluated()} is not {evaluated}")
        return "ran"

    def run(self, cut: Cut, config: Config, name: str, **options: Any) -> Ran:
        self.trainers.clear()
        options.setdefault("look", self.trainers.append)
        found = ran(
            cut.grid(self.case.replicas),
            config,
            self.folder / name,
            model=lambda _: self.model,
            data=self.data,
            validation=self.data,
            order=cut.order,
            **options,
        )
        for trainer in self.trainers:
            check_bytes(trainer, self.survey_for(trainer))
        return found

    @cached_property
    def whole(self) -> ModelProfile:
        return profile(self.model)

    def survey_for(self, trainer: Trainer) -> ModelProfile:
        """The survey of a tensor-parallel rank's part of the model."""
        run, coords = trainer.parts.plan, trainer.parts.coords
        if not run.shards:
            return self.whole
        key = coords.grid.g_tensor, coords.tp_rank
        if key not in self.profiles:
            tp_rank = Grid(1, 1, coords.grid.g_tensor).coords(coords.tp_rank)
            found = profile_of_tp_shard(self.model, self.whole, tp_rank, run.dtype)
            self.profiles[key] = found
        return self.profiles[key]

    def look(self, trainer: Trainer) -> None:
        self.trainers.append(trainer)
        case = self.case
        draws = any(
            recipe.piece in DRAWS or (recipe.piece in PIECES and PIECES[recipe.piece].random)
            for recipe in case.layers
        ) or any(
            isinstance(module, nn.Dropout)
            for layer in trainer.parts.layers
            for module in layer.module.modules()
        )
        pruning = case.config["pruning"]
        draws_first = pruning.get("at_step", 0) == 0 and pruning["method"] in (
            "snip",
            "early-bird",
            "gradual",
            "iterative",
        )
        # Modules of `from_sequential` come without memory, and to_empty would part shared weights.
        is_plain = (
            case.replicas == 1 and case.config["precision"] == "fp32" and case.start == "layers"
        )
        if is_plain and not draws and not draws_first:
            self.by_hand = [first_step(case, self.model, trainer, noise) for noise in (0, NOISE)]

    # -- what is compared ---------------------------------------------------------------

    def check_first_step(self, one: Ran) -> None:
        if not self.by_hand or not math.isfinite(one.losses[1]):
            return
        ours = (one.losses[1], one.norms[1])
        for mine, by_hand, noisy in zip(ours, *self.by_hand, strict=True):
            room = max(1e-6, 4 * abs(by_hand - noisy))
            if not math.isclose(mine, by_hand, rel_tol=ROUNDING, abs_tol=room):
                raise FoundError(f"the first step: {ours} is not torch's {self.by_hand[0]}")

    def compare(self, what: str, ours: Ran, one: Ran) -> None:
        """Losses and norms of the steps that were done; all state, if that is the end."""
        for name in ("losses", "norms", "scales"):
            mine, other = getattr(ours, name), getattr(one, name)
            expected = {step: other.get(step) for step in mine}
            if str(mine) != str(expected):
                raise FoundError(f"{what}: {name}: {mine} is not {expected}")
        if not ours.losses:
            raise FoundError(f"{what}: no step was done")
        if ours.stopped is not None:
            return
        if ours.progress != one.progress:
            raise FoundError(f"{what}: progress: {ours.progress} is not {one.progress}")
        ties = {tie.second: tie.first for tie in self.model.ties}
        for key, value in ours.state.items():
            kind, _, name = key.partition("/")
            owner = name if key in one.state else ties[name]
            if not equal(value, one.state[f"{kind}/{owner}"]):
                raise FoundError(f"{what}: state: {key} differs")
        persistent = {b.name for info in self.whole.layers for b in info.buffers if b.persists}
        if ours.buffers.keys() != one.buffers.keys():
            raise FoundError(f"{what}: buffers: other names")
        for name in persistent:
            if not equal(ours.buffers[name], one.buffers[name]):
                raise FoundError(f"{what}: buffers: {name} differs")

    def evaluated(self) -> list[Evaluation]:
        found = [trainer.last_evaluation for trainer in self.trainers]
        return [evaluation for evaluation in found if evaluation is not None][-1:]

    # -- refusals -----------------------------------------------------------------------

    def rejected(self, refusal: ConfigError) -> str:
        """The reason, without what differs between models; it must name layer or setting."""
        told = str(refusal)
        if not re.match(
            r"(layer \S+|loss|tie .*|model|parameter .*|[\w.]+\.[\w.]+|sequential)"
            r"(?: \(.*?\))?: ",
            told,
        ):
            raise FoundError(f"a refusal that names no layer: {told}")
        return "refused: " + re.sub(r"'[^']*'|\d+(\.\w+)*", "#", told)[:110]

    def torch_rejects(self, failure: Exception) -> None:
        """Raise NotAModelError if plain torch cannot run the model either."""
        try:
            first_step(self.case, self.model, None)
        except Exception as plain:
            if type(plain) is type(failure):
                raise NotAModelError(str(plain)) from failure


class NotAModelError(Exception):
    """Torch itself cannot run the model that was generated."""


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Copied, since one entry of an expanded tensor counts as dense and cannot be viewed as bytes.
    dense = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1)) for t in (one, other)]
    return torch.equal(*(t.view(torch.uint8) for t in dense))


def check_bytes(trainer: Trainer, profiled: ModelProfile) -> None:
    """The bytes of the live state equal the formula's."""
    parts, config, run = trainer.parts, trainer.config, trainer.parts.plan
    here = {layer.spec.name for layer in parts.layers}
    ties = profiled.ties
    kept = {
        ties.get(tensor.name, tensor.name): tensor.kept
        for layer in parts.layers
        for tensor in layer.state.tensors
        if tensor.kept < tensor.parameter.numel()
    }
    sharded = config.samo.zero_stage
    trained = [layer.state for layer in parts.layers if layer.state.tensors]
    expected = stage_bytes(
        [layer for layer in profiled.layers if layer.name in here],
        ties,
        kept,
        StateFormat(
            half=DTYPES[config.precision] != torch.float32,
            gradient_bytes=trained[0].accumulator.itemsize if trained else 4,
            moments=len(run.optimizer.moments),
            index=config.samo.index,
            replicas=parts.coords.grid.g_data if sharded else 1,
        ),
        parts.coords.replica if sharded else 0,
    )
    if trainer.state_bytes() != expected:
        raise FoundError(f"bytes: {trainer.state_bytes()} is not {expected}")


def first_step(
    case: Case, model: Model, trainer: Trainer | None, noise: float = 0.0
) -> tuple[float, float]:
    """Loss and norm of the first step in plain torch, from the trainer's start values, which are
    multiplied by noise."""
    chance = torch.Generator().manual_seed(1)
    config = make_config(case)
    dtype = DTYPES[config.precision]
    modules, parameters, masks = [], dict[str, nn.Parameter](), dict[str, Tensor]()
    ties = {tie.second: tie.first for tie in model.ties}
    layers = [] if trainer is None else trainer.parts.layers
    states = {name: layer.state for layer in layers for name in layer.state.by_full_name}
    for number, layer in enumerate(model.layers):
        module = layer.build().train()
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module = module.to_empty(device="cpu")
        if trainer is not None:
            built = layers[number]
            theirs = dict(built.module.named_parameters())
            for local, parameter in module.named_parameters():
                name = f"{layer.name}.{local}"
                name = ties.get(name, name)
                if name in states:
                    parameter.data.copy_(states[name].dense_weight(name))
                    masks[name] = states[name].mask(name).view(parameter.shape)
                else:  # frozen
                    parameter.data.copy_(theirs[local].detach())
                parameter.data.mul_(1 + noise * torch.randn(parameter.shape, generator=chance))
            for mine, their in zip(slots(module), slots(built.module), strict=True):
                mine.put(their.tensor.clone())
        elif dtype != torch.float32:
            module.to(dtype)
        parameters |= {f"{layer.name}.{n}": p for n, p in module.named_parameters()}
        modules.append(module)
    batch = config.batch
    samples = samples_of_step(
        len(case_data := make_data(case)), batch.global_batch_size, 0, config.seed
    )
    share = batch.global_batch_size // case.replicas
    total = 0.0
    for start in range(0, share, batch.microbatch_size):
        inputs, targets = case_data.read(samples[start : min(start + batch.microbatch_size, share)])
        outputs: Sequence[Tensor] = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        for module in modules:
            out = module(
                *(
                    tensor * 1 if tensor.is_floating_point() else tensor.clone()
                    for tensor in outputs
                )
            )
            outputs = out if isinstance(out, (tuple, list)) else (out,)
        value = model.loss(*outputs, targets) / batch.global_batch_size
        value.backward()
        total += value.item()
    gradients: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            first = ties.get(name, name)
            gradients[first] = gradients[first] + gradient if first in gradients else gradient
    squares = sum(
        float((gradient * masks.get(name, torch.ones(()))).double().square().sum())
        for name, gradient in gradients.items()
    )
    return total, math.sqrt(squares)


# -- failures ---------------------------------------------------------------------------------


def signature(failure: BaseException) -> str:
    """The kind of a failure, the same for other models."""
    told = re.sub(r"-?\d[\d.e-]*|'[^']*'", "#", str(failure).split("\n")[0])
    return f"{type(failure).__name__}: {told[:90]}"


def reduced(case: Case, folder: Path, failure: BaseException, tries: int = 40) -> Case:
    """A smaller case that fails in the same way."""
    wanted = signature(failure)[:40]
    for _ in range(tries):
        for candidate in smaller(case):
            if candidate == case or shapes_of(candidate) is None:
                continue
            tries -= 1
            if tries < 0:
                return case
            try:
                judge(candidate, folder)
            except Exception as again:
                if signature(again)[:40] == wanted:
                    case = candidate
                    break
        else:
            return case
    return case
