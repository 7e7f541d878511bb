"""Settings of earlier versions: what to write instead, and how to read what they recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axsparse.config.schema import Config

FORMER_KEYS = {
    "pipeline.announce": "remove it: stages announce nothing any more; pipeline.slack of 1 or more "
    "makes up for it"
}
"""Key that is gone -> what to do about it."""
FORMER_VALUES = {"pipeline.schedule": ("zb-h1", "zb-1p", "zb-2p")}
"""Key -> values that are gone. A configuration that recorded one is read with the default."""


def recorded_config(recorded: Mapping[str, Any]) -> Config:
    """The configuration that a checkpoint has recorded, also one of an earlier version.

    Raises pydantic's ValidationError for settings that no version had.
    """
    settings = {
        section: _of_today(f"{section}.", values) if isinstance(values, Mapping) else values
        for section, values in recorded.items()
    }
    return Config.model_validate(settings)


def _of_today(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one section without those that are gone; `section` ends in a dot."""
    return {
        key: value
        for key, value in values.items()
        if section + key not in FORMER_KEYS
        and not (section + key in FORMER_VALUES and value in FORMER_VALUES[section + key])
    }
