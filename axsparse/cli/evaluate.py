"""`axsparse evaluate`: the validation loss and metrics of a run's model, on one process."""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from typing import Literal

from axsparse.cli.parser import DATA, CommandParser, add_checkpoint, add_set, integer, say
from axsparse.runtime.console import make_console

DESCRIPTION = """\
Evaluate a trained model on all validation data. RUN is a run directory, whose newest checkpoint is
taken, or one checkpoint in it; --set says where its data are now, or names other validation data:

  axsparse evaluate runs/my_run
  axsparse evaluate runs/my_run --step 500 --batches 4
  axsparse evaluate runs/my_run --set data.path=moved/tokens

One process computes it on the CPU, in the precision and with the microbatches of the run.
"""


def parser() -> CommandParser:
    arguments = CommandParser(_evaluate, prog="axsparse evaluate", description=DESCRIPTION)
    add_checkpoint(arguments.add_argument)
    text = "global batches of validation data, as train.eval_steps (default %(default)s)"
    arguments.add_argument("--batches", metavar="N|all", type=_batches, default="all", help=text)
    add_set(arguments.add_argument, DATA)
    return arguments


def _batches(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else integer()(text)


def _evaluate(arguments: argparse.Namespace) -> None:
    # Imported late, so that --help does not load torch.
    from axsparse.config.load import data_elsewhere
    from axsparse.data.sources import open_datasets
    from axsparse.observe.metrics import perplexity
    from axsparse.training.evaluation import evaluate_saved, open_saved_model

    saved = open_saved_model(arguments.run, arguments.step)
    config = data_elsewhere(saved.config, arguments.overrides)
    # A run without evaluations does not open its validation data.
    train = config.train.model_copy(update={"eval_steps": "all"})
    datasets = open_datasets(config.model_copy(update={"train": train}))
    with contextlib.closing(make_console(sys.stderr)) as console:
        show = partial(console.progress, text="batches")
        evaluation = evaluate_saved(saved, datasets, arguments.batches, show)
    parts = [f"step {saved.checkpoint.step}: validation loss {evaluation.loss:.6g}"]
    if datasets.training.vocab_size:
        parts.append(f"perplexity {perplexity(evaluation.loss):.6g}")
    parts += [f"{name} {value:.6g}" for name, value in evaluation.metrics.items()]
    parts.append(f"({evaluation.samples} of {evaluation.available} samples)")
    say("  ".join(parts))
