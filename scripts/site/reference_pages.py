"""Pages of the site that are made of the source: the Python API, the settings, the commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import axsparse
from axsparse.cli.parser import all_parsers
from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import FIELDS, Config
from axsparse.config.section import Section

PROTOCOLS = {
    "Optimizer": "axsparse.samo.optim.optimizer",
    "Index": "axsparse.samo.index.base",
    "Criterion": "axsparse.pruning.criteria",
    "Pruner": "axsparse.pruning.methods.pruner",
    "Policy": "axsparse.pipeline.policy",
    "Link": "axsparse.runtime.communication",
    "Collective": "axsparse.runtime.communication",
}
"""The public protocols, and where each is defined."""


def api() -> str:
    """Every public name of the package, with signature and docstring."""
    return "\n".join(_api())


def _api() -> Iterator[str]:
    yield "# Python API\n"
    yield "`import axsparse as ax` has these names. This page is made of the docstrings.\n"
    for name in axsparse.__all__:
        if name == "__version__":
            continue
        yield from _described(f"ax.{name}", getattr(axsparse, name))
    yield "## Protocols\n"
    yield "Whoever adds an optimizer, an index, a schedule and the like implements one of these.\n"
    for name, module in PROTOCOLS.items():
        yield from _described(name, getattr(import_module(module), name), level="###")


def _described(name: str, thing: Any, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}\n"
    yield f"```python\n{_signature(name, thing)}\n```\n"
    yield f"{_prose(thing)}\n"
    if inspect.isclass(thing):
        for member, value in _members(thing):
            yield f"**`{member}`**\n"
            yield f"```python\n{_signature(member, value)}\n```\n"
            yield f"{_prose(value)}\n"


def _signature(name: str, thing: Any) -> str:
    """The name with its parameters, one a line where they are many."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parameters = [p for p in map(str, found.parameters.values()) if p != "self"]
    back = found.return_annotation
    gives = "" if back is inspect.Signature.empty or inspect.isclass(thing) else f" -> {back}"
    line = f"{name}({', '.join(parameters)}){gives}"
    if len(line) <= 90:
        return line
    return f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){gives}"


def _prose(thing: Any) -> str:
    """A docstring as Markdown: code that is indented becomes a block, `- ` lines stay a list."""
    text = inspect.getdoc(thing) or ""
    # An indented piece after an empty line is code in Markdown as it is.
    return text.replace("<", "&lt;") if "```" not in text else text


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """Public methods that the class itself defines and describes."""
    for name, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, function


def configuration() -> str:
    """Every setting with its values, default and meaning."""
    return "\n".join(_configuration())


def _configuration() -> Iterator[str]:
    yield "# Configuration\n"
    yield (
        "Every setting of a run, made of `config/schema.py` and `config/model_config.py`. "
        "[Settings](../howto/settings.md) says how they are given.\n"
    )
    yield "## Of the run itself\n"
    top = {name: field for name, field in Config.model_fields.items() if name in FIELDS}
    yield from _settings("", top)
    for name, section in FAMILIES.items():
        yield f"## model (name: {name})\n"
        yield f"{section.__doc__}\n"
        yield from _settings("model.", section.model_fields)
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield f"## {name}\n"
            yield f"{_prose(kind)}\n"
            yield from _settings(f"{name}.", kind.model_fields)


_BOUNDS = {
    "minimum": "of at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "of at most {:g}",
    "exclusiveMaximum": "below {:g}",
}


def _domain(schema: Mapping[str, Any], *, many: bool = False) -> str:
    """The values that a JSON schema allows, in words: "a whole number of at least 1 or auto"."""
    if "anyOf" in schema:
        return " or ".join(_domain(member) for member in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema["type"]
    if kind == "array":
        fixed = schema.get("prefixItems")
        items = _domain(fixed[0] if fixed else schema["items"], many=True)
        return f"{len(fixed)} {items}" if fixed else items
    if kind in ("boolean", "string", "null"):
        text = "non-empty text" if "minLength" in schema else "text"
        return {"boolean": "true or false", "string": text, "null": "null"}[kind]

    noun = "whole number" if kind == "integer" else "number"
    limits = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    if limits == ["of at least 0", "of at most 1"]:
        noun, limits = "fraction", ["in [0, 1]"]
    elif limits == ["of at least 0", "below 1"]:
        noun, limits = "fraction", ["in [0, 1)"]
    text = f"{noun}s" if many else f"a {noun}"
    return f"{text} {' and '.join(limits)}" if limits else text


def _settings(prefix: str, fields: Any) -> Iterator[str]:
    yield "| setting | values | default | meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        key = prefix + (field.alias or name)
        default = field.get_default(call_default_factory=True)
        cells = (f"`{key}`", _domain(FIELDS[key]), f"`{_yaml(default)}`", field.description or "")
        yield "| " + " | ".join(_cell(cell) for cell in cells) + " |"
    yield ""


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def commands() -> str:
    """The help of every command, as it is printed."""
    return "\n".join(_commands())


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "What `axsparse COMMAND --help` prints.\n"
    for words, parser in all_parsers().items():
        yield f"## axsparse {words}\n"
        yield f"```text\n{parser.format_help().rstrip()}\n```\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api,
    "reference/configuration.md": configuration,
    "reference/commands.md": commands,
}
