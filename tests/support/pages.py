"""Parses pages strictly, and makes up the records of a run and of a step."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from axsparse.observe.metrics import StepRecord
from axsparse.observe.phases import PHASES
from axsparse.observe.trace_file import Span, part


def words_of(page: str) -> str:
    """All texts and values of attributes of the body, which is parsed strictly."""
    elements = body_of(page).iter()
    texts = (text for e in elements for text in (e.text, e.tail, *e.attrib.values()) if text)
    return "\n".join(texts)


def body_of(page: str) -> ElementTree.Element:
    """The body, parsed strictly."""
    body = re.search(r"<body>.*</body>", page, re.DOTALL)
    assert body is not None
    return ElementTree.fromstring(body.group())  # noqa: S314 - our own text


def figure_of(page: str, title: str) -> ElementTree.Element:
    """The one figure whose title begins like this."""
    [found] = [
        figure
        for figure in body_of(page).iter("figure")
        if (figure.findtext("figcaption") or "").startswith(title)
    ]
    return found


def rows_of(page: str, head: str) -> list[list[str]]:
    """The rows of the one table that has a column of this head, without the heads."""
    [found] = [
        table
        for table in body_of(page).iter("table")
        if head in [cell.text for cell in table.iter("th")]
    ]
    return [[cell.text or "" for cell in row.iter("td")] for row in found.iter("tr")][1:]


_SECONDS: dict[str, Any] = {
    f"{phase}_seconds": number / 16 for number, phase in enumerate(PHASES, 1)
}
STEP_RECORD = StepRecord(
    time=1.7e9,
    step=3,
    loss=3.5,
    learning_rate=1e-3,
    grad_norm=0.5,
    weights_digest=None,
    loss_scale=1.0,
    skipped=False,
    skip_reason=None,
    skipped_steps=0,
    tokens=6912,
    step_seconds=2.25,
    **_SECONDS,
    tokens_per_second=3072.0,
    model_flops_per_second=1e9,
    mfu=0.25,
    model_state_bytes=2_100_000,
    gradient_bytes_sent=1000,
    p2p_bytes_sent=2000,
    peak_memory_bytes=3_000_000,
)


def step_line(step: int, **changed: Any) -> str:
    record = {
        **asdict(STEP_RECORD),
        **{"step": step, "time": 1.7e9 + step, "loss": 5.0 / step, "grad_norm": 2.0 + step % 3},
        **{"step_seconds": 0.8, **{f"{phase}_seconds": 0.1 for phase in PHASES}},
        **{"model_state_bytes": 4_000_000, "peak_memory_bytes": 300_000_000},
        **{"tokens": 100, "tokens_per_second": 125.0},
    }
    return json.dumps(record | changed) + "\n"


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"traceEvents": [{part(0, 0, spans)}]}}')
