"""Simulates stages that hold several pieces of the model, with and without weight gradients.

Each stage runs Megatron-LM's interleaved order of forwards and backwards. If backwards are split,
it runs weight gradients, in the order of their backwards, while its next action has no input yet
and is not known to get it within half a weight gradient, or when its memory is full.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from published.interleaved import Step, interleaved_order


class Times(NamedTuple):
    """How long actions and messages take, on every stage, in any unit."""

    forward: float
    backward: float
    """Of the gradients of inputs alone."""
    weight: float
    message: float


@dataclass(frozen=True)
class ChunkedStep:
    """A simulated step."""

    seconds: float
    held: float
    """The most that a stage held, in microbatches of all its pieces."""


@dataclass
class _Stage:
    order: list[Step]
    at: int = 0
    free: float = 0.0
    here: dict[Step, float] = field(default_factory=dict)
    """When the input of an action arrives that is announced or under way."""
    deferred: deque[int] = field(default_factory=deque)
    held: int = 0
    most: int = 0


def chunked_seconds(
    size: tuple[int, int], pieces: int, times: Times, factor: Callable[[], float], *, is_split: bool
) -> ChunkedStep:
    """Play one step of `size` stages and microbatches; `factor` draws each action's jitter.

    A split step holds no more than a whole one: forwards wait for weight gradients.
    """
    count, microbatches = size
    stages = [_Stage(interleaved_order(each, count, pieces, microbatches)) for each in range(count)]
    most = max(_most(stage.order) for stage in stages)
    for microbatch in range(microbatches):
        stages[0].here[True, 0, microbatch] = 0.0
    forward, backward, weight = (each / pieces for each in times[:3])
    queue = [(0.0, number) for number in range(count)]
    while queue:
        now, number = heapq.heappop(queue)
        stage = stages[number]
        if now < stage.free:
            continue
        step = stage.order[stage.at] if stage.at < len(stage.order) else None
        due = math.inf if step is None else stage.here.get(step, math.inf)
        is_full = step is not None and step[0] and stage.held >= most
        if stage.deferred and (is_full or due - now > 0.5 * weight):
            stage.deferred.popleft()
            stage.held -= 1
            stage.free = now + weight * factor()
            heapq.heappush(queue, (stage.free, number))
            continue
        if step is None or due == math.inf:
            continue  # woken by the next arrival
        if due > now:
            heapq.heappush(queue, (due, number))
            continue
        stage.at += 1
        is_forward, piece, microbatch = step
        length = forward if is_forward else backward if is_split else backward + weight
        stage.free = now + length * factor()
        if is_forward:
            stage.held += 1
            stage.most = max(stage.most, stage.held)
        elif is_split:
            stage.deferred.append(piece)
        else:
            stage.held -= 1
        heapq.heappush(queue, (stage.free, number))
        there, next_step = _next(number, count, step, pieces)
        if there is not None:
            edge = 0.0 if there == number else times.message
            stages[there].here[next_step] = stage.free + edge
            heapq.heappush(queue, (max(now, stages[there].free), there))
    assert all(each.at == len(each.order) and not each.deferred for each in stages), "a deadlock"
    return ChunkedStep(
        max(stage.free for stage in stages), max(stage.most for stage in stages) / pieces
    )


def _most(order: list[Step]) -> int:
    held = most = 0
    for is_forward, _, _ in order:
        held += 1 if is_forward else -1
        most = max(most, held)
    return most


def _next(number: int, count: int, step: Step, pieces: int) -> tuple[int | None, Step]:
    """The stage and the action that take a result; None at the first piece's backward."""
    is_forward, piece, microbatch = step
    if is_forward:
        if number < count - 1:
            return number + 1, step
        if piece < pieces - 1:
            return 0, (True, piece + 1, microbatch)
        return number, (False, piece, microbatch)
    if number > 0:
        return number - 1, step
    if piece > 0:
        return count - 1, (False, piece - 1, microbatch)
    return None, step
