"""What a report tells of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axsparse.observe.run_records import RunRecords
from axsparse.observe.trace_file import Span


@dataclass(frozen=True)
class LayerShare:
    """How much of a layer is kept."""

    name: str
    kept: int
    numel: int


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint of a run."""

    step: int
    nbytes: int | None
    """Of all files; None if its manifest cannot be read."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """All that the page tells of one run; whatever a run has not is empty."""

    name: str
    records: RunRecords
    config_text: str = ""
    settings: Mapping[str, str]
    """Values by dotted key."""
    versions: Mapping[str, str]
    trace: str = ""
    """The name of the file that `spans` are from."""
    spans: Sequence[Span] = ()
    layers: Sequence[LayerShare] = ()
    layers_from: str = ""
    """The checkpoint or ticket that `layers` are from."""
    checkpoints: Sequence[SavedStep] = ()
    plan: Sequence[str] = ()
    """HTML of the planned memory."""
    notes: Sequence[str] = ()
