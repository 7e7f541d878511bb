"""`axsparse config show`: shows where each setting comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from axsparse.cli.parser import CommandParser, add_configuration, say
from axsparse.config.load import configure, setting_to_yaml
from axsparse.config.schema import Config
from axsparse.config.validate import check_config

SHOW = """\
Print every setting with its origin: default, a line of the file, or --set.
What is printed is a configuration file itself.

  axsparse config show --config quickstart.yaml --set train.steps=200
"""


def parser() -> CommandParser:
    arguments = CommandParser(_show, prog="axsparse config show", description=SHOW)
    add_configuration(arguments.add_argument)
    return arguments


def _show(arguments: argparse.Namespace) -> None:
    config = configure(arguments.config, arguments.overrides)
    check_config(config)
    say("\n".join(lines(config)))


def lines(config: Config) -> Iterator[str]:
    """A line for each setting, with its origin as a comment."""
    origins, rows = config.origins, []
    for section, values in config.model_dump(mode="json").items():
        is_section = isinstance(values, Mapping)
        if is_section:
            rows.append((f"{section}:", ""))
        for name, value in values.items() if is_section else [(section, values)]:
            key = f"{section}.{name}" if is_section else section
            rows.append(
                ("  " * is_section + setting_to_yaml(name, value), origins.get(key, "default"))
            )
    width = max(len(text) for text, origin in rows if origin)
    for text, origin in rows:
        yield f"{text:{width}}  # {origin}" if origin else text
