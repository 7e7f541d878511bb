"""Refuses configurations that cannot be run before torch is loaded, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence

from axsparse.config.load import load_config
from axsparse.config.validate import check_config, check_divides_ranks
from axsparse.runtime.connection import leave_before_start
from axsparse.runtime.errors import AxsparseError
from axsparse.runtime.launcher import SRUN_SIZE, speaks, started_by_launcher
from axsparse.runtime.mpi.mpi_transport import wait_until_all_ranks_have_started


def refuse_early(source: str | None, overrides: Sequence[str]) -> None:
    """End the job if its configuration breaks a rule that needs no more than itself.

    Of many ranks the one that speaks says so. Others that find a mistake start MPI, so that they
    can be ended, and go on: if the mistake is theirs alone, such as a file that is missing on one
    host, it is found again when all ranks read the configuration together.
    """
    try:
        loaded = load_config(source, overrides)
        check_config(loaded)
        if not started_by_launcher() and SRUN_SIZE not in os.environ:
            for name in ("g_inter", "g_data"):
                count = getattr(loaded.config.layout, name)
                if count != "auto":
                    check_divides_ranks(loaded, f"layout.{name}", count, 1, [1])
    except AxsparseError as error:
        if speaks():
            leave_before_start(str(error), error.exit_code)
        wait_until_all_ranks_have_started()
