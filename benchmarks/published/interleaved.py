"""Simulates Megatron-LM's interleaved 1F1B (Narayanan et al., 2021, section 2.2.2).

Each of p stages holds v pieces of the model, piece c of stage s being number c p + s of p v. The
microbatches go in groups of p through the pieces of a stage: forwards of the first p through piece
0, then through piece 1, and so on; backwards in the opposite order of pieces. The order on a stage
is known beforehand: 2 (p - s - 1) + (v - 1) p forwards, then a forward and a backward in turn.
Where p does not divide the microbatches, the groups have some more than p, the first ones most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from axsparse.pipeline.simulator import MessageCost, PipelineRun, StageRun

Step: TypeAlias = tuple[bool, int, int]
"""Whether it is a forward, the piece on its stage, and the microbatch."""


def interleaved_order(stage: int, stages: int, chunks: int, microbatches: int) -> list[Step]:
    """The actions of a stage, first to last."""
    number = max(1, microbatches // stages)
    ends = [-(-microbatches * group // number) for group in range(number + 1)]
    groups = [range(first, second) for first, second in pairwise(ends)]
    forwards = [(True, piece, m) for g in groups for piece in range(chunks) for m in g]
    backwards = [
        (False, chunks - 1 - piece, m) for g in groups for piece in range(chunks) for m in g
    ]
    first = warm_up(stage, stages, chunks, microbatches)
    order = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - first :]


def warm_up(stage: int, stages: int, chunks: int, microbatches: int) -> int:
    """How many forwards a stage runs before its first backward; one more is in flight at most."""
    total = chunks * microbatches
    if microbatches <= stages:
        return total
    group = -(-microbatches // (microbatches // stages))
    return min(total, 2 * (stages - stage - 1) + (chunks - 1) * group)


def simulate_interleaved(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    edges: Sequence[MessageCost],
    microbatches: int,
) -> PipelineRun:
    """Play one step.

    `forward[stage][piece]` and `backward` are seconds of a microbatch. `edges[s]` is the cost of a
    message from stage s to s + 1 or back; the last one is that between the last stage and the
    first. As in `simulator`, sender and receiver are each busy with a message.
    """
    stages, chunks = len(forward), len(forward[0])
    orders = [interleaved_order(s, stages, chunks, microbatches) for s in range(stages)]
    arrived: list[dict[Step, float]] = [{} for _ in range(stages)]
    for microbatch in range(microbatches):
        arrived[0][True, 0, microbatch] = 0.0
    runs = [StageRun() for _ in range(stages)]
    at = [0] * stages
    waiting = deque(range(stages))
    while waiting:
        stage = waiting.popleft()
        run, order, inbox = runs[stage], orders[stage], arrived[stage]
        while at[stage] < len(order):
            step = order[at[stage]]
            ready = inbox.pop(step, None)
            if ready is None:
                break
            at[stage] += 1
            is_forward, piece, microbatch = step
            lengths = forward if is_forward else backward
            begin = max(run.end, ready)
            if ready > 0.0:
                taken = _taken(edges, stage, stages, is_forward, piece, chunks)
                begin += taken
                run.p2p += taken
            end = begin + lengths[stage][piece]
            run.compute += lengths[stage][piece]
            target = _target(stage, stages, is_forward, piece, chunks)
            if target is None:
                if is_forward:
                    # The last piece makes the gradient itself; a message never arrives.
                    arrived[stage][False, piece, microbatch] = 0.0
            else:
                there, next_piece, edge = target
                cost = edges[edge]
                end += cost.handling
                run.p2p += cost.handling
                arrived[there][is_forward, next_piece, microbatch] = end + cost.latency
                if there not in waiting:
                    waiting.append(there)
            run.end = end
    assert all(done == len(order) for done, order in zip(at, orders, strict=True)), "a deadlock"
    return PipelineRun(max(run.end for run in runs), runs)


def _target(
    stage: int, stages: int, is_forward: bool, piece: int, chunks: int
) -> tuple[int, int, int] | None:
    """The stage, piece and edge that a result goes to; None at the end of the model."""
    if is_forward:
        if stage < stages - 1:
            return stage + 1, piece, stage
        return None if piece == chunks - 1 else (0, piece + 1, stages - 1)
    if stage > 0:
        return stage - 1, piece, stage - 1
    return None if piece == 0 else (stages - 1, piece - 1, stages - 1)


def _taken(
    edges: Sequence[MessageCost],
    stage: int,
    stages: int,
    is_forward: bool,
    piece: int,
    chunks: int,
) -> float:
    """Seconds in which the receiver handles the message with an action's input."""
    if is_forward:
        if stage > 0:
            return edges[stage - 1].handling
        return edges[-1].handling if piece > 0 else 0.0
    if stage < stages - 1:
        return edges[stage].handling
    return edges[-1].handling if piece < chunks - 1 else 0.0
