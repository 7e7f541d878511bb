"""`axsparse prune`: prunes and heals a model of a folder, or lists the tensors that a run would
prune."""

from __future__ import annotations

import argparse
import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from axsparse.cli.data import add_jsonl_field
from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    override,
    overrides_of,
    reject,
    reject_early,
    run_command,
    say,
)
from axsparse.config.hf_config import FROM
from axsparse.config.load import bundled_source, configure
from axsparse.config.schema import Config
from axsparse.config.validate import check_config
from axsparse.runtime.stop_signal import handle_interrupt

if TYPE_CHECKING:
    from axsparse.cli.prune_order import PruneOrder
    from axsparse.runtime.job import Job

DESCRIPTION = """\
Prune a model of a Hugging Face folder, heal it, and write a folder again. A killed run goes on when
it is started again with the same arguments:

  axsparse prune --from FOLDER --data texts/ --sparsity 0.8 --out PRUNED
  mpirun -n 4 axsparse prune --from FOLDER --data texts/ --heal train --steps 200 --out PRUNED

Or say which tensors a run prunes and how many of their entries stay in the end, which tensors stay
dense, and why. No weights are read, and nothing is trained:

  axsparse prune --dry-run --config quickstart.yaml
  axsparse prune --dry-run --config quickstart.yaml --set pruning.mask=runs/search
"""
EPILOG = """\
ways to heal:
  none     the weights that pruning leaves
  blocks   each layer's kept weights, norms and biases are fitted to what the dense layer put out,
           those of the last one by the loss as well (pruning.heal_passes, pruning.heal_rate)
  train    blocks, and the pruned model is trained on for --steps

none and blocks take the state of one layer and the samples' activations, train the state of the
pruned model.

Settings come from prune_llama.yaml or --config, and --set changes them:
pruning.calibration_samples, data.sequence_length, precision. OUT.run has the tokens and the run.
"""
DECIDED = (FROM, "data.source", "data.path", "run_dir", "pruning.at_step")
"""The settings that this command makes itself."""
SOURCE = ""
"""The value of --teacher without a folder."""
NUMBER = re.compile(r"\d+")
"""The number in the names of a block's tensors, which differs from block to block."""


