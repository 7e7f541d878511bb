"""`axsparse prune --dry-run`: says what a run would prune, what would stay dense, and why."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator

from axsparse.cli.parser import CommandParser, add_configuration, say
from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.validate import check_config
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import ConfigError

PRUNE = """\
Say which tensors a run prunes and how many of their entries stay in the end, which tensors stay
dense, and why. No weights are read, and nothing is trained.

  axsparse prune --dry-run --config quickstart.yaml
  axsparse prune --dry-run --set model.name=vgg19 --set 'pruning.exclude=[classifier.*]'
"""
PRUNE_END = """\
Training prunes (axsparse train). A run of a model of your own says the same in short as it starts.
"""
NUMBER = re.compile(r"\d+")
"""What tells the names of a block's tensors from those of the next block's."""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(_prune, prog="axsparse prune", description=PRUNE, epilog=PRUNE_END)
    arguments.add_argument("--dry-run", action="store_true", help="prune nothing; needed")
    add_configuration(arguments.add_argument)
    return arguments


def _prune(arguments: argparse.Namespace) -> None:
    if not arguments.dry_run:
        raise ConfigError(
            "--dry-run: left out, but only training prunes (axsparse train); add it to see what "
            "would be pruned"
        )
    loaded = load_config(arguments.config, arguments.overrides)
    check_config(loaded)
    say("\n".join(lines(loaded)))


def lines(loaded: LoadedConfig) -> Iterator[str]:
    """A table of the pruned tensors, then the dense ones by the reason why.

    Dense tensors of one shape whose names differ in numbers only share a line.
    """
    # Imported late, so that --help does not load torch.
    from axsparse.models.survey import survey
    from axsparse.models.zoo.model_registry import model_without_weights
    from axsparse.pruning.targets import left_dense, what_is_pruned

    surveyed = survey(model_without_weights(loaded))
    targets = what_is_pruned(loaded.config, surveyed)
    if targets is None:
        yield "nothing is pruned: samo.enabled is false, or pruning.sparsity is 0"
        return
    kept, ticket = targets.kept(), targets.ticket
    yield f"pruned by {loaded.config.pruning.method if ticket is None else ticket.path}:"
    rows = [
        (name, " × ".join(map(str, shape)), math.prod(shape), kept[name])
        for name, shape in targets.shapes.items()
    ]
    rows.append(("total", "", sum(row[2] for row in rows), sum(row[3] for row in rows)))
    yield from table(
        {"tensor": name, "shape": shape, "entries": f"{numel:,}", "stay": f"{stay:,}"}
        for name, shape, numel, stay in rows
    )
    for why, parameters in left_dense(surveyed, targets, loaded.config.pruning).items():
        yield ""
        yield f"dense, {sum(one.numel for one in parameters):,} entries: {why}"
        # What repeats from block to block is a line: hundreds of vectors hide the rest.
        alike = Counter((NUMBER.sub("*", one.name), one.shape) for one in parameters)
        for one in parameters:
            kind = NUMBER.sub("*", one.name), one.shape
            count = alike.pop(kind, 0)
            if count:
                name = one.name if count == 1 else kind[0]
                more = "" if count == 1 else f"  ({count} tensors)"
                yield f"  {name}  {' × '.join(map(str, one.shape))}{more}"
