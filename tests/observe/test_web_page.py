"""What pages share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from axsparse.observe.phases import PHASES
from axsparse.observe.web_page import PHASE_COLOURS, SERIES_COLOURS
from axsparse.planner.html_page import MEMORY_COLOURS


def lightness(colour: str) -> float:
    """L* of CIELAB: 0 is black, 100 is white."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * float(light ** (1 / 3)) - 16


@pytest.mark.parametrize(
    "colours",
    [[*PHASE_COLOURS.values()], [*MEMORY_COLOURS.values()], [*SERIES_COLOURS]],
    ids=["phases", "memory", "series"],
)
def test_neighbours_differ_in_lightness_and_all_differ_from_both_backgrounds(
    colours: list[str],
) -> None:
    assert len(set(colours)) == len(colours)
    for one, other in pairwise(colours):
        assert abs(lightness(one) - lightness(other)) >= 15, (one, other)
    for colour in colours:
        assert 35 < lightness(colour) < 85, colour


def test_every_phase_has_a_colour_in_the_order_of_phases() -> None:
    assert tuple(PHASE_COLOURS) == PHASES
