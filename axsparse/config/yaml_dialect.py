"""YAML as all files of ours are read and written: version 1.2's numbers and truth values.

PyYAML's own loaders follow version 1.1, by which `1e-3` and `1_000` are a text and a number, and
`no` and `on` are truth values.
"""

from __future__ import annotations

import re

import yaml

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


class YamlLoader(yaml.SafeLoader):
    """Makes texts, numbers, truth values, lists and mappings, and nothing else."""

    yaml_implicit_resolvers = _RESOLVERS


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """The number in decimal digits; PyYAML takes one with a leading zero for an octal number."""
    return int(loader.construct_scalar(node))


YamlLoader.add_constructor(f"{YAML_TAG}int", _whole_number)


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
