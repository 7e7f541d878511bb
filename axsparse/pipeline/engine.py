"""Moves the microbatches of one replica through one stage.

The loop in `Engine._execute` follows a microbatch: take what the link has brought, ask the policy
what to run, run it on the stage, send the result over the link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.layer_runner import Tensors
from axsparse.pipeline.policy import (
    BACKWARD,
    FORWARD,
    Action,
    InOrder,
    Kind,
    Policy,
    Schedule,
    forwards,
)
from axsparse.pipeline.stage import Key, Stage
from axsparse.runtime.communication import Backoff, Direction, Event, Link, Message
from axsparse.runtime.errors import note_errors
from axsparse.runtime.gpu.device import Device
from axsparse.runtime.grid import RankCoords

MOST_UNSENT = 8
"""A stage starts no further action while more messages than this are still being sent. This
slows down a stage that is ahead in an evaluation, where it waits for no gradients."""
MOST_WAITING = 4
"""An evaluation takes no more messages from the link while this many wait for their action."""
MOST_AHEAD = 2
"""How many unfinished actions a GPU may have: one that runs and one queued behind it. With more,
the order would depend on how far the host is ahead, and not on arrivals."""
AHEAD_ALONE = 8
"""The same of a stage without neighbours, whose GPU must not wait for launches."""


@dataclass(frozen=True)
class Rank:
    """The rank that an engine runs on: where it stands and computes, how it waits and is timed."""

    coords: RankCoords
    backoff: Backoff
    phases: Phases
    gpu: Device | None = None


class _Throttled:
    """A policy that begins nothing while a stage is congested."""

    def __init__(self, policy: Policy, is_congested: Callable[[], bool]) -> None:
        self._policy, self._is_congested = policy, is_congested
        self.expects, self.arrived = policy.expects, policy.arrived

    @property
    def finished(self) -> bool:
        return self._policy.finished

    def next(self) -> Action | None:
        return None if self._is_congested() else self._policy.next()


class Engine:
    """Runs a stage as its policy says, and exchanges messages with the neighbouring stages."""

    def __init__(
        self,
        rank: Rank,
        stage: Stage,
        link: Link,
        *,
        schedule: Schedule,
        while_idle: Callable[[], None],
        around: Callable[[Policy, bool], Policy] = lambda policy, _: policy,
    ) -> None:
        """`while_idle` is called again and again while nothing can run: it advances work in the
        background, such as all-reduces. `around` is given the policy of each step and each
        evaluation, which begins nothing while this rank is congested, and whether it is an
        evaluation's; it returns the policy to run."""
        self._coords = rank.coords
        self._backoff = rank.backoff
        self._phases = rank.phases
        self._gpu = rank.gpu
        self.stage = stage
        self._link = link
        self._schedule = schedule
        self._while_idle = while_idle
        self._around = around
        self._unfinished: deque[Event] = deque()
        self._arrived: dict[Direction, deque[Message]]
        self._arrived = {direction: deque() for direction in Direction}
        """Messages that the policy has not yet received."""
        self._inbox: dict[tuple[Direction, int], Message] = {}
        self._policy: Policy | None = None
        self._taken: dict[Direction, int] = {}
        """The number of messages that the current policy has received, by direction."""

    def train(
        self,
        batch: Batch,
        divisor: float,
        loss_scale: float,
        before_gradients: Callable[[bool], None],
        *,
        together: int = 0,
    ) -> list[Tensor]:
        """Run forward and backward of all microbatches.

        Returns the losses in microbatch order on the last stage, none elsewhere: scalars on the
        device that computes. Each is the microbatch's summed loss over `divisor`, the step's global
        count of targets, so that losses and gradients add up over microbatches and replicas.
        Gradients are multiplied by `loss_scale`, losses are not. `before_gradients` is called
        before each action that makes gradients of weights; its argument says whether they belong to
        the last microbatch. Where replicas gather weights, they all run `together` microbatches, of
        which those beyond the batch are empty.
        """
        coords = self._coords
        policy = self._schedule.policy(
            stage=coords.stage,
            g_inter=coords.grid.g_inter,
            microbatches=max(together, len(batch.microbatches)),
        )
        losses: list[Tensor] = []

        def run(action: Action) -> None:
            if action.microbatch >= len(batch.microbatches):
                self._pass_on(action)
                return
            if action.kind is Kind.FORWARD:
                losses.extend(self._forward(action.microbatch, batch, divisor))
                return
            before_gradients(action.microbatch == len(batch.microbatches) - 1)
            if action.kind is Kind.BACKWARD:
                self._backward(action.microbatch, loss_scale)
            else:
                with self._phases("compute"):
                    self.stage.weight_gradients(action.microbatch)

        self._execute(policy, run)
        # A neighbour may need a message of a GPU to continue.
        while self._gpu is not None and self._link.unsent:
            self._receive()
            self._pause()
        return losses

    def evaluate(self, batch: Batch) -> list[Tensor]:
        """Run the forward of all microbatches.

        Returns, on the last stage, one fp64 vector for each microbatch in order, on the device
        that computes: its summed loss, then the count of each metric.
        """
        coords = self._coords
        actions = forwards(len(batch.microbatches))
        policy = InOrder(actions, stage=coords.stage, g_inter=coords.grid.g_inter)
        found: list[Tensor] = []

        def run(action: Action) -> None:
            microbatch = batch.microbatches[action.microbatch]
            inputs, _, _ = self._inputs(action.microbatch, batch)
            with _named(microbatch), self._phases("compute"):
                key = Key(batch.step, microbatch.first_sample)
                targets = self._targets(microbatch)
                outputs = self.stage.evaluate(inputs, key, targets)
            if self._coords.is_last:
                found.append(torch.stack([output.double() for output in outputs]))
            else:
                self._send(FORWARD, action.microbatch, outputs)

        self._execute(policy, run, is_evaluation=True)
        return found

    def awaited(self) -> list[str]:
        """The messages that this stage waits for, in words. Any thread may ask at any time."""
        policy, taken = self._policy, self._taken
        if policy is None:
            return []
        sides = {FORWARD: ("activation", -1), BACKWARD: ("gradient", 1)}
        return [
            f"{kind} {taken[direction]} from rank {self._coords.neighbour(step)}"
            for direction, (kind, step) in sides.items()
            if policy.expects(direction)
        ]

    # -- the loop -----------------------------------------------------------------------

    def _execute(
        self, policy: Policy, run: Callable[[Action], None], *, is_evaluation: bool = False
    ) -> None:
        most_waiting = MOST_WAITING if is_evaluation else math.inf
        policy = self._around(_Throttled(policy, self._is_congested), is_evaluation)
        self._taken = dict.fromkeys(Direction, 0)
        self._policy = policy
        self._backoff.reset()
        while not policy.finished:
            if len(self._inbox) + sum(map(len, self._arrived.values())) < most_waiting:
                self._receive()
            else:
                with self._phases("p2p"):
                    self._link.push()
            self._notify(policy)
            action = policy.next()
            if action is not None:
                self._phases.action = str(action)
                run(action)
                if self._gpu is not None:
                    self._unfinished.append(self._gpu.compute.record())
                self._phases.action = ""
                self._backoff.reset()
            else:
                self._pause()
        self._policy = None

    def _receive(self) -> None:
        with self._phases("p2p"):
            for message in self._link.arrivals():
                self._arrived[message.direction].append(message)

    def _is_congested(self) -> bool:
        """Whether the GPU has all actions that it may have, or the link too much to send."""
        while self._unfinished and self._unfinished[0].query():
            self._unfinished.popleft()
        is_alone = self._coords.is_first and self._coords.is_last
        most = AHEAD_ALONE if is_alone else MOST_AHEAD
        return len(self._unfinished) >= most or self._link.unsent > MOST_UNSENT

    def _notify(self, policy: Policy) -> None:
        """Pass on the messages that the policy expects; further ones wait."""
        for direction, arrived in self._arrived.items():
            while arrived and policy.expects(direction):
                message = arrived.popleft()
                self._taken[direction] += 1
                self._inbox[direction, message.microbatch] = message
                policy.arrived(direction, message.microbatch)

    def _pause(self) -> None:
        with self._phases("bubble"):
            self._while_idle()
            self._backoff.pause()

    # -- one action ---------------------------------------------------------------------

    def _forward(self, number: int, batch: Batch, divisor: float) -> list[Tensor]:
        """Run a microbatch's forward; its loss on the last stage, an empty list elsewhere."""
        microbatch = batch.microbatches[number]
        inputs, requires_grad, taught = self._inputs(number, batch)
        for tensor, needs_gradient in zip(inputs, requires_grad, strict=True):
            tensor.requires_grad_(needs_gradient)
        key = Key(batch.step, microbatch.first_sample)
        with _named(microbatch), self._phases("compute"):
            targets = self._targets(microbatch)
            taught = self.stage.teach(taught, key)
            outputs = self.stage.forward(number, inputs, key, targets, divisor, taught)
        if self._coords.is_last:
            return [outputs[0].detach()]
        self._send(FORWARD, number, (*outputs, None, *taught) if taught else outputs)
        return []

    def _backward(self, number: int, loss_scale: float) -> None:
        gradients: tuple[Tensor | None, ...] = ()
        if not self._coords.is_last:
            gradients = self._inbox.pop((BACKWARD, number)).tensors
        with self._phases("compute"):
            input_gradients = self.stage.backward(number, gradients, loss_scale)
        if not self._coords.is_first:
            self._send(BACKWARD, number, tuple(input_gradients))

    def _pass_on(self, action: Action) -> None:
        number, is_backward = action.microbatch, action.kind is Kind.BACKWARD
        if action.kind is Kind.WEIGHT:
            return
        direction = BACKWARD if is_backward else FORWARD
        self._inbox.pop((direction, number), None)
        with self._phases("compute"):
            self.stage.take_part(is_backward=is_backward)
        if not (self._coords.is_first if is_backward else self._coords.is_last):
            self._send(direction, number, ())

    def _inputs(self, number: int, batch: Batch) -> tuple[Tensors, tuple[bool, ...], Tensors]:
        """The inputs of a microbatch, for each of them whether it needs a gradient, and the inputs
        of the teacher, which in a message follow a None."""
        if self._coords.is_first:
            inputs = tuple(map(self._put, batch.microbatches[number].inputs))
            return inputs, (False,) * len(inputs), inputs
        message = self._inbox.pop((FORWARD, number))
        own = list(takewhile(lambda tensor: tensor is not None, message.tensors))
        inputs, taught = (
            tuple(tensor for tensor in part if tensor is not None)
            for part in (own, message.tensors[len(own) :])
        )
        return inputs, message.requires_grad[: len(own)], taught

    def _targets(self, microbatch: Microbatch) -> Tensor | None:
        return None if microbatch.targets is None else self._put(microbatch.targets)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor if self._gpu is None else tensor.to(self._gpu.kind, non_blocking=True)

    def _send(self, direction: Direction, number: int, tensors: tuple[Tensor | None, ...]) -> None:
        requires_grad = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
        with self._phases("p2p"):
            self._link.send(Message(direction, number, tensors, requires_grad))


def _named(microbatch: Microbatch) -> AbstractContextManager[None]:
    """Names the samples in an IndexError, such as about a label beyond the classes."""
    numbers = ", ".join(map(str, microbatch.numbers[:8]))
    return note_errors(f"samples {numbers}", IndexError)
