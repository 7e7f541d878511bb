"""Executes a policy: takes in what has arrived, runs what the policy names, sends the result."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.actions import Action
from axsparse.pipeline.policy import ForwardOnly, Policy
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Key, Stage
from axsparse.runtime.communication import Backoff, Direction, Event, Link, Message
from axsparse.runtime.gpu.device_protocol import Device
from axsparse.runtime.grid import Place

MOST_UNSENT, MOST_WAITING = 8, 4
"""In an evaluation no gradient comes back to slow a stage down; how many of its messages are on
the way does, since the next stage takes in no more than it has use for."""
MOST_AHEAD = 2
"""Actions that a GPU has not finished: one that runs and one behind it. With more, the host's head
start would decide what runs next, and not what has arrived."""


class Engine:
    """Moves the microbatches of one replica through one stage."""

    def __init__(
        self,
        place: Place,
        stage: Stage,
        link: Link,
        backoff: Backoff,
        phases: Phases,
        *,
        schedule: Schedule,
        while_idle: Callable[[], None],
        gpu: Device | None = None,
    ) -> None:
        """`while_idle` is called between polls when nothing can run: work that only needs
        a push now and then. `gpu` is where the stage computes; None: on the CPU."""
        self._place = place
        self._stage = stage
        self._link = link
        self._backoff = backoff
        self._phases = phases
        self._schedule = schedule
        self._while_idle = while_idle
        self._gpu = gpu
        self._under_way: deque[Event] = deque()
        self._arrived: dict[Direction, deque[Message]] = {d: deque() for d in Direction}
        self._inbox: dict[Action, Message] = {}
        self._policy: Policy | None = None
        self._taken: dict[Direction, int] = {}

    def train(
        self,
        batch: Batch,
        divisor: float,
        loss_scale: float,
        before_last_backward: Callable[[], None],
    ) -> list[Tensor]:
        """Forward and backward of all microbatches; on the last stage their losses, in order, as
        scalars where the stage computes.

        Each loss is the microbatch's summed loss over `divisor`, the step's global count
        of targets, so that losses and gradients add up over microbatches and replicas.
        Gradients, not losses, are multiplied by `loss_scale`.
        """
        place = self._place
        policy = self._schedule.policy(
            stage=place.stage,
            g_inter=place.grid.g_inter,
            microbatches=len(batch.microbatches),
        )
        losses: list[Tensor] = []

        def run(action: Action) -> None:
            if action.direction is Direction.FORWARD:
                losses.extend(self._forward(action.microbatch, batch, divisor))
                return
            if action.microbatch == len(batch.microbatches) - 1:
                before_last_backward()
            self._backward(action.microbatch, loss_scale)

        self._execute(policy, run)
        self._see_off()
        return losses

    def evaluate(self, batch: Batch) -> list[Tensor]:
        """Forward only; on the last stage, for each microbatch in order, the summed loss and
        what each metric counted, fp64 where the stage computes."""
        policy = ForwardOnly(stage=self._place.stage, microbatches=len(batch.microbatches))
        found: list[Tensor] = []

        def run(action: Action) -> None:
            microbatch = batch.microbatches[action.microbatch]
            inputs, _ = self._inputs(action.microbatch, batch)
            with self._phases("compute"):
                outputs = self._stage.evaluate(inputs, self._targets(microbatch))
            if self._place.is_last:
                found.append(torch.stack([output.double() for output in outputs]))
            else:
                self._send(Direction.FORWARD, action.microbatch, outputs)

        self._execute(policy, run, MOST_WAITING)
        return found

    def awaited(self) -> list[str]:
        """The messages that are still to come before this stage can go on; another thread may
        ask, at any moment."""
        policy, taken = self._policy, self._taken
        if policy is None:
            return []
        sides = {Direction.FORWARD: ("activation", -1), Direction.BACKWARD: ("gradient", 1)}
        return [
            f"{kind} {taken[direction]} from rank {self._place.rank + step}"
            for direction, (kind, step) in sides.items()
            if policy.expects(direction)
        ]

    def _execute(
        self, policy: Policy, run: Callable[[Action], None], most_waiting: float = math.inf
    ) -> None:
        self._taken = dict.fromkeys(Direction, 0)
        self._policy = policy
        self._backoff.reset()
        while not policy.finished:
            if self._waiting < most_waiting:
                self._look()
            else:
                with self._phases("p2p"):
                    self._link.push()
            congested = self._link.unsent > MOST_UNSENT or self._is_ahead()
            self._take_in(policy)
            action = None if congested else policy.next()
            if action is not None:
                self._phases.action = str(action)
                run(action)
                if self._gpu is not None:
                    self._under_way.append(self._gpu.compute.record())
                self._phases.action = ""
                self._backoff.reset()
            else:
                with self._phases("bubble"):
                    self._while_idle()
                    self._backoff.pause()
        self._policy = None

    @property
    def _waiting(self) -> int:
        """Messages that are here and not used yet."""
        return len(self._inbox) + sum(map(len, self._arrived.values()))

    def _look(self) -> None:
        with self._phases("p2p"):
            for message in self._link.arrivals():
                self._arrived[message.direction].append(message)

    def _see_off(self) -> None:
        """Wait until a GPU has sent all: what comes next may wait for a neighbour that needs it."""
        while self._gpu is not None and self._link.unsent:
            self._look()
            with self._phases("bubble"):
                self._while_idle()
                self._backoff.pause()

    def _is_ahead(self) -> bool:
        """Whether the GPU has as much to do as it may be given."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        return len(self._under_way) >= MOST_AHEAD

    def _put(self, tensor: Tensor) -> Tensor:
        """A tensor of the data where the stage computes; the host goes on while it is copied."""
        return tensor if self._gpu is None else tensor.to(self._gpu.kind, non_blocking=True)

    def _targets(self, microbatch: Microbatch) -> Tensor | None:
        return None if microbatch.targets is None else self._put(microbatch.targets)

    def _take_in(self, policy: Policy) -> None:
        """Tell the policy of arrivals; a neighbour that is ahead sends those of the next run."""
        for direction, arrived in self._arrived.items():
            while arrived and policy.expects(direction):
                message = arrived.popleft()
                self._taken[direction] += 1
                self._inbox[Action(direction, message.microbatch)] = message
                policy.arrived(direction, message.microbatch)

    def _forward(self, number: int, batch: Batch, divisor: float) -> list[Tensor]:
        microbatch = batch.microbatches[number]
        inputs, requires_grad = self._inputs(number, batch)
        for tensor, wanted in zip(inputs, requires_grad, strict=True):
            tensor.requires_grad_(wanted)
        key = Key(batch.step, microbatch.first_sample)
        with self._phases("compute"):
            targets = self._targets(microbatch)
            outputs = self._stage.forward(number, inputs, key, targets, divisor)
        if self._place.is_last:
            return [outputs[0].detach()]
        self._send(Direction.FORWARD, number, outputs)
        return []

    def _backward(self, number: int, loss_scale: float) -> None:
        gradients: tuple[Tensor | None, ...] = ()
        if not self._place.is_last:
            gradients = self._inbox.pop(Action(Direction.BACKWARD, number)).tensors
        with self._phases("compute"):
            input_gradients = self._stage.backward(number, gradients, loss_scale)
        if not self._place.is_first:
            self._send(Direction.BACKWARD, number, tuple(input_gradients))

    def _inputs(self, number: int, batch: Batch) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
        """The inputs of a microbatch and which of them want a gradient."""
        if self._place.is_first:
            inputs = tuple(map(self._put, batch.microbatches[number].inputs))
            return inputs, (False,) * len(inputs)
        message = self._inbox.pop(Action(Direction.FORWARD, number))
        tensors = tuple(tensor for tensor in message.tensors if tensor is not None)
        return tensors, message.requires_grad

    def _send(self, direction: Direction, number: int, tensors: tuple[Tensor | None, ...]) -> None:
        requires_grad = tuple(tensor is not None and tensor.requires_grad for tensor in tensors)
        with self._phases("p2p"):
            self._link.send(Message(direction, number, tensors, requires_grad))
