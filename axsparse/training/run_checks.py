"""Rules between a configuration and the ranks and start values of its run."""

from __future__ import annotations

from axsparse.config.load import LoadedConfig
from axsparse.models.layer import Model
from axsparse.models.start_weights import FromFile
from axsparse.pruning.targets import Targets
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError


def check_transport(loaded: LoadedConfig, transport: Transport, *, on_host: bool) -> None:
    """ConfigError for a way to communicate that these ranks cannot take."""
    wanted = loaded.config.transport
    if wanted == "local" and transport.name != "local":
        raise ConfigError(
            f"{loaded.where('transport')}: local is for one process without MPI, but "
            f"{transport.size} MPI ranks are running; choose auto or mpi"
        )
    if wanted not in ("auto", "local") and transport.name == "local":
        raise ConfigError(
            f"{loaded.where('transport')}: no MPI library was found; load the site's MPI module, "
            "install axsparse[mpich], or choose auto"
        )
    # One rank on a GPU has nobody to talk to and keeps MPI's transport.
    if wanted == "nccl" and transport.name.startswith("mpi") and on_host:
        raise ConfigError(
            f"{loaded.where('transport')}: nccl is for ranks that compute on GPUs, and these "
            "compute on CPUs; choose auto or mpi"
        )


def check_weights_are_loaded(loaded: LoadedConfig, model: Model, targets: Targets) -> None:
    """ConfigError unless all that is pruned starts at loaded weights, as some methods need."""
    start, method = model.start, loaded.config.pruning.method
    if start is None:
        raise ConfigError(
            f"{loaded.where('pruning.method')}: {method} looks at loaded weights, and none are "
            "loaded; set model.from or model.weights"
        )
    anew = [name for name in targets.shapes if isinstance(start, FromFile) and name in start.new]
    if anew:
        raise ConfigError(
            f"{loaded.where('pruning.method')}: {method} looks at loaded weights, and {anew[0]} "
            "begins anew; name it in pruning.exclude, or choose another method"
        )
