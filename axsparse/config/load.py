"""Reads a configuration: strict YAML, then `--set` overrides; each mistake is told in one line.

Plain scalars follow YAML 1.2's core schema with decimal numbers: `1e-4` is a number,
`yes` is text. Values are read off the composed nodes, since only nodes know their lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.reader import ReaderError

from axsparse.config.schema import Config, Section
from axsparse.errors import ConfigError, MissingInputError

_PACKAGE = Path(__file__).resolve().parents[1]
_BUNDLED = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
"""Where bundled files live in an installed wheel, and in a source tree."""


@dataclass(frozen=True)
class Loaded:
    """A configuration and where each of its keys was set."""

    config: Config
    name: str
    """Stem of the config file; "default" without one."""
    origins: Mapping[str, str]
    """Dotted key -> "quickstart.yaml:12" or "--set"; keys that nobody set are absent."""

    def where(self, key: str) -> str:
        """A key and its origin, as error messages begin with."""
        return f"{key} ({self.origins.get(key, 'default')})"


@dataclass(frozen=True)
class _Setting:
    value: Any
    origin: str


def load_config(source: str | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read a file or bundled config, then `key=value` overrides, of which later ones win.

    `source` is a path if it names a file or holds a "/"; otherwise the name of a bundled
    config. None takes the defaults. Raises MissingInputError for a file that is not there
    or cannot be read, ConfigError for everything in it that cannot be run.
    """
    settings: dict[str, _Setting] = {}
    name = "default"
    if source is not None:
        path = _find(source)
        name = path.stem
        settings.update(_read_file(path))
    settings.update(_read_override(override) for override in overrides)

    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = setting.value
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        raise _refusal(error, settings) from None
    return Loaded(config, name, {key: setting.origin for key, setting in settings.items()})


def bundled_configs() -> list[str]:
    """Names of the bundled configs, sorted."""
    return sorted(path.stem for path in _bundled_folder().glob("*.yaml"))


def to_yaml(config: Config) -> str:
    """Every key in the schema's order; `load_config` reads it back to an equal Config."""
    text: str = yaml.dump(
        config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
    return text


# --- files -----------------------------------------------------------------------------


def _bundled_folder() -> Path:
    # Only one is ever read: beside an installed package, "configs" is somebody else's.
    installed, source_tree = _BUNDLED
    return installed if installed.is_dir() else source_tree


def _find(source: str) -> Path:
    path = Path(source)
    if "/" in source or path.is_file():
        return path
    name = source.removesuffix(".yaml")
    if name in bundled_configs():
        return _bundled_folder() / f"{name}.yaml"
    raise _missing(source)


def _missing(source: str) -> MissingInputError:
    bundled = bundled_configs()
    if not bundled:
        return MissingInputError(f"config {source!r}: no such file; name an existing one")
    stem = Path(source).stem
    nearest = max(bundled, key=lambda name: _likeness(stem, name))
    return MissingInputError(
        f"config {source!r}: no such file and no bundled config of that name; "
        f"did you mean {nearest}? (bundled: {', '.join(bundled)})"
    )


def _read_file(path: Path) -> dict[str, _Setting]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _missing(str(path)) from None
    except OSError as error:
        raise MissingInputError(
            f"config {str(path)!r}: cannot be read ({error.strerror}); name a readable YAML file"
        ) from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path.name}:{line}: byte {data[error.start]:#04x} is not UTF-8; "
            "save the file as UTF-8"
        ) from None

    root = _compose(text, lambda line: f"{path.name}:{line}")
    if root is None or _is_null(root):
        return {}
    settings: dict[str, _Setting] = {}
    for key, origin, node in _entries(root, "", f"{path.name}:{_line(root)}", path.name):
        if key in _SECTIONS:
            here = f"{key} ({origin})"
            for leaf, leaf_origin, value in _entries(node, f"{key}.", here, path.name):
                settings[leaf] = _setting(leaf, leaf_origin, value)
        else:
            settings[key] = _setting(key, origin, node)
    return settings


