"""Compares the versions, settings and layers of all ranks before a run."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Mapping

from axsparse.config.schema import Config
from axsparse.models.survey import Survey
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_texts, sum_of, text_of_first
from axsparse.runtime.provenance import versions
from axsparse.training.checkpoint.compatibility import flat


def facts_of(config: Config, survey: Survey) -> dict[str, str]:
    """What must be equal on all ranks: every version, every setting, every layer."""
    settings = {key: str(value) for key, value in flat(config.model_dump()).items()}
    layers = {f"layer {layer.name}": repr(layer.parameters) for layer in survey.layers}
    return {
        **versions(),
        **settings,
        **layers,
        "ties": repr(survey.ties),
        "start values": survey.start or "drawn from the seed",
    }


def refuse_odd_rank(transport: Transport, facts: Mapping[str, str]) -> None:
    """ConfigError if a fact differs between ranks; names the odd rank and its host."""
    own = json.dumps({"host": socket.gethostname(), **facts})
    # Facts of a large model are 40 kB, so that all ranks' are only gathered to name the odd one.
    digest = hashlib.sha256(json.dumps(dict(facts)).encode()).hexdigest()
    if sum_of(transport, [float(digest != text_of_first(transport, digest))]) == [0.0]:
        return
    everyone = [json.loads(text) for text in gather_texts(transport.world, transport.backoff, own)]
    for fact in facts:
        values = Counter(rank.get(fact, "nothing") for rank in everyone)
        common = values.most_common(1)[0][0]
        for number, rank in enumerate(everyone):
            if (has := rank.get(fact, "nothing")) != common:
                raise ConfigError(
                    f"{fact}: rank {number} on host {rank['host']} has {_short(has)}, the "
                    f"others have {_short(common)}; start all ranks with the same command, "
                    "configuration and environment"
                )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