def parser() -> CommandParser:
    arguments = CommandParser(prog="axsparse prune", description=DESCRIPTION, epilog=EPILOG)
    add = arguments.add_argument
    text = "prune nothing, and say what a run would prune, whatever its texts and its healing"
    add("--dry-run", action="store_true", help=text)
    add("--from", metavar="FOLDER", dest="source", type=Path, help="the model to prune")
    add("--data", metavar="INPUT", nargs="+", type=Path, help="files and folders of text")
    text = "the token after each document (default: the tokenizer's eos_token)"
    add("--separator", metavar="TOKEN", help=text)
    add_jsonl_field(add)
    text = "files and folders of text to evaluate on (default: a twentieth of --data)"
    add("--validation", metavar="INPUT", nargs="+", type=Path, default=[], help=text)
    text = (
        "short for --set pruning.sparsity=S (default: the configuration's, which is 0.5 in "
        "prune_llama.yaml)"
    )
    add("--sparsity", metavar="S", help=text)
    text = "the criterion of the first masks (default: by the sparsity)"
    add("--method", choices=("wanda", "sparsegpt", "magnitude"), help=text)
    text = "see below (default: blocks up to 0.55, train with the model as its teacher above)"
    add("--heal", choices=("blocks", "train", "none"), help=text)
    text = (
        "train: gradual prunes half before, and the rest by magnitude while the model trains "
        "(default: once)"
    )
    add("--schedule", choices=("once", "gradual"), help=text)
    text = (
        "train: short for --set train.steps=N (default: one to four passes over the texts, by the "
        "sparsity)"
    )
    add("--steps", metavar="N", help=text)
    text = (
        "train: learn from the logits of FOLDER, or of --from, as well: short for --set "
        "train.teacher=FOLDER"
    )
    add("--teacher", metavar="FOLDER", nargs="?", const=SOURCE, help=text)
    text = "owl leaves layers with more outliers denser (default: owl above 0.65)"
    add("--distribution", choices=("uniform", "owl"), help=text)
    add("--out", metavar="FOLDER", type=Path, help="the folder to write")
    add_configuration(add)
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Do the requested work, and end the process with the exit code."""
    read = parser()
    arguments = read.parse_args(argv)
    if arguments.dry_run:
        read.set_defaults(work=_say_what)
        run_command(read, argv)
    needed = {"--from": arguments.source, "--data": arguments.data, "--out": arguments.out}
    missing = [option for option, given in needed.items() if not given]
    if missing:
        reject(
            f"prune: {missing[0]} is left out; name it, or add --dry-run to see what a run of a "
            "configuration would prune"
        )
    _reject_unfit(arguments)
    settings = _settings(arguments)
    handle_interrupt(signal.SIG_DFL)
    arguments.config = arguments.config or bundled_source()
    made = [override(FROM, arguments.source), "pruning.at_step=0"]
    reject_early(arguments, [*made, *settings], is_part=True)
    # Imported late, so that --help loads neither torch nor MPI.
    from axsparse.runtime.job import run

    def work(job: Job) -> None:
        from axsparse.cli.prune_folder import prune_folder

        prune_folder(job, _order(arguments))

    run(work)


def _reject_unfit(arguments: argparse.Namespace) -> None:
    trains = [f"--{name}" for name in ("steps", "teacher") if getattr(arguments, name) is not None]
    trains += [key for key in ("train.steps", "train.teacher") if _sets(arguments, key)]
    if trains and arguments.heal in ("none", "blocks"):
        reject(f"{trains[0]}: --heal {arguments.heal} makes no step; choose --heal train")
    for key in DECIDED:
        if _sets(arguments, key):
            reject(f"--set: {key} is what --from and --out say; leave it out")


def _order(arguments: argparse.Namespace) -> PruneOrder:
    from axsparse.cli.prune_order import PruneOrder

    return PruneOrder(
        source=arguments.source,
        data=tuple(arguments.data or ()),
        validation=tuple(arguments.validation),
        out=arguments.out or Path("pruned"),  # a dry run may leave it out
        config=arguments.config or bundled_source(),
        settings=tuple(_settings(arguments)),
        heal=arguments.heal,
        schedule=arguments.schedule,
        distribution=arguments.distribution,
        separator=arguments.separator,
        jsonl_field=arguments.jsonl_field,
    )


def _sets(arguments: argparse.Namespace, key: str) -> bool:
    return any(each.partition("=")[0].strip() == key for each in arguments.overrides)


def _settings(arguments: argparse.Namespace) -> list[str]:
    if arguments.teacher == SOURCE:
        arguments.teacher = arguments.source
    return overrides_of(arguments)


def _say_what(arguments: argparse.Namespace) -> None:
    order = None
    if arguments.source is not None:
        from axsparse.cli.prune_defaults import chosen

        _reject_unfit(arguments)
        order = chosen(_order(arguments))
        asked = order.configured()
    elif arguments.distribution == "owl":
        reject(
            "--distribution: owl is by the activations of samples, which a dry run does not read; "
            "leave it out"
        )
    else:
        asked = configure(arguments.config, _settings(arguments))
    check_config(asked)
    say("\n".join(lines(asked, order)))


def lines(config: Config, order: PruneOrder | None = None) -> Iterator[str]:
    """A table of the pruned tensors, then the dense ones by the reason why.

    Dense tensors of one shape whose names differ in numbers only share a line. What OWL would find
    from samples for an `order` is left out.
    """
    # Imported late, so that --help does not load torch.
    from axsparse.models.model_profile import profile
    from axsparse.models.zoo.model_registry import model_without_weights
    from axsparse.pruning.targets import left_dense, what_is_pruned

    profiled = profile(model_without_weights(config))
    targets = what_is_pruned(config, profiled)
    if targets is None:
        yield "nothing is pruned: samo.enabled is false, or pruning.sparsity is 0"
        return
    by = config.pruning.method if targets.mask_file is None else targets.mask_file.path
    rises = order is not None and order.schedule == "gradual"
    by_owl = order is not None and order.distribution == "owl"
    yield f"pruned by {by}{', then magnitude while the model trains' * rises}:"
    if by_owl:
        yield f"{100 * targets.sparsity:g} % in all; OWL finds each layer's sparsity from samples"
    yield from _kept_table(targets.shapes, None if by_owl else targets.kept())
    for why, parameters in left_dense(profiled, targets, config.pruning).items():
        yield ""
        yield f"dense, {sum(one.numel for one in parameters):,} entries: {why}"
        # Tensors that repeat from block to block are one line: hundreds of vectors hide the rest.
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for one in parameters:
            alike.setdefault((NUMBER.sub("*", one.name), one.shape), []).append(one.name)
        for (pattern, shape), names in alike.items():
            name = names[0] if len(names) == 1 else pattern
            more = "" if len(names) == 1 else f"  ({len(names)} tensors)"
            yield f"  {name}  {' × '.join(map(str, shape))}{more}"


def _kept_table(
    shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int] | None
) -> Iterator[str]:
    """A row of the table for each pruned tensor, and one for all; None leaves two columns out."""
    from axsparse.planner.plan_report import table

    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    found = []
    for name, numel in {**numels, "total": sum(numels.values())}.items():
        shape = " × ".join(map(str, shapes.get(name, ())))
        row = {"tensor": name, "shape": shape, "entries": f"{numel:,}"}
        if kept is not None:
            stay = kept[name] if name in shapes else sum(map(kept.__getitem__, shapes))
            row |= {"kept": f"{stay:,}", "sparsity": f"{100 * (1 - stay / max(numel, 1)):.3f} %"}
        found.append(row)
    yield from table(found)