def _read_override(override: str) -> tuple[str, _Setting]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not key or not equals:
        raise ConfigError(
            f"--set {override!r}: not of the form key=value; "
            "write it like --set pruning.sparsity=0.8"
        )
    if key in _SECTIONS:
        leaves = ", ".join(f"{key}.{leaf}" for leaf in _SECTIONS[key].model_fields)
        raise ConfigError(f"{key} (--set): a section has no value; set one of {leaves}")
    if key not in _FIELDS:
        raise _unknown(key, "--set")
    node = _compose(text, lambda _: f"{key} (--set)")
    return key, _Setting(None, "--set") if node is None else _setting(key, "--set", node)


# --- YAML ------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    f"{_TAG}null": re.compile(r"(~|null|Null|NULL|)\Z"),
    f"{_TAG}bool": re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"),
    # Longer whole numbers fall through to float, where they are infinite and refused.
    f"{_TAG}int": re.compile(r"[-+]?[0-9]{1,999}\Z"),
    f"{_TAG}float": re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
    ),
}
_RESOLVERS = {None: list(_SCALARS.items())}
"""PyYAML's form of "try these for a plain scalar, whatever its first character"."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not take for text, and keeps lists on one line."""

    yaml_implicit_resolvers = _RESOLVERS


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{_TAG}seq", value, flow_style=True)
)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Rare line breaks survive between double quotes only, as escapes."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _compose(text: str, at: Callable[[int], str]) -> yaml.Node | None:
    """The root node, None for an empty text; `at(line)` says where an error stands."""
    try:
        loader = _Loader(text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{at(line)}: character {text[error.position]!r} is not allowed in YAML; remove it"
        ) from None
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = loader.line if error.problem_mark is None else error.problem_mark.line
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{at(line + 1)}: not YAML: {problem}; correct it there") from None
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML lets these through: escapes beyond Unicode, nesting beyond the stack.
        raise ConfigError(f"{at(loader.line + 1)}: not YAML: {error}; correct it there") from None
    return node


def _entries(
    node: yaml.Node, prefix: str, here: str, file: str
) -> Iterator[tuple[str, str, yaml.Node]]:
    """The known keys of a mapping: dotted key, origin, value node."""
    _refuse_tag(node, here)
    if not isinstance(node, yaml.MappingNode):
        given = "a list" if isinstance(node, yaml.SequenceNode) else _show(_scalar(node, here))
        raise ConfigError(f"{here}: {given} is not a mapping; write `key: value` lines")
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = _line(key_node)
        origin = f"{file}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{origin}: a list or section cannot be a key; write a name")
        _refuse_tag(key_node, origin)
        key = prefix + key_node.value
        if not prefix and "." in key and key in _FIELDS:
            section, _, leaf = key.partition(".")
            raise ConfigError(
                f"{key} ({origin}): dotted keys are for --set; write {section}: {{{leaf}: …}}"
            )
        if key not in _FIELDS and key not in _SECTIONS:
            raise _unknown(key, origin)
        if key in lines:
            raise ConfigError(
                f"{key} ({origin}): given twice, first in line {lines[key]}; keep one of them"
            )
        lines[key] = line
        yield key, origin, value


def _setting(key: str, origin: str, node: yaml.Node) -> _Setting:
    """A scalar or a flat list of scalars; the schema has nothing deeper."""
    here = f"{key} ({origin})"
    _refuse_tag(node, here)
    if isinstance(node, yaml.ScalarNode):
        return _Setting(_scalar(node, here), origin)
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(item, yaml.ScalarNode) for item in node.value
    ):
        for item in node.value:
            _refuse_tag(item, here)
        return _Setting([_scalar(item, here) for item in node.value], origin)
    given = "a mapping" if isinstance(node, yaml.MappingNode) else "a nested list"
    raise ConfigError(f"{here}: {given} is not a value; choose {_domain(_FIELDS[key])}")


def _refuse_tag(node: yaml.Node, here: str) -> None:
    """Pass only the tags that a node of this shape has by itself."""
    if isinstance(node, yaml.ScalarNode):
        pattern = _SCALARS.get(node.tag)
        passes = node.tag == f"{_TAG}str" or (
            pattern is not None and pattern.match(node.value) is not None
        )
    else:
        shape = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        passes = node.tag == _TAG + shape
    if not passes:
        tag = node.tag.replace(_TAG, "!!")
        raise ConfigError(f"{here}: tag {tag!r} is not allowed; write a plain value")


