"""Looks at pictures of pages."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

Box = tuple[float, float, float, float]


def boxes(drawing: ElementTree.Element) -> list[Box]:
    """Left, top, right and bottom of every text, at 5.8 a letter of 11 px."""
    found = []
    for text in drawing.iter("text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        width = 5.8 * len(text.text or "")
        x -= {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        found.append((x, y - 9, x + width, y + 2))
    return found


def overlapping(drawing: ElementTree.Element) -> list[tuple[Box, Box]]:
    """The pairs of texts of which one lies on the other."""
    return [
        (a, b)
        for a, b in itertools.combinations(boxes(drawing), 2)
        if not (a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1])
    ]


def outside(drawing: ElementTree.Element) -> list[Box]:
    """What is drawn outside the picture: texts, rectangles and circles."""
    width, height = map(float, drawing.attrib["viewBox"].split()[2:])
    edges = boxes(drawing)
    for each in drawing.iter("rect"):
        x, y, w, h = (float(each.attrib[key]) for key in ("x", "y", "width", "height"))
        edges.append((x, y, x + w, y + h))
    for each in drawing.iter("circle"):
        x, y, r = (float(each.attrib[key]) for key in ("cx", "cy", "r"))
        edges.append((x - r, y - r, x + r, y + r))
    return [
        (left, top, right, bottom)
        for left, top, right, bottom in edges
        # A value that is not a number counts as outside, too.
        if not (0 <= left <= right <= width + 0.01 and 0 <= top <= bottom <= height)
    ]
