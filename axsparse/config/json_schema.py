"""The JSON schema of configuration files, by which editors check and complete them, and the schema
of every key."""

from __future__ import annotations

from typing import Any

from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import Config
from axsparse.config.section import Section

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def editor_schema() -> dict[str, Any]:
    """The schema of a configuration file, made from the sections in `schema.py`.

    Rules between settings are not in it.
    """
    schema = Config.model_json_schema()
    usual, *others = (family.__name__ for family in FAMILIES.values())
    # Without a name the settings belong to the first family; `from` may name any other.
    schema["properties"]["model"]["anyOf"] = schema["properties"]["model"].pop("oneOf")
    for family in others:
        named = [{"required": ["name"]}, {"required": ["from"]}]
        schema["$defs"][family]["anyOf"] = named
    assert usual in schema["$defs"]
    for section in (schema, *schema["$defs"].values()):
        for field in section["properties"].values():
            field.pop("title", None)  # pydantic's, which only repeats the key
    return {"$schema": DIALECT, **schema, "title": "axsparse configuration"}


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, schema in Config.model_json_schema()["properties"].items():
        kind = Config.model_fields[name].annotation
        for section in FAMILIES.values() if name == "model" else (kind,):
            if isinstance(section, type) and issubclass(section, Section):
                leaves = section.model_json_schema()["properties"]
                fields.update(
                    (f"{name}.{leaf}", leaf_schema) for leaf, leaf_schema in leaves.items()
                )
            else:
                fields[name] = schema
    return fields | {"model.name": {"type": "string", "enum": list(FAMILIES)}}


FIELDS = _fields()
"""Dotted key -> JSON schema of its values, in the schema's order, with the keys of all models."""
SECTIONS: dict[str, list[str]] = {}
"""Name -> keys of every section."""
for _section, _, _leaf in (key.partition(".") for key in FIELDS if "." in key):
    SECTIONS.setdefault(_section, []).append(_leaf)
