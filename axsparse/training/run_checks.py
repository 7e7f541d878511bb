"""Rules between a configuration, its ranks and its start values; all ranks must be alike."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping

from axsparse.config.messages import shorten
from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.start_weights import FromFile
from axsparse.models.survey import Survey
from axsparse.pruning.targets import Targets
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_texts, sum_of, text_of_first
from axsparse.runtime.provenance import versions
from axsparse.training.checkpoint.verification import flat


def check_transport(config: Config, transport: Transport, *, on_host: bool) -> None:
    """ConfigError for a way to communicate that these ranks cannot take."""
    setting = config.transport
    # One process that has loaded MPI needs it as little as one that has not.
    if setting == "local" and transport.size > 1:
        raise ConfigError(
            f"{config.where('transport')}: local is for one process, but {transport.size} ranks "
            "are running; choose auto or mpi"
        )
    if setting not in ("auto", "local") and transport.name == "local":
        raise ConfigError(
            f"{config.where('transport')}: no MPI library was found; load the site's MPI module, "
            "install axsparse[mpich], or choose auto"
        )
    # One rank on a GPU has nobody to talk to and keeps MPI's transport.
    if setting == "nccl" and transport.name.startswith("mpi") and on_host:
        raise ConfigError(
            f"{config.where('transport')}: nccl is for ranks that compute on GPUs, and these "
            "compute on CPUs; choose auto or mpi"
        )


def check_weights_are_loaded(config: Config, model: Model, targets: Targets) -> None:
    """ConfigError unless all that is pruned starts at loaded weights, as some methods need."""
    start, method = model.start, config.pruning.method
    if start is None:
        raise ConfigError(
            f"{config.where('pruning.method')}: {method} looks at loaded weights, and none are "
            "loaded; set model.from or model.weights"
        )
    anew = [name for name in targets.shapes if isinstance(start, FromFile) and name in start.new]
    if anew:
        raise ConfigError(
            f"{config.where('pruning.method')}: {method} looks at loaded weights, and {anew[0]} "
            "begins anew; name it in pruning.exclude, or choose another method"
        )


START = "start values"
"""The name of the fact that differs where ranks have drawn different start values."""
MENDS = {START: "call torch.manual_seed before you make the modules"}
"""Suggestions for differences in a fact that starting all ranks alike does not resolve."""


def facts_of(config: Config, survey: Survey) -> dict[str, str]:
    """The facts that must be equal on all ranks: every version, every setting, every layer."""
    settings = {key: str(value) for key, value in flat(config.model_dump()).items()}
    layers = {f"layer {layer.name}": repr(layer.parameters) for layer in survey.layers}
    return {
        **versions(),
        **settings,
        **layers,
        "ties": repr(survey.ties),
        START: survey.start or "drawn from the seed",
    }


def refuse_odd_rank(transport: Transport, facts: Mapping[str, str]) -> None:
    """ConfigError if a fact differs between ranks; names the odd rank and its host."""
    odd = odd_rank(transport, facts)
    if odd is not None:
        fact, text = odd
        mend = "start all ranks with the same command, configuration and environment"
        raise ConfigError(f"{text}; {MENDS.get(fact, mend)}")


def odd_rank(transport: Transport, facts: Mapping[str, str] | None) -> tuple[str, str] | None:
    """A fact that differs between ranks, and on which rank and host; None if all are equal.

    Rank 0 has facts. All ranks call this together; those whose facts are None are not compared.
    """
    text_here = json.dumps(None if facts is None else {"host": socket.gethostname(), **facts})
    # Facts of a large model are 40 kB, so that all ranks' are only gathered to name the odd one.
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    is_other = digest != text_of_first(transport, digest) and facts is not None
    if sum_of(transport, [float(is_other)]) == [0.0]:
        return None
    texts = gather_texts(transport.world, transport.backoff, text_here)
    everyone = {rank: json.loads(text) for rank, text in enumerate(texts) if text != "null"}
    for fact in everyone[0]:
        values = Counter(there.get(fact, "nothing") for there in everyone.values())
        common = values.most_common(1)[0][0]
        for rank, there in everyone.items():
            if fact != "host" and (has := there.get(fact, "nothing")) != common:
                others = "the others have" if len(everyone) > 2 else "rank 0 has"
                return fact, (
                    f"{fact}: rank {rank} on host {there['host']} has {shorten(has)}, {others} "
                    f"{shorten(common)}"
                )
    return None
