"""What a stage announces, and what it makes of what is announced to it."""

from __future__ import annotations

import math

import pytest

from axsparse.pipeline.actions import Kind, action
from axsparse.pipeline.announcements import REMEMBERED, Announcements
from axsparse.pipeline.policy import LATEST, UNKNOWN, Forecast, MessageDriven
from axsparse.runtime.communication import Announcement, Direction, Message
from axsparse.runtime.grid import Grid

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
AHEAD = 10**12
"""How far the clock of the neighbours is ahead of this stage's."""


class Surroundings:
    """The link and the clock of a stage."""

    bytes_sent = unsent = pauses = 0

    def __init__(self) -> None:
        self.time = 0
        self.said: list[Announcement] = []
        self.heard: list[Announcement] = []

    def announce(self, announcement: Announcement) -> None:
        self.said.append(announcement)

    def announced(self) -> list[Announcement]:
        heard, self.heard = self.heard, []
        return heard

    def now(self) -> int:
        return self.time

    def send(self, message: Message) -> None:
        """Nobody takes it."""

    def arrivals(self) -> list[Message]:
        return []

    def push(self) -> None:
        """Nothing is sent."""

    def pause(self) -> None:
        """No time passes by itself."""

    def reset(self) -> None:
        """Every wait begins afresh."""

    def close(self) -> None:
        """Nothing is held."""


class Middle:
    """The middle stage of three, and what it knows."""

    def __init__(self, stage: int = 1, *, is_on: bool = True) -> None:
        self.around = Surroundings()
        self.announcements = Announcements(
            Grid(3, 1).place(stage), self.around, self.around, is_on=is_on
        )
        self.policy = MessageDriven(stage=stage, g_inter=3, microbatches=4, slack=1)
        self.announcements.begin_step()

    def runs(self, kind: Kind, microbatch: int, length: int) -> int:
        """Run an action from now on; when it ended, as `sent_at` says it."""
        self.announcements.begin(action(kind, microbatch))
        self.around.time += length
        return self.announcements.end(kind)

    def hears(self, direction: Direction, microbatch: int, due: int) -> None:
        """Hear an announcement of a message that is due at `due` on this stage's clock."""
        self.around.heard.append(Announcement(direction, microbatch, AHEAD + due))
        self.announcements.take_in([])

    def gets(self, direction: Direction, microbatch: int, sent: int) -> None:
        """Notice now a message that was sent at `sent` on this stage's clock."""
        message = Message(direction, microbatch, (), sent_at=AHEAD + sent)
        self.announcements.take_in([message])

    def forecast(self) -> Forecast:
        return self.announcements.forecast(self.policy)


def that_knows(transit: int = 3, weight: int = 100) -> Middle:
    """A stage that has seen a weight gradient and a message from each neighbour."""
    stage = Middle()
    stage.runs(Kind.WEIGHT, 0, weight)
    for direction in Direction:
        stage.gets(direction, 0, stage.around.time - transit)
    return stage


# -- what a stage says ----------------------------------------------------------------------


def test_results_are_announced_for_when_they_usually_come() -> None:
    stage = Middle()

    for number, length in enumerate((100, 110, 104)):
        assert stage.runs(Kind.FORWARD, number, length) == stage.around.time
    stage.runs(Kind.BACKWARD, 0, 500)
    stage.runs(Kind.FORWARD, 3, 1)

    # Nothing is known of the first; the second takes as long as that one, and later the median.
    expected = [(FORWARD, 1, 100 + 100), (FORWARD, 2, 210 + 105), (FORWARD, 3, 814 + 104)]
    assert stage.around.said == [Announcement(*each) for each in expected]


@pytest.mark.parametrize(("lengths", "is_said"), [((100, 124), True), ((100, 140), False)])
def test_what_nobody_can_tell_is_not_announced(lengths: tuple[int, int], is_said: bool) -> None:
    stage = Middle()
    for number in range(REMEMBERED):
        stage.runs(Kind.FORWARD, number, lengths[number % 2])
    before = len(stage.around.said)

    stage.runs(Kind.FORWARD, REMEMBERED, 100)

    assert (len(stage.around.said) > before) is is_said


def test_rare_stalls_are_no_reason_to_say_nothing() -> None:
    stage = Middle()
    for number in range(REMEMBERED):
        stage.runs(Kind.FORWARD, number, 500 if number % 8 == 3 else 100)

    stage.runs(Kind.FORWARD, REMEMBERED, 100)

    assert stage.around.said[-1].due == stage.around.time - 100 + 100


def test_only_recent_actions_tell_how_long_the_next_one_takes() -> None:
    stage = Middle()
    for number in range(REMEMBERED):
        stage.runs(Kind.FORWARD, number, 1000)
    for number in range(REMEMBERED):
        stage.runs(Kind.FORWARD, number, 20)
    stage.runs(Kind.FORWARD, 0, 20)

    assert stage.around.said[-1].due == stage.around.time - 20 + 20


