"""Clusters: the constants of a machine, from which the planner predicts times.

Each constant says where it comes from. Cluster files are YAML; some are bundled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from axsparse.config.load import compose, entries, find_file, read_text, value_of
from axsparse.config.messages import nearest_choice
from axsparse.runtime.errors import ConfigError

Kind: TypeAlias = Literal["measured", "fitted", "assumed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
_FOLDER = Path(__file__).parent / "clusters"
DEFAULT_CLUSTER = "laptop"
"""The bundled cluster that the planner takes where none is named."""
Positive = Annotated[float, Field(gt=0)]
FromZero = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Origin:
    kind: Kind
    source: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config={"extra": "forbid"})
class _Constant(Origin):
    value: Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices, one for each rank. Units are bytes, seconds and flops."""

    name: str
    memory_bytes: Positive
    peak_fp32: Positive | None = None
    """Flop/s of a device, as its maker states them; None if it has no unit for this precision."""
    peak_bf16: Positive | None = None
    peak_fp16: Positive | None = None
    efficiency: Fraction
    """e: the fraction of the peak that forwards and backwards reach."""
    memory_bandwidth: Positive
    gpus_per_node: Annotated[int, Field(ge=1)]
    """Devices of a node, and so ranks of a node."""
    intra_node_bandwidth: Positive
    """B_p within a node: bytes/s of a message between neighbouring stages, software and staging
    included. The sender and the receiver are each busy for this time."""
    intra_node_latency: FromZero
    """Seconds from the end of sending to the arrival, in which neither is busy."""
    inter_node_bandwidth: Positive
    inter_node_latency: FromZero
    nic_bandwidth: Positive
    """Bytes/s that leave a node through its network cards, which all rings of the node share."""
    nic_efficiency: Fraction
    """η: the fraction of `nic_bandwidth` that an all-reduce reaches."""
    ring_bandwidth: Positive
    """Bytes/s of an all-reduce ring inside a node, for each device."""
    peer_bandwidth: Positive | None = None
    """Bytes/s of the links between two devices of a node that no switch joins; None if one does."""
    ring_latency: FromZero
    """α: seconds of each of the 2 (D − 1) hops in a ring of D devices."""
    node_ring_latency: FromZero | None = None
    """α of rings within a node; None: as between nodes."""
    weight_rate: Positive | None = None
    """ω: weights a second that a forward reads, whatever the size of its microbatch; None where
    the arithmetic hides that time, as on GPUs."""
    weight_share: Positive | None = None
    """τ: the time of the products that make gradients of weights, relative to as many flops at
    `efficiency`; None: 1."""
    traffic: FromZero | None = None
    """Bytes that kernels move, relative to the count of `benchmarks/published/transformer.py`; None
    where `efficiency` carries that time as well."""
    compression_rate: Positive
    """κ: dense gradient entries a second that a backward compresses."""
    overhead_bytes: FromZero
    """c: bytes of a device's memory that framework and libraries hold."""
    host_memory_bytes: Positive | None = None
    """Memory of the host for each of its devices; None if devices compute in the host's memory."""
    host_bandwidth: Positive | None = None
    """Bytes/s between a device and its host, in both directions at once; None if there is no host
    memory to offload to."""
    jitter: FromZero
    """σ of the logarithm of a random factor, of mean 1, on every forward and backward."""
    origins: Mapping[str, Origin]

    @property
    def is_of_hosts(self) -> bool:
        """Whether ranks compute in their host's memory."""
        return self.host_memory_bytes is None

    def peak(self, precision: Precision) -> float:
        """Flop/s of a device; ConfigError if it has no unit for this precision."""
        found: float | None = getattr(self, f"peak_{precision}")
        if found is None:
            has = [name for name in get_args(Precision) if getattr(self, f"peak_{name}")]
            raise ConfigError(
                f"cluster {self.name}: its devices have no peak_{precision}; choose a precision of "
                f"{', '.join(has)}, or add the constant to its file"
            )
        return found

    def node_of(self, rank: int) -> int:
        """The number of the node that a rank is on: ranks fill one node after the other."""
        return rank // self.gpus_per_node


CONSTANTS = tuple(field.name for field in fields(Cluster) if field.name not in ("name", "origins"))
_PEAKS = tuple(f"peak_{precision}" for precision in get_args(Precision))
_READ_CONSTANT = TypeAdapter(_Constant).validate_python


def load_cluster(source: str) -> Cluster:
    """Read a cluster file by its path, or a bundled cluster by its name.

    MissingInputError if there is no such cluster, ConfigError for missing, unknown or impossible
    constants.
    """
    path = find_file("cluster", source, _FOLDER)
    return parse_cluster(read_text("cluster", path), path.name)


def cluster_text(source: str) -> str:
    """The text of a cluster file that `load_cluster` would read, comments included."""
    return read_text("cluster", find_file("cluster", source, _FOLDER))


@cache
def parse_cluster(text: str, file: str) -> Cluster:
    """Read the text of a cluster file; the cluster's name is the stem of `file`."""
    constants: dict[str, _Constant] = {}
    places: dict[str, str] = {}
    root = compose(text, lambda line: f"{file}:{line}")
    for key, here, node in () if root is None else entries(root, file, file, _reject_unknown):
        places[key] = here
        try:
            constants[key] = _READ_CONSTANT(value_of(node, here))
        except ValidationError as reason:
            [first, *_] = reason.errors()
            raise ConfigError(
                f"{here}: {'.'.join(map(str, (key, *first['loc'])))}: {first['msg']}; write {key}: "
                f"{{value: …, kind: {'|'.join(KINDS)}, source: …}}"
            ) from None
    values = {key: each.value for key, each in constants.items()}
    origins = {key: Origin(each.kind, each.source) for key, each in constants.items()}
    try:
        cluster = Cluster(name=Path(file).stem, origins=origins, **values)  # type: ignore[arg-type]
    except ValidationError as reason:
        problems = {str(each["loc"][0]): each["msg"] for each in reason.errors()}
        wrong = next((key for key in problems if key in values), None)
        if wrong is None:
            raise _missing(file, min(problems, key=CONSTANTS.index)) from None
        raise ConfigError(
            f"{places[wrong]}: {wrong} is {values[wrong]:g}: {problems[wrong]}; docs/howto/plan.md "
            "explains the constants"
        ) from None
    if not values.keys() & _PEAKS:
        raise _missing(file, min(_PEAKS))
    return cluster


def _missing(file: str, key: str) -> ConfigError:
    return ConfigError(
        f"cluster file {file}: {key} is missing; give every constant of "
        f"{', '.join(CONSTANTS)} (of the peaks those that there are)"
    )


def _reject_unknown(name: str, where: str) -> None:
    if name in CONSTANTS:
        return
    suggestion = nearest_choice(name, CONSTANTS) or f"; choose one of {', '.join(CONSTANTS)}"
    raise ConfigError(f"{where}: a cluster has no {name[:60]!r}{suggestion}")
