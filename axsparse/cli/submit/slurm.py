"""Job scripts for SLURM's sbatch."""

from __future__ import annotations

from axsparse.cli.submit.job_request import JobRequest, clock
from axsparse.cli.submit.template import (
    common,
    copying,
    directives,
    fill,
    in_directive,
    quote,
    words,
)

LAUNCHERS = ("mpirun", "srun")
REQUEUE = """\
if [ "$code" -eq 75 ]; then
  trap '' USR1 TERM # requeueing ends this script
  if scontrol requeue "$SLURM_JOB_ID"; then
    sleep 300
  else
    echo "axsparse: error: saved, but SLURM does not requeue job $SLURM_JOB_ID; submit it again" >&2
  fi
fi"""
RANK = """\
# At the first code that is not 0, srun kills the ranks that are still leaving. Those that all
# ranks leave with go by a file instead.
left={run_dir}/left-"$SLURM_JOB_ID"
rm -f "$left"
rank='trap : USR1; "$@"; code=$?
case "$code" in 65 | 66 | 74 | 75 | 78) echo "$code" >"$0" && code=0 ;; esac; exit "$code"'"""
RANKS_LEFT = """\
if [ -e "$left" ]; then
  code=$(cat "$left")
  rm -f "$left"
fi"""
CHAIN = """\
case "$code" in
  # Done, or what would only happen again: the rest of the chain is not needed.
  0 | 65 | 66 | 74 | 78) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;
esac"""


def render(request: JobRequest) -> str:
    """The script of a checked request."""
    chained = request.chain > 1
    by_srun = request.launcher == "srun"
    log = f"{request.run_dir}/job-{'%A_%a' if chained else '%j'}.log"
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks={request.ranks}",
        f"--ntasks-per-node={request.ranks_per_node}",
        # Neighbouring ranks are neighbouring stages: they share a node.
        "--distribution=block",
        f"--cpus-per-task={request.cpus_per_rank}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        f"--time={clock(request.seconds)}",
        f"--signal=B:USR1@{request.margin}",
        "--requeue",
        *([f"--array=1-{request.chain}%1"] if chained else []),
        "--open-mode=append",
        f"--output={in_directive(log)}",
        *([f"--account={request.account}"] if request.account else []),
        *([f"--partition={request.queue}"] if request.queue else []),
        *request.directives,
    ]
    each = f"srun --nodes={request.nodes} --ntasks={request.nodes} --ntasks-per-node=1 --mpi=none"
    return fill(
        "slurm.sh",
        {
            **common(request),
            **copying(request, each, '"$SLURM_JOB_ID"'),
            "directives": directives("#SBATCH", options),
            "launch": _launch(request),
            "before": RANK.format(run_dir=quote(request.run_dir)) if by_srun else "",
            "after": RANKS_LEFT if by_srun else "",
            "ending": CHAIN if chained else REQUEUE,
        },
    )


def _launch(request: JobRequest) -> str:
    if request.launcher == "mpirun":
        return words([request.mpirun, "-n", str(request.ranks)])
    # Without -K1 the other ranks would wait for a killed one until the time limit.
    mpi = [] if request.mpi is None else [f"--mpi={request.mpi}"]
    size = [f"--ntasks={request.ranks}", f"--cpus-per-task={request.cpus_per_rank}"]
    return words(["srun", "-K1", *mpi, *size]) + ' sh -c "$rank" "$left"'