def _scalar(node: yaml.Node, here: str) -> object:
    text: str = node.value
    if _is_null(node):
        return None
    if node.tag == f"{_TAG}bool":
        return text.lower() == "true"
    if node.tag == f"{_TAG}int":
        return int(text)
    if node.tag == f"{_TAG}float":
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise ConfigError(f"{here}: {_shorten(text)} is not finite; choose a finite number")
        return number
    return text


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == f"{_TAG}null")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


# --- what the schema says, in words ----------------------------------------------------

_SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, schema in Config.model_json_schema()["properties"].items():
        if name in _SECTIONS:
            leaves = _SECTIONS[name].model_json_schema()["properties"]
            fields.update((f"{name}.{leaf}", schema) for leaf, schema in leaves.items())
        else:
            fields[name] = schema
    return fields


_FIELDS = _fields()
"""Dotted key -> JSON schema of its values, in the schema's order."""

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


def _refusal(error: ValidationError, settings: Mapping[str, _Setting]) -> ConfigError:
    """The first key at fault in one line, and how many others there are."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        # Below a key pydantic names list entries and members of unions.
        top, dotted = str(problem["loc"][0]), ".".join(map(str, problem["loc"][:2]))
        problems.setdefault(dotted if dotted in _FIELDS else top, []).append(problem)
    key, found = next(iter(problems.items()))
    schema = _FIELDS[key]

    value, rule = settings[key].value, f"is not {_domain(schema, bounds=False)}"
    for problem in found:
        # A broken bound says more than the other member's "is not auto".
        if problem["type"] in _BROKEN_BOUNDS:
            value = problem["input"]
            rule = _BROKEN_BOUNDS[problem["type"]].format(**problem["ctx"])
            break
    if "enum" in schema:
        mend = "choose one of them"
    elif schema.get("type") == "string" and "const" not in schema:
        mend = "write it in quotes"
    else:
        mend = f"choose {_domain(schema)}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{key} ({settings[key].origin}): {_show(value)} {rule}; {mend}{more}")


def _domain(schema: Mapping[str, Any], *, bounds: bool = True, many: bool = False) -> str:
    """The values of a JSON schema in words: "a whole number of at least 1 or auto"."""
    if "anyOf" in schema:
        return " or ".join(_domain(member, bounds=bounds) for member in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    kind = schema["type"]
    if kind == "array":
        fixed = schema.get("prefixItems")
        items = _domain(fixed[0] if fixed else schema["items"], bounds=bounds, many=True)
        text = f"{len(fixed)} {items}" if fixed else items
        return text if bounds else f"a list of {text}"
    if kind in ("boolean", "string"):
        return {"boolean": "true or false", "string": "text"}[kind]

    noun = "whole number" if kind == "integer" else "number"
    named = _BOUNDS.items() if bounds else ()
    limits = [words.format(schema[name]) for name, words in named if name in schema]
    if limits == ["of at least 0", "of at most 1"]:
        noun, limits = "fraction", ["in [0, 1]"]
    elif limits == ["of at least 0", "below 1"]:
        noun, limits = "fraction", ["in [0, 1)"]
    text = f"{noun}s" if many else f"a {noun}"
    return f"{text} {' and '.join(limits)}" if limits else text


def _unknown(key: str, origin: str) -> ConfigError:
    section, _, leaf = key.rpartition(".")

    def nearness(known: str) -> tuple[float, float]:
        known_section, _, known_leaf = known.rpartition(".")
        whole, part = _likeness(key, known), _likeness(leaf, known_leaf)
        # Within one section the shared name of the section says nothing.
        return (part if section == known_section else max(whole, part)), whole

    nearest = max((*_FIELDS, *([] if section else _SECTIONS)), key=nearness)
    if nearness(nearest)[0] >= 0.6:  # difflib's own measure of "close"
        mend = f"did you mean {nearest}?"
    else:
        names = _SECTIONS.get(section, Config)
        mend = f"choose one of {', '.join(names.model_fields)}"
    shown = key if key.isprintable() else repr(key)
    return ConfigError(f"{shown} ({origin}): unknown key; {mend}")


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _show(value: object) -> str:
    """A value as YAML would have it, in at most 60 characters."""
    if value is None:
        return "null"
    return _shorten(str(value).lower() if isinstance(value, bool) else repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
