"""Job scripts for LSF's bsub."""

from __future__ import annotations

from axsparse.cli.submit.job_request import JobRequest
from axsparse.cli.submit.template import common, copying, directives, fill, in_directive, words
from axsparse.runtime.errors import ConfigError

LAUNCHERS = ("jsrun", "mpirun")
CHAIN = """\
case "$code" in
  # Done, or what would only happen again: the rest of the chain is not needed.
  0 | 65 | 66 | 74 | 78)
    [ "$LSB_JOBINDEX" -eq {last} ] || bkill "${{LSB_JOBID}}[$((LSB_JOBINDEX + 1))-{last}]"
    ;;
esac"""


def check_lsf(request: JobRequest) -> None:
    """ConfigError for what a launcher under LSF cannot do."""
    per_node, gpus = request.ranks_per_node, request.gpus_per_node
    if request.launcher == "jsrun" and gpus not in (0, per_node):
        raise ConfigError(
            f"--gpus-per-node: {gpus} for {per_node} ranks a node, but jsrun gives each rank one; "
            f"choose {per_node}, or --launcher mpirun"
        )
    if request.copy_to is not None and request.launcher != "jsrun":
        raise ConfigError(
            f"--copy-environment: {request.launcher} cannot start one process on each node under "
            "LSF; choose --launcher jsrun, or leave the option out"
        )


def render(request: JobRequest) -> str:
    """The script of a checked request."""
    chained = request.chain > 1
    if request.launcher == "jsrun":
        size = [f"-nnodes {request.nodes}"]
        gpus = 1 if request.gpus_per_node else 0
        resources = ["-a1", f"-g{gpus}", f"-c{request.cpus_per_rank}"]
        launch = ["jsrun", "-n", str(request.ranks), *resources]
    else:
        size = [f"-n {request.ranks}", f'-R "span[ptile={request.ranks_per_node}]"']
        size += [f'-gpu "num={request.gpus_per_node}"'] if request.gpus_per_node else []
        launch = [request.mpirun, "-n", str(request.ranks)]
    log = f"{request.run_dir}/job-{'%J_%I' if chained else '%J'}.log"
    options = [
        f'-J "{request.name}[1-{request.chain}]%1"' if chained else f"-J {request.name}",
        *size,
        f"-W {_hours_minutes(request.seconds)}",
        # The time between warning and end is in whole minutes, rounded up.
        "-wa USR1",
        f"-wt {-(-request.margin // 60)}",
        *([] if chained else ["-r", "-Q 75"]),
        f"-o {in_directive(log)}",
        *([f"-P {request.account}"] if request.account else []),
        *([f"-q {request.queue}"] if request.queue else []),
        *request.directives,
    ]
    return fill(
        "lsf.sh",
        {
            **common(request),
            **copying(request, f"jsrun -n {request.nodes} -r1 -a1 -c1", '"$LSB_JOBID"'),
            "directives": directives("#BSUB", options),
            "launch": words(launch),
            "ending": CHAIN.format(last=request.chain) if chained else "",
        },
    )


def _hours_minutes(seconds: int) -> str:
    """The time as "H:MM", rounded up, since LSF has no seconds."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02}"
