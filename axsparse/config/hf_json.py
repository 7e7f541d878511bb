"""Reads the config.json of Hugging Face's folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axsparse.runtime.errors import DataError

CONFIG_FILE = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The settings in a file; DataError if it cannot be read or holds something else."""
    try:
        settings: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as reason:
        raise DataError(
            f"{path}: cannot be read as JSON ({type(reason).__name__}); get it anew, or remove it"
        ) from reason
    if not isinstance(settings, dict):
        raise DataError(f"{path}: is {type(settings).__name__}, not settings; get it anew")
    return settings


def refuse_others(
    path: Path, settings: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], model: str
) -> None:
    """DataError for the first setting that `model` here cannot have.

    `fixed` has the values that it can have; the first one is assumed where a file leaves the
    setting out.
    """
    for key, values in fixed.items():
        has = settings.get(key, values[0])
        if has not in values:
            raise DataError(
                f"{path}: {key} is {shown(has)}, and the {model} here has "
                f"{' or '.join(map(shown, values))}; take a checkpoint that was trained so"
            )


def shown(value: object) -> str:
    """A value as it is written in JSON and in YAML, in at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
