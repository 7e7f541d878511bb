"""`axsparse train`: trains the model of a configuration file, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    add_run,
    overrides_of,
    reject_early,
    require_configuration,
)
from axsparse.runtime.connection import cannot_start
from axsparse.runtime.stop_signal import StopRequest, handle_interrupt

DESCRIPTION = """\
Train a pruned network over pipeline stages, their tensor-parallel ranks and replicas.

Start it by itself, or on many ranks with an MPI launcher:

  axsparse train --config quickstart.yaml --set layout.g_inter=1
  mpirun -n 4 axsparse train --config quickstart.yaml
  mpirun -n 512 axsparse train --config my_run.yaml --set layout.g_inter=8
"""
EPILOG = """\
examples of --set (any key of the configuration, later ones win):
  --set layout.g_inter=2              pipeline stages; the other ranks become replicas
  --set precision=fp32                auto, fp32, bf16 or fp16
  --set samo.enabled=false            train dense: the baseline of all comparisons
  --set pruning.sparsity=0.8          fraction of the block weights that is removed
  --set batch.microbatch_size=4       sequences that pass through the pipeline together
  --set optimizer.learning_rate=1e-3 --set seed=7

what a run leaves behind, in --run-dir:
  config.yaml     every setting as it ran, with versions
  metrics.jsonl   one object a step, and one an evaluation (axsparse report draws them)
  trace/          every moment of some steps, with train.trace=N (axsparse report draws the last)
  checkpoints/    what --resume goes on from

Ctrl-C, SIGUSR1, SIGTERM or SIGHUP (a closed terminal) ends the step under way, saves, and exits
with 75; a second one ends at once.

exit codes:
  0 done   65 data or checkpoint does not fit   66 input missing   70 a rank failed
  73 another run has the directory   74 output cannot be written   75 saved, to be resumed
  78 configuration cannot be run
"""


def parser() -> CommandParser:
    arguments = CommandParser(prog="axsparse train", description=DESCRIPTION, epilog=EPILOG)
    add_configuration(arguments.add_argument)
    add_run(arguments.add_argument)
    arguments.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="go on from the newest whole checkpoint of the run directory, or start where there "
        "is none (auto); or from a run, or one of its checkpoints, on any layout of ranks",
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train, and end the process with the exit code of the run."""
    arguments = parser().parse_args(argv)
    require_configuration(arguments, "train")
    # Ctrl-C ends the process silently while libraries load; `run` restores Python's handling.
    handle_interrupt(signal.SIG_DFL)
    overrides = overrides_of(arguments)
    # Imported late, so that --help loads neither torch nor MPI, and a host that lacks a package
    # says so in one line.
    try:
        reject_early(arguments, overrides)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # once the run has ended: its code is known
        stop = StopRequest()
        stop.listen()
        from axsparse.config.load import configure
        from axsparse.data.sources import open_datasets
        from axsparse.models.zoo.model_registry import named_model
        from axsparse.runtime.exchange import together
        from axsparse.runtime.job import Job, run
        from axsparse.training.trainer import build
    except Exception as reason:
        cannot_start(reason)

    def train(job: Job) -> None:
        config = together(job.transport, lambda: configure(arguments.config, overrides))
        model = together(job.transport, lambda: named_model(config))
        datasets = partial(open_datasets, config)
        build(job, model, datasets, config, resume=arguments.resume).train()

    run(train, stop)


if __name__ == "__main__":
    main()