@pytest.mark.parametrize(("stage", "kind"), [(0, Kind.BACKWARD), (2, Kind.FORWARD)])
def test_nothing_is_announced_where_nobody_is(stage: int, kind: Kind) -> None:
    end = Middle(stage)
    for number in range(3):
        end.runs(kind, number, 10)
        end.runs(Kind.WEIGHT, number, 10)

    assert end.around.said == []


def test_a_stage_that_is_off_says_nothing_and_learns_nothing() -> None:
    stage = Middle(is_on=False)

    assert [stage.runs(Kind.FORWARD, number, 10) for number in range(3)] == [0, 0, 0]
    stage.runs(Kind.WEIGHT, 0, 10)
    stage.gets(FORWARD, 0, 0)
    stage.hears(FORWARD, 1, 5)

    assert stage.around.said == []
    assert stage.around.heard == []  # the link does not keep it for ever
    assert stage.forecast() == UNKNOWN


# -- what it expects ------------------------------------------------------------------------


def test_a_message_is_expected_when_it_is_due_on_a_clock_of_another_host() -> None:
    stage = that_knows(transit=3, weight=100)
    now = stage.around.time

    stage.hears(BACKWARD, 1, now + 47)

    assert stage.forecast() == Forecast(backward=0.5)
    stage.around.time += 30
    assert stage.forecast() == Forecast(backward=0.2)


def test_an_announcement_that_is_read_late_is_as_good() -> None:
    stage = that_knows(transit=3, weight=100)
    due = stage.around.time + 1000
    stage.around.time += 960  # an action, during which the announcement has come

    stage.hears(FORWARD, 1, due)

    assert stage.forecast().forward == pytest.approx(0.43)


def test_messages_that_are_noticed_late_do_not_make_others_look_far() -> None:
    stage = that_knows(transit=3, weight=100)
    stage.gets(FORWARD, 1, stage.around.time - 70)

    stage.hears(FORWARD, 2, stage.around.time + 7)

    assert stage.forecast().forward == pytest.approx(0.1)


def test_nobody_waits_for_long_on_a_message_that_is_late() -> None:
    stage = that_knows(transit=3, weight=100)
    stage.hears(FORWARD, 1, stage.around.time + 17)

    seen = []
    for _ in range(4):
        seen.append(stage.forecast().forward)
        stage.around.time += 10 + round(100 * LATEST)

    assert seen == [pytest.approx(0.2), 0.0, math.inf, math.inf]


def test_what_has_arrived_is_no_longer_expected_and_the_next_one_is() -> None:
    stage = that_knows(transit=3, weight=100)
    now = stage.around.time
    stage.hears(FORWARD, 1, now + 17)
    stage.hears(FORWARD, 2, now + 77)

    stage.gets(FORWARD, 1, now - 3)

    assert stage.forecast().forward == pytest.approx(0.8)
    stage.gets(FORWARD, 2, now - 3)
    assert stage.forecast() == UNKNOWN


def test_a_message_that_was_not_announced_takes_no_others_announcement() -> None:
    stage = that_knows(transit=3, weight=100)
    stage.hears(FORWARD, 2, stage.around.time + 17)

    stage.gets(FORWARD, 1, stage.around.time - 3)

    assert stage.forecast().forward == pytest.approx(0.2)


def test_an_announcement_without_a_message_is_dropped_with_the_next_one() -> None:
    stage = that_knows(transit=3, weight=100)
    now = stage.around.time
    stage.hears(FORWARD, 3, now)
    stage.hears(FORWARD, 0, now + 27)
    stage.hears(FORWARD, 1, now + 47)

    stage.gets(FORWARD, 0, now - 3)

    assert stage.forecast().forward == pytest.approx(0.5)


def test_messages_of_the_next_step_are_not_waited_for() -> None:
    stage = that_knows()
    for number in range(4):
        stage.policy.arrived(FORWARD, number)

    stage.hears(FORWARD, 0, stage.around.time)

    assert stage.forecast() == UNKNOWN


def test_nothing_is_expected_before_weight_gradients_and_messages_were_seen() -> None:
    without_weight = Middle()
    without_weight.gets(FORWARD, 0, 0)
    without_weight.hears(FORWARD, 1, 5)
    without_message = Middle()
    without_message.runs(Kind.WEIGHT, 0, 10)
    without_message.hears(FORWARD, 1, 5)

    assert without_weight.forecast() == without_message.forecast() == UNKNOWN


def test_clocks_may_drift_since_only_two_steps_tell_how_far_they_are_apart() -> None:
    stage = that_knows(transit=3, weight=100)
    seen = []
    for _ in range(2):
        stage.announcements.begin_step()
        stage.gets(FORWARD, 0, stage.around.time - 23)  # the clock there has fallen back by 20
        stage.hears(FORWARD, 1, stage.around.time - 20 + 47)
        seen.append(stage.forecast().forward)
        stage.gets(FORWARD, 1, stage.around.time - 23)

    assert seen == [pytest.approx(0.3), pytest.approx(0.5)]
