"""`axsparse config show`: shows where each setting comes from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from axsparse.cli.parser import CommandParser, add_configuration, integer, say
from axsparse.config.load import configure, setting_to_yaml
from axsparse.config.schema import Config
from axsparse.config.validate import check_config

SHOW = """\
Print every setting with its origin: default, a line of the file, --set, or, with --ranks, auto.
What is printed is a configuration file itself.

  axsparse config show --config quickstart.yaml --set train.steps=200
  axsparse config show --config quickstart.yaml --ranks 4
"""
SHOW_END = """\
With --ranks, values that are auto are decided as a run on CPUs would decide them. Those that the
machine decides stay auto; if its memory is too small, a run may also take more stages.
"""


def parser() -> CommandParser:
    group = CommandParser(prog="axsparse config")
    purpose = "every setting, its value and where that comes from"
    show = group.add_subcommand("show", _show, help=purpose, description=SHOW, epilog=SHOW_END)
    add_configuration(show.add_argument)
    text = "decide every auto for this number of ranks"
    show.add_argument("--ranks", metavar="N", type=integer(most=100_000), help=text)
    return group


def _show(arguments: argparse.Namespace) -> None:
    config = configure(arguments.config, arguments.overrides)
    check_config(config)
    decided = config if arguments.ranks is None else _decided(config, arguments.ranks)
    say("\n".join(lines(config, decided)))


def _decided(config: Config, ranks: int) -> Config:
    """The configuration as a run on so many ranks would have it."""
    # Imported late, so that everything else does without torch.
    from axsparse.models.model_profile import profile
    from axsparse.models.zoo.model_registry import named_model
    from axsparse.runtime.local.local_transport import LocalTransport, LocalWorld
    from axsparse.samo.precision import DTYPES
    from axsparse.training.plan import decided_precision, plan_run

    # How ranks communicate decides no other setting, and need not be there to be looked at.
    asked = config.model_copy(update={"transport": "auto"})
    asked, _ = decided_precision(asked, LocalTransport(LocalWorld(1), 0), on_host=True)
    model, transport = named_model(asked), LocalTransport(LocalWorld(ranks), 0)
    decided = plan_run(asked, model, profile(model, DTYPES[asked.precision]), transport).config
    return decided.model_copy(update={"transport": config.transport})


def lines(config: Config, decided: Config) -> Iterator[str]:
    """A line for each setting, with its origin as a comment.

    In `decided`, values that are auto in `config` may be decided.
    """
    given, origins, rows = config.by_key(), config.origins, []
    for section, values in decided.model_dump(mode="json").items():
        is_section = isinstance(values, Mapping)
        if is_section:
            rows.append((f"{section}:", ""))
        for name, value in values.items() if is_section else [(section, values)]:
            key = f"{section}.{name}" if is_section else section
            origin = origins.get(key, "default")
            if given[key] == "auto" and value != "auto":
                origin = f"auto ({origin})"
            rows.append(("  " * is_section + setting_to_yaml(name, value), origin))
    width = max(len(text) for text, origin in rows if origin)
    for text, origin in rows:
        yield f"{text:{width}}  # {origin}" if origin else text
