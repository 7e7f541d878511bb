"""YAML as all files of ours are read and written: version 1.2's numbers and truth values.

PyYAML's own loaders follow version 1.1, by which `1e-3` and `1_000` are a text and a number, and
`no` and `on` are truth values. Values are taken from YAML's nodes, because only nodes know their
lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml
from yaml.reader import ReaderError

from axsparse.runtime.errors import ConfigError

YAML_TAG = "tag:yaml.org,2002:"
YAML_SCALARS = {
    f"{YAML_TAG}null": re.compile(r"(~|null|Null|NULL|)\Z"),
    f"{YAML_TAG}bool": re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"),
    # Longer whole numbers match as floats, become infinite and are refused.
    f"{YAML_TAG}int": re.compile(r"[-+]?[0-9]{1,999}\Z"),
    f"{YAML_TAG}float": re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
    ),
}
_RESOLVERS = {None: list(YAML_SCALARS.items())}
"""The patterns in PyYAML's form: None tries them whatever a scalar's first character is."""


DEEPEST = 20
"""Lists and mappings within each other that are read; no file of ours has more than three."""


class YamlLoader(yaml.SafeLoader):
    """Makes texts, numbers, truth values, lists and mappings, and nothing else.

    Deep nesting is refused as it is met, since PyYAML takes quadratic time for it.
    """

    yaml_implicit_resolvers = _RESOLVERS
    depth = 0

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        self._reject_depth(self.flow_level)
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self._reject_depth(self.depth)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _reject_depth(self, depth: int) -> None:
        if depth > DEEPEST:
            problem = f"more than {DEEPEST} lists and mappings within each other"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """The number in decimal digits; PyYAML takes one with a leading zero for an octal number."""
    return int(loader.construct_scalar(node))


YamlLoader.add_constructor(f"{YAML_TAG}int", _integer)


class YamlDumper(yaml.SafeDumper):
    """Quotes text that `YamlLoader` would read as something else, and keeps lists on one line."""

    yaml_implicit_resolvers = _RESOLVERS


YamlDumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{YAML_TAG}seq", value, flow_style=True)
)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Rare line breaks are kept only as escapes between double quotes."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(f"{YAML_TAG}str", text, style=style)


YamlDumper.add_representer(str, _represent_text)


def compose(text: str, at: Callable[[int], str]) -> yaml.Node | None:
    """The root node, or None for an empty text; `at(line)` names the place of an error."""
    try:
        loader = YamlLoader(text)
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
        suggestion = "correct it there"
        if "alias" in problem or "anchor" in problem:
            suggestion = "a text that begins with * or & stands in quotes, such as '*.bias=0'"
        raise ConfigError(f"{at(line + 1)}: not YAML: {problem}; {suggestion}") from None
    except (ValueError, OverflowError) as error:
        # PyYAML does not catch these, such as escapes beyond Unicode.
        raise ConfigError(f"{at(loader.line + 1)}: not YAML: {error}; correct it there") from None
    return node


def reject_tag(node: yaml.Node, here: str) -> None:
    """ConfigError for a tag that a node of this shape would not have without writing it."""
    if isinstance(node, yaml.ScalarNode):
        pattern = YAML_SCALARS.get(node.tag)
        passes = node.tag == f"{YAML_TAG}str" or (
            pattern is not None and pattern.match(node.value) is not None
        )
    else:
        shape = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        passes = node.tag == YAML_TAG + shape
    if not passes:
        tag = node.tag.replace(YAML_TAG, "!!")
        raise ConfigError(f"{here}: tag {tag!r} is not allowed; write a plain value")


def scalar(node: yaml.Node) -> object:
    """The value of a scalar, by the tag that the dialect gives it."""
    text: str = node.value
    if is_null(node):
        return None
    if node.tag == f"{YAML_TAG}bool":
        return text.lower() == "true"
    if node.tag == f"{YAML_TAG}int":
        return int(text)
    if node.tag == f"{YAML_TAG}float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def is_null(node: yaml.Node) -> bool:
    """Whether a node is null, or nothing."""
    return bool(node.tag == f"{YAML_TAG}null")


def line_of(node: yaml.Node) -> int:
    """The line that a node begins in, from 1."""
    return int(node.start_mark.line) + 1
