"""A clock that moves on request, and a GPU that is busy for as long as it is told."""

from __future__ import annotations

from support.late_device import LateDevice

from axsparse.runtime.gpu.device_protocol import Mark


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class BusyGpu(LateDevice):
    """A device whose work only takes time, on a clock that moves on request."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.busy_until = 0.0
        self.marks = 0
        """Marks made."""
        self.stands_still = False
        """Whether nothing that is enqueued from here on is ever reached."""

    def mark(self) -> Mark:
        self.marks += 1
        return BusyMark(self)

    def work(self, seconds: float) -> None:
        """Enqueue what keeps compute busy for a while."""
        self.busy_until = max(self.now, self.busy_until) + seconds


class BusyMark:
    def __init__(self, gpu: BusyGpu) -> None:
        self._gpu = gpu
        self._at = 0.0
        self._is_never_reached = False

    def set(self) -> None:
        self._at = max(self._gpu.now, self._gpu.busy_until)
        self._is_never_reached = self._gpu.stands_still

    def wait(self) -> None:
        still = self._gpu.stands_still and self._is_never_reached
        assert not still, "waits for a device that stands still"
        self._gpu.now = max(self._gpu.now, self._at)

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, BusyMark)
        return self._at - earlier._at
