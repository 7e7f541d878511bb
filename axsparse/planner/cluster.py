"""Clusters: the constants of a machine, from which the planner predicts times.

Each constant says where it comes from. Cluster files are YAML; some are bundled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import yaml

from axsparse.config.load import compose, entries, find_file, read_text
from axsparse.runtime.errors import ConfigError

Kind: TypeAlias = Literal["measured", "fitted", "assumed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
_FOLDER = Path(__file__).parent / "clusters"
DEFAULT_CLUSTER = "laptop"
"""The bundled cluster that the planner takes where none is named."""


@dataclass(frozen=True)
class Origin:
    kind: Kind
    source: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices, one for each rank. Units are bytes, seconds and flops."""

    name: str
    memory_bytes: float
    peak_fp32: float | None = None
    """Flop/s of a device, as its maker states them; None if it has no unit for this precision."""
    peak_bf16: float | None = None
    peak_fp16: float | None = None
    efficiency: float
    """e: the fraction of the peak that forwards and backwards reach."""
    memory_bandwidth: float
    gpus_per_node: int
    """Devices of a node, and so ranks of a node."""
    intra_node_bandwidth: float
    """B_p within a node: bytes/s of a message between neighbouring stages, software and staging
    included. The sender and the receiver are each busy for this time."""
    intra_node_latency: float
    """Seconds from the end of sending to the arrival, in which neither is busy."""
    message_overhead: float | None = None
    """Seconds that sending or receiving a message takes from a stage whatever its bytes, as its
    host waits for the device before it launches the next kernels."""
    inter_node_bandwidth: float
    inter_node_latency: float
    nic_bandwidth: float
    """Bytes/s that leave a node through its network cards, which all rings of the node share."""
    nic_efficiency: float
    """η: the fraction of `nic_bandwidth` that an all-reduce reaches."""
    ring_bandwidth: float
    """Bytes/s of an all-reduce ring inside a node, for each device."""
    peer_bandwidth: float | None = None
    """Bytes/s of the links between two devices of a node that no switch joins; None if one does."""
    ring_latency: float
    """α: seconds of each of the 2 (D − 1) hops in a ring of D devices."""
    node_ring_latency: float | None = None
    """α of rings within a node; None: as between nodes."""
    weight_rate: float | None = None
    """ω: weights a second that a forward reads, whatever the size of its microbatch; None where
    the arithmetic hides that time, as on GPUs."""
    weight_share: float | None = None
    """τ: the time of the products that make gradients of weights, relative to as many flops at
    `efficiency`; None: 1."""
    traffic: float | None = None
    """Bytes that kernels move, relative to the count of `benchmarks/published/transformer.py`; None
    where `efficiency` carries that time as well."""
    fused_attention: float | None = None
    """1 if the cluster's usual software computes attention without storing scores, 0 or None if
    not."""
    overlapped_messages: float | None = None
    """1 if messages travel while their sender and receiver compute, 0 or None if both wait."""
    scattered_messages: float | None = None
    """1 if the devices that share a layer each send their part of a message to the next stage, 0
    or None if each sends all of it."""
    compression_rate: float
    """κ: dense gradient entries a second that a backward compresses."""
    overhead_bytes: float
    """c: bytes of a device's memory that framework and libraries hold."""
    host_memory_bytes: float | None = None
    """Memory of the host for each of its devices; None if devices compute in the host's memory."""
    host_bandwidth: float | None = None
    """Bytes/s between a device and its host, in both directions at once; None if there is no host
    memory to offload to."""
    jitter: float
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
_OPTIONAL = frozenset(field.name for field in fields(Cluster) if field.default is None)
_PEAKS = tuple(f"peak_{precision}" for precision in get_args(Precision))
_PARTS = ("value", "kind", "source")
_RULES: Sequence[tuple[str, Callable[[float], bool], frozenset[str]]] = (
    (
        "a number of at least 0",
        lambda value: value >= 0,
        frozenset(
            {"intra_node_latency", "inter_node_latency", "ring_latency", "node_ring_latency"}
            | {"message_overhead", "overhead_bytes", "jitter", "traffic"}
        ),
    ),
    (
        "a number above 0 and at most 1",
        lambda value: 0 < value <= 1,
        frozenset({"efficiency", "nic_efficiency"}),
    ),
    (
        "1 for yes or 0 for no",
        lambda value: value in (0, 1),
        frozenset({"fused_attention", "overlapped_messages", "scattered_messages"}),
    ),
    (
        "a whole number of at least 1",
        lambda value: value > 0 and value % 1 == 0,
        frozenset({"gpus_per_node"}),
    ),
    ("a positive number", lambda value: value > 0, frozenset(CONSTANTS)),
)
"""Rules for constants: the first rule that has a constant's name counts."""


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
    values: dict[str, float] = {}
    origins: dict[str, Origin] = {}
    root = compose(text, lambda line: f"{file}:{line}")
    constants = () if root is None else entries(root, file, file, partial(_reject, CONSTANTS))
    for key, here, node in constants:
        inner = entries(node, here, file, partial(_reject, _PARTS))
        parts = {part: (where, leaf) for part, where, leaf in inner}
        for part in _PARTS:
            if part not in parts:
                raise ConfigError(
                    f"{here}: {key} has no {part}; write {key}: {{value: …, kind: "
                    f"{'|'.join(KINDS)}, source: …}}"
                )
        values[key] = _number(key, *parts["value"])
        origins[key] = _origin(key, parts["kind"], parts["source"])
    lacking = [name for name in CONSTANTS if name not in values and name not in _OPTIONAL]
    if not lacking and not values.keys() & _PEAKS:
        lacking = sorted(_PEAKS)
    if lacking:
        raise ConfigError(
            f"cluster file {file}: {lacking[0]} is missing; give every constant of "
            f"{', '.join(CONSTANTS)} (of the peaks those that there are)"
        )
    gpus = values.pop("gpus_per_node")
    return Cluster(name=Path(file).stem, gpus_per_node=int(gpus), origins=origins, **values)


