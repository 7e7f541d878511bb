"""The JSON schema of configuration files, by which editors check and complete what is typed."""

from __future__ import annotations

from typing import Any

from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def editor_schema() -> dict[str, Any]:
    """The schema of a configuration file, made from the sections in `schema.py`.

    Rules between settings are not in it.
    """
    schema = Config.model_json_schema()
    usual, *others = (family.__name__ for family in FAMILIES.values())
    # Without a name the settings are those of the first family; `from` may name any other.
    schema["properties"]["model"]["anyOf"] = schema["properties"]["model"].pop("oneOf")
    for family in others:
        named = [{"required": ["name"]}, {"required": ["from"]}]
        schema["$defs"][family]["anyOf"] = named
    assert usual in schema["$defs"]
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            field.pop("title", None)  # pydantic's, which only repeats the key
    return {"$schema": DIALECT, **schema, "title": "axsparse configuration"}
