"""Every pruning method by a plain dense oracle: full tensors, sorted; SparseGPT as published."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from support.oracle import Oracle, Trace, mask_of_largest
from torch import Tensor

from axsparse.pruning.targets import BLOCK, kept_counts
from axsparse.runtime.seeds import keyed_generator


class MethodOracle(Oracle):
    """Draws the masks that `pruning.method` asks for, in one process, from dense tensors."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.saved: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.queue: deque[float] = deque(maxlen=5)
        self.is_drawn = False

    def run(self, steps: int) -> Trace:
        step_back = self.config.pruning.rewind_step
        for step in range(steps):
            if step == step_back and step > 0:
                self.saved = {name: p.detach().clone() for name, p in self.parameters.items()}
            if self.config.pruning.method != "early-bird":
                self._on_time(step)
            elif not self.is_drawn:
                self._look(step)
            self._step(step)
        return self._final_state()

    def prunes(self) -> list[str]:
        """Weights that are pruned, in model order, a tied one once."""
        return [name for name in self.prunable if name not in self.ties]

    # -- when -------------------------------------------------------------------------------

    def _on_time(self, step: int) -> None:
        pruning = self.config.pruning
        if pruning.method in ("gradual", "iterative"):
            assert pruning.until_step != "auto"
            rounds = (pruning.until_step - pruning.at_step) // pruning.interval
            number, rest = divmod(step - pruning.at_step, pruning.interval)
            if rest or not 1 <= number <= rounds:
                return
            final = pruning.sparsity
            if pruning.method == "gradual":
                sparsity = final * (1 - (1 - number / rounds) ** 3)
            else:
                sparsity = 1 - (1 - final) ** (number / rounds)
            self._apply(self._draw(self._scores(step), sparsity), step)
        elif step == pruning.at_step:
            self._apply(self._draw(self._scores(step), pruning.sparsity), step)

    def _look(self, step: int) -> None:
        pruning = self.config.pruning
        since = step - max(pruning.at_step, self.config.schedule.warmup_steps)
        if since < 0 or since % pruning.interval:
            return
        masks = self._draw(self._scores(step), pruning.sparsity)
        if self.last:
            changed = sum(int((masks[name] != self.last[name]).sum()) for name in masks)
            of = 2 * sum(int(mask.sum()) for mask in masks.values())
            self.queue.append(changed / of)
        self.last = masks
        if len(self.queue) == 5 and max(self.queue) < pruning.threshold:
            self.is_drawn = True
            self._apply(masks, step)

    # -- which ------------------------------------------------------------------------------

    def _scores(self, step: int) -> dict[str, Tensor]:
        names, method = self.prunes(), self.config.pruning.method
        weights = {name: self.parameters[name].detach() for name in names}
        if method == "random":
            return {
                name: torch.rand(
                    weight.numel(), generator=keyed_generator(self.config.seed, name, "mask")
                ).view_as(weight)
                for name, weight in weights.items()
            }
        if method == "snip":
            _, gradients = self._gradients(step)
            return {name: (weight * gradients[name]).abs() for name, weight in weights.items()}
        return {name: weight.abs() for name, weight in weights.items()}

    def _draw(self, scores: dict[str, Tensor], sparsity: float) -> dict[str, Tensor]:
        flat = {
            name: torch.where(self.masks[name], score, -1.0).view(-1)
            if name in self.masks
            else score.reshape(-1)
            for name, score in scores.items()
        }
        distribution = self.config.pruning.distribution
        if distribution == "global":
            every = torch.cat(list(flat.values()))
            keep = every.numel() - round(sparsity * every.numel())
            mask = mask_of_largest(every, keep)
            parts = mask.split([one.numel() for one in flat.values()])
            return {n: m.view_as(scores[n]) for n, m in zip(flat, parts, strict=True)}
        shapes = {name: tuple(score.shape) for name, score in scores.items()}
        keeps = kept_counts(shapes, sparsity, distribution=distribution)
        return {
            name: mask_of_largest(flat[name], keeps[name]).view_as(scores[name]) for name in flat
        }

    def _apply(self, masks: dict[str, Tensor], step: int) -> None:
        for name in self.prunable:
            self.masks[name] = masks[self.ties.get(name, name)]
        back = self.config.pruning.rewind_step
        rewinds = back != "never" and (back != "auto" or self.config.pruning.method == "iterative")
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                if rewinds:
                    source = self.saved if isinstance(back, int) and back > 0 else self.start
                    parameter.copy_(source[name])
                parameter.mul_(self.masks.get(name, torch.ones(())))
            for value in self._moments(parameter).values():
                value.mul_(0.0 if rewinds else self.masks.get(name, torch.ones(())))
        if rewinds:
            self.schedule_start = step
            self.optimizer.state.clear()


def published(
    weight: Tensor, inputs: list[Tensor], sparsity: float, pattern: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Frantar and Alistarh 2023, algorithm 1, with the running mean and threshold of their code."""
    columns = weight.shape[1]
    hessian, samples = torch.zeros(columns, columns), 0
    for x in inputs:
        hessian *= samples / (samples + len(x))
        samples += len(x)
        scaled = (2 / samples) ** 0.5 * x.t()
        hessian += scaled @ scaled.t()
    weight = weight.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    places = torch.arange(columns)
    hessian[places, places] += 0.01 * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    inverse = torch.linalg.cholesky(inverse, upper=True)
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        w, errors = weight[:, begin:end].clone(), torch.zeros(weight.shape[0], end - begin)
        inside = inverse[begin:end, begin:end]
        if pattern is None:
            score = w**2 / inside.diagonal() ** 2
            threshold = score.flatten().sort().values[int(score.numel() * sparsity)]
            gone[:, begin:end] = score <= threshold
        for i in range(end - begin):
            if pattern is not None and i % pattern[1] == 0:
                n, m = pattern
                score = w[:, i : i + m] ** 2 / inside.diagonal()[i : i + m] ** 2
                least = score.topk(m - n, dim=1, largest=False).indices
                gone[:, begin:end].scatter_(1, i + least, True)
            kept = w[:, i].clone()
            kept[gone[:, begin + i]] = 0
            error = (w[:, i] - kept) / inside[i, i]
            w[:, i:] -= error.unsqueeze(1) @ inside[i, i:].unsqueeze(0)
            errors[:, i] = error
            weight[:, begin + i] = kept
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    return ~gone, weight
