"""`axsparse COMMAND …`: the commands under one name."""

from __future__ import annotations

import sys
from typing import NoReturn

from axsparse.runtime.errors import EXIT_CONFIG
from axsparse.runtime.launcher import speaks

USAGE = """\
usage: axsparse COMMAND ...

commands:
  train      train what a configuration file describes (axsparse train --help)
  plan       find a layout, its memory and its time, without a GPU (axsparse plan --help)
  calibrate  measure this machine, for plans of it (axsparse calibrate --help)
  trace      hold traces of steps against each other (axsparse trace --help)
  data       turn text files into tokens (axsparse data prepare --help)
  ticket     say what a file of masks holds (axsparse ticket show --help)
  checkpoint look at what a run saved (axsparse checkpoint --help)
  export     write what was trained for other libraries (axsparse export --help)
  submit     give a training run to SLURM or LSF (axsparse submit --help)
  doctor     look whether this machine is fit for training (axsparse doctor --help)
"""


def main() -> NoReturn:
    """Hand over to the command; one of many ranks speaks."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "train":
        from axsparse import train

        train.main(sys.argv[2:])
    if command == "plan":
        from axsparse.cli import plan

        plan.main(sys.argv[2:])
    if command == "calibrate":
        from axsparse.cli import calibrate

        calibrate.main(sys.argv[2:])
    if command == "trace":
        from axsparse.cli import trace as trace_command

        trace_command.main(sys.argv[2:])
    if command == "data":
        from axsparse.cli import data as data_command

        data_command.main(sys.argv[2:])
    if command == "ticket":
        from axsparse.cli import ticket as ticket_command

        ticket_command.main(sys.argv[2:])
    if command == "checkpoint":
        from axsparse.cli import checkpoint as checkpoint_command

        checkpoint_command.main(sys.argv[2:])
    if command == "export":
        from axsparse.cli import export

        export.main(sys.argv[2:])
    if command == "submit":
        from axsparse.cli.submit import submit

        submit.main(sys.argv[2:])
    if command == "doctor":
        from axsparse.cli.doctor import doctor

        doctor.main(sys.argv[2:])
    if command in ("-h", "--help"):
        sys.stdout.write(USAGE if speaks() else "")
        sys.exit(0)
    if command == "--version":
        import axsparse

        print(f"axsparse {axsparse.__version__}")
        sys.exit(0)
    if speaks():
        print(f"axsparse: error: no command {command!r}; see axsparse --help", file=sys.stderr)
    sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
