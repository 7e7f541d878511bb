"""The error messages about settings: unknown keys, and values that the schema forbids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

from axsparse.config.former_settings import FORMER_KEYS
from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import Config
from axsparse.config.section import Section
from axsparse.runtime.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value that somebody gave a key, before it is checked."""

    value: Any
    origin: str
    """Where it was given: "quickstart.yaml:12", "--set" or "configure"."""


def _sections() -> dict[str, tuple[type[Section], ...]]:
    found: dict[str, tuple[type[Section], ...]] = {"model": tuple(FAMILIES.values())}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = (field.annotation,)
    return found


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, schema in Config.model_json_schema()["properties"].items():
        for section in _SECTIONS.get(name, ()):
            leaves = section.model_json_schema()["properties"]
            fields.update((f"{name}.{leaf}", schema) for leaf, schema in leaves.items())
        if name not in _SECTIONS:
            fields[name] = schema
    return fields | {"model.name": {"type": "string", "enum": list(FAMILIES)}}


_SECTIONS = _sections()
FIELDS = _fields()
"""Dotted key -> JSON schema of its values, in the schema's order; those of all models."""
SECTIONS: dict[str, tuple[str, ...]] = {
    name: tuple(key.partition(".")[2] for key in FIELDS if key.startswith(f"{name}."))
    for name in _SECTIONS
}
"""Name -> keys of every section."""

CLOSE = 0.6
"""Names that are at least this alike may be what was meant; the default of difflib."""

_BROKEN_BOUNDS = {
    "greater_than_equal": "is below {ge:g}",
    "greater_than": "is not above {gt:g}",
    "less_than_equal": "is above {le:g}",
    "less_than": "is not below {lt:g}",
}
"""Pydantic's error type -> the rule in plain words."""

_BOUNDS = {
    "minimum": "of at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "of at most {:g}",
    "exclusiveMaximum": "below {:g}",
}


def refusal(error: ValidationError, settings: Mapping[str, Setting]) -> ConfigError:
    """The error about the first wrong key, in one line, and how many others are wrong."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        problems.setdefault(_key_of(problem), []).append(problem)
    key, found = next(iter(problems.items()))
    schema = FIELDS[key]

    value, rule = settings[key].value, f"is not {domain(schema, bounds=False)}"
    for problem in found:
        # A broken bound says more than that the value is not "auto" either.
        if problem["type"] in _BROKEN_BOUNDS:
            value = problem["input"]
            rule = _BROKEN_BOUNDS[problem["type"]].format(**problem["ctx"])
            break
    if "enum" in schema:
        mend = "choose one of them"
    elif schema.get("type") == "string" and "const" not in schema:
        mend = "write it in quotes"
    else:
        mend = f"choose {domain(schema)}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{key} ({settings[key].origin}): {show(value)} {rule}; {mend}{more}")


def _key_of(problem: Mapping[str, Any]) -> str:
    """The dotted key that a problem of pydantic's is about."""
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return "model.name"
    top, *rest = map(str, problem["loc"])
    if top == "model":
        del rest[:1]  # the family
    # Behind the key, pydantic also names list entries and members of unions.
    dotted = ".".join([top, *rest[:1]])
    return dotted if dotted in FIELDS else top


def domain(schema: Mapping[str, Any], *, bounds: bool = True, many: bool = False) -> str:
    """The values that a JSON schema allows, in words: "a whole number of at least 1 or auto"."""
    if "anyOf" in schema:
        return " or ".join(domain(member, bounds=bounds) for member in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    kind = schema["type"]
    if kind == "array":
        fixed = schema.get("prefixItems")
        items = domain(fixed[0] if fixed else schema["items"], bounds=bounds, many=True)
        text = f"{len(fixed)} {items}" if fixed else items
        return text if bounds else f"a list of {text}"
    if kind in ("boolean", "string", "null"):
        text = "non-empty text" if "minLength" in schema else "text"
        return {"boolean": "true or false", "string": text, "null": "null"}[kind]

    noun = "whole number" if kind == "integer" else "number"
    named = _BOUNDS.items() if bounds else ()
    limits = [words.format(schema[name]) for name, words in named if name in schema]
    if limits == ["of at least 0", "of at most 1"]:
        noun, limits = "fraction", ["in [0, 1]"]
    elif limits == ["of at least 0", "below 1"]:
        noun, limits = "fraction", ["in [0, 1)"]
    text = f"{noun}s" if many else f"a {noun}"
    return f"{text} {' and '.join(limits)}" if limits else text


def unknown_key(key: str, origin: str) -> ConfigError:
    """The error about a key that is not in the schema, with the nearest one that is."""
    if key in FORMER_KEYS:
        return ConfigError(f"{key} ({origin}): this key is gone; {FORMER_KEYS[key]}")
    key = shorten(key)  # Comparing takes time quadratic in the length.
    section, _, leaf = key.rpartition(".")

    def nearness(known: str) -> tuple[float, float]:
        known_section, _, known_leaf = known.rpartition(".")
        whole, part = likeness(key, known), likeness(leaf, known_leaf)
        # If both name the same section, only the rest can tell them apart.
        return (part if section == known_section else max(whole, part)), whole

    nearest = max((*FIELDS, *([] if section else SECTIONS)), key=nearness)
    if nearness(nearest)[0] >= CLOSE:
        mend = f"did you mean {nearest}?"
    else:
        names = SECTIONS.get(section, tuple(Config.model_fields))
        mend = f"choose one of {', '.join(names)}"
    shown = key if key.isprintable() else repr(key)
    return ConfigError(f"{shown} ({origin}): unknown key; {mend}")


def refuse_other_families(settings: Mapping[str, Setting]) -> None:
    """ConfigError for a key that the named model has not, though another one has it."""
    named = settings.get("model.name")
    name = FIELDS["model.name"]["enum"][0] if named is None else named.value
    if name not in FAMILIES:
        return  # pydantic refuses the name
    has = {
        family: tuple(section.model_json_schema()["properties"])
        for family, section in FAMILIES.items()
    }
    for key, setting in settings.items():
        section, _, leaf = key.rpartition(".")
        if section == "model" and leaf not in has[name]:
            others = " and ".join(family for family in has if leaf in has[family])
            raise ConfigError(
                f"{key} ({setting.origin}): unknown key for model.name {name}, which has "
                f"{', '.join(has[name])}; it is for model.name {others}: remove it, or choose "
                "another model.name"
            )


def refuse_removed_values(settings: Mapping[str, Setting]) -> None:
    """ConfigError for a value that earlier versions knew, with what to do instead."""
    setting = settings.get("spikes.rule")
    if setting is not None and setting.value == "back":
        raise ConfigError(
            f"spikes.rule ({setting.origin}): 'back' is no rule any more; choose skip, and go back "
            "by hand with --resume RUN/checkpoints/step-N (docs/howto/bad-numbers.md)"
        )


def likeness(one: str, other: str) -> float:
    """1 for equal names, 0 for names that share nothing."""
    return SequenceMatcher(None, one, other).ratio()


def show(value: object) -> str:
    """A value as YAML writes it, in at most 60 characters."""
    if value is None:
        return "null"
    return shorten(str(value).lower() if isinstance(value, bool) else repr(value))


def shorten(text: str) -> str:
    """At most 60 characters of a text."""
    return text if len(text) <= 60 else f"{text[:57]}..."