def to_yaml(cluster: Cluster) -> str:
    """Write the text of a cluster file; `parse_cluster` reads it back as an equal cluster."""
    lines = []
    for name, origin in cluster.origins.items():
        value = getattr(cluster, name)
        source = yaml.safe_dump(origin.source, width=math.inf, default_style='"').strip()
        lines.append(f"{name}: {{value: {value!r}, kind: {origin.kind}, source: {source}}}")
    return "\n".join(lines) + "\n"


def _reject(known: Sequence[str], name: str, where: str) -> None:
    if name in known:
        return
    near = get_close_matches(name[:60], known, n=1)
    suggestion = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
    if name == "name":
        suggestion = "it is named by its file, so leave this key out"
    raise ConfigError(f"{where}: a cluster has no {name[:60]!r} here; {suggestion}")


def _number(name: str, where: str, node: yaml.Node) -> float:
    text = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    rule, passes = next((rule, passes) for rule, passes, names in _RULES if name in names)
    if not (math.isfinite(value) and passes(value)):
        raise ConfigError(f"{where}: {name} is {text!r}; a cluster needs {rule} here")
    return value


def _origin(name: str, kind: tuple[str, yaml.Node], source: tuple[str, yaml.Node]) -> Origin:
    """The origin of a constant, from the "file:line" and the node of its kind and of its source."""
    known = next((each for each in KINDS if each == kind[1].value), None)
    if known is None:
        raise ConfigError(
            f"{kind[0]}: {name} is of kind {kind[1].value!r}; a constant is {', '.join(KINDS)}"
        )
    where, node = source
    if not isinstance(node, yaml.ScalarNode) or not node.value.strip():
        raise ConfigError(f"{where}: {name} has an empty source; say where the number comes from")
    return Origin(known, node.value)
