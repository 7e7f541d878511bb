"""`axsparse doctor`: checks whether a machine, or all ranks of a launcher, can train."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from axsparse.cli.parser import CommandParser
from axsparse.runtime.errors import EXIT_INTERNAL, ConfigError
from axsparse.runtime.launcher import speaks, write_line
from axsparse.runtime.process_exit import exit_process

if TYPE_CHECKING:
    from axsparse.cli.doctor.checkup import Finding
    from axsparse.cli.doctor.machine import MachineFacts

EXIT_WRONG = 1
DESCRIPTION = """\
Check whether this machine is fit for training; under a launcher, whether all ranks are.

  axsparse doctor
  mpirun -n 4 axsparse doctor
  srun -n 8 --mpi=pmi2 axsparse doctor --run-dir /scratch/me/run --json

✓ is well, ✗ is wrong, ! works but is slow, – is not there and need not be.
"""
EPILOG = """\
exit codes:
  0 nothing is wrong   1 something is   78 arguments that cannot be run
"""


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(
        prog="axsparse doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    arguments.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        default=Path("runs"),
        help="where runs will write (default %(default)s)",
    )
    arguments.add_argument("--json", action="store_true", help="print all facts as one object")
    return arguments


def main(argv: Sequence[str]) -> NoReturn:
    """Examine, print, and end the process; all ranks of a launcher call this together."""
    arguments = parser().parse_args(argv)
    # Imported late, so that --help loads neither torch nor MPI.
    from axsparse.cli.doctor.machine import MachineFacts, Mpi, look
    from axsparse.runtime.connection import connect
    from axsparse.runtime.exchange import gather_texts
    from axsparse.runtime.local.local_transport import LocalTransport
    from axsparse.runtime.local.local_world import LocalWorld
    from axsparse.runtime.mpi.mpi_transport import mpi_library, thread_level

    try:
        transport = connect()
        mpi = Mpi(mpi_library(), thread_level()) if transport.name != "local" else Mpi()
        alone = False
    except ConfigError as error:
        # The ranks cannot connect, so that each looks at itself and only the first one prints.
        transport, alone = LocalTransport(LocalWorld(1), 0), True
        mpi = Mpi(problem=str(error))
    try:
        own = json.dumps(asdict(look(transport.rank, transport.size, mpi, arguments.run_dir)))
        texts = gather_texts(transport.world, transport.backoff, own)
    except Exception as failure:  # any failure has to end the other ranks, which wait
        write_line(f"error: doctor: rank {transport.rank}: {failure}")
        transport.abort(EXIT_INTERNAL)
    ranks = [MachineFacts(**_tuples(json.loads(text))) for text in texts]
    from axsparse.cli.doctor.checkup import findings

    found = findings(ranks)
    if transport.rank == 0 and (speaks() or not alone):
        _tell(found, ranks, as_json=arguments.json)
    transport.close()
    exit_process(EXIT_WRONG if any(finding.mark == "wrong" for finding in found) else 0)


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `MachineFacts` from JSON, whose lists become tuples."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def _tell(found: Sequence[Finding], ranks: Sequence[MachineFacts], *, as_json: bool) -> None:
    """Print findings and devices as lines, or everything as JSON."""
    from axsparse.cli.doctor.checkup import device_map

    if as_json:
        told = {
            "findings": [asdict(finding) for finding in found],
            "ranks": [asdict(rank) for rank in ranks],
        }
        print(json.dumps(told, indent=2), flush=True)
        return
    lines = [*map(str, found), *(f"  {line}" for line in device_map(ranks))]
    text = "\n".join(lines) + "\n"
    # A terminal whose encoding lacks "✓" must not end the command.
    sys.stdout.buffer.write(text.encode(sys.stdout.encoding or "utf-8", errors="replace"))
    sys.stdout.flush()
