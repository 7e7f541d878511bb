"""`axsparse config show | schema`: says where each setting comes from, and what there may be."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from axsparse.cli.parser import (
    HELP,
    CommandParser,
    add_configuration,
    refuse_command,
    run_command,
    say,
    show_usage,
)
from axsparse.config.json_schema import editor_schema
from axsparse.config.load import LoadedConfig, load_config, setting_to_yaml
from axsparse.config.schema import Config
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError

USAGE = """\
usage: axsparse config show [--config FILE] [--set KEY=VALUE] [--ranks N]
       axsparse config schema

  show      every setting, its value and where that comes from (axsparse config show --help)
  schema    the JSON schema of configuration files, for editors
"""
SHOW = """\
Print every setting with its origin: default, a line of the file, --set, or, with --ranks, auto.
What is printed is a configuration file itself.

  axsparse config show --config quickstart.yaml --set train.steps=200
  axsparse config show --config quickstart.yaml --ranks 4
"""
SHOW_END = """\
With --ranks, values that are auto are decided as a run on CPUs would decide them. Those that the
machine decides stay auto; if its memory is too small, a run may also take more stages.

exit codes:
  0 done   66 input missing   78 settings that cannot be run
"""
SCHEMA = """\
Print the JSON schema of configuration files. Editors with a YAML language server check and complete
a file that begins with the line

  # yaml-language-server: $schema=axsparse.schema.json

after axsparse config schema > axsparse.schema.json
"""
COMMANDS = ("show", "schema")


def show_parser() -> CommandParser:
    """The command line of `show`."""
    arguments = CommandParser(prog="axsparse config show", description=SHOW, epilog=SHOW_END)
    add_configuration(arguments.add_argument)
    arguments.add_argument("--ranks", metavar="N", help="decide every auto for so many ranks")
    return arguments


def schema_parser() -> CommandParser:
    """The command line of `schema`."""
    return CommandParser(prog="axsparse config schema", description=SCHEMA)


def main(argv: Sequence[str]) -> NoReturn:
    """Carry out a command, and end the process with its exit code; one of many ranks works."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not argv or argv[0] in HELP:
        show_usage(USAGE)
    if argv[0] not in COMMANDS:
        refuse_command(argv[0], COMMANDS, "config")
    work = _show if argv[0] == "show" else _schema
    run_command(lambda: work(argv[1:]))


def _schema(argv: Sequence[str]) -> None:
    schema_parser().parse_args(argv)
    say(json.dumps(editor_schema(), indent=2, ensure_ascii=False))


def _show(argv: Sequence[str]) -> None:
    arguments = show_parser().parse_args(argv)
    loaded = load_config(arguments.config, arguments.overrides)
    check_config(loaded)
    decided = loaded.config if arguments.ranks is None else _decided(loaded, arguments)
    say("\n".join(lines(loaded, decided)))


def _decided(loaded: LoadedConfig, arguments: argparse.Namespace) -> Config:
    """The configuration as a run on so many ranks would have it."""
    text = arguments.ranks
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"--ranks: {text!r} is no number of ranks to decide for; write 4")
    # Imported late, so that everything else does without torch.
    from axsparse.models.survey import survey
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.runtime.local.local_transport import LocalTransport
    from axsparse.runtime.local.local_world import LocalWorld
    from axsparse.samo.precision import DTYPES
    from axsparse.training.resolution import RunInputs, resolve

    # How ranks communicate decides no other setting, and need not be there to be looked at.
    asked = replace(loaded, config=loaded.config.model_copy(update={"transport": "auto"}))
    model = named_model(asked)
    surveyed = survey(model, DTYPES[asked.config.precision])
    world: LocalWorld[None] = LocalWorld(int(text))
    decided = resolve(asked, RunInputs(model, surveyed, LocalTransport(world, 0))).config
    return decided.model_copy(update={"transport": loaded.config.transport})


def lines(loaded: LoadedConfig, decided: Config) -> Iterator[str]:
    """A line for each setting, with its origin as a comment.

    `decided` is the configuration of `loaded`, of which values that are auto may be decided.
    """
    rows = list(_rows(loaded, decided))
    width = max(len(text) for text, origin in rows if origin)
    for text, origin in rows:
        yield f"{text:{width}}  # {origin}" if origin else text


def _rows(loaded: LoadedConfig, decided: Config) -> Iterator[tuple[str, str]]:
    """The YAML of each setting and its origin; the head of a section has none."""
    before, after = _values(loaded.config), _values(decided)
    for section, values in after.items():
        if not isinstance(values, Mapping):
            key = {section: (before[section], values)}
        else:
            yield f"{section}:", ""
            key = {f"{section}.{name}": (before[section][name], values[name]) for name in values}
        for name, (given, value) in key.items():
            origin = loaded.origins.get(name, "default")
            if given == "auto" and value != "auto":
                origin = f"auto ({origin})"
            indent, _, leaf = name.rpartition(".")
            yield ("  " if indent else "") + setting_to_yaml(leaf, value), origin


def _values(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")
