"""Cluster files: what they say, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.planner.cluster import (
    CONSTANTS,
    KINDS,
    bundled_clusters,
    load_cluster,
    parse_cluster,
    to_yaml,
)
from axsparse.runtime.errors import ConfigError, MissingInputError

GOOD = to_yaml(load_cluster("summit"))


def without(name: str) -> str:
    """The good file without one line."""
    return "".join(f"{line}\n" for line in GOOD.splitlines() if not line.startswith(name))


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, "mine.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ten_clusters_are_bundled() -> None:
    assert bundled_clusters() == [
        *("a100-pod", "a100-roce", "dgx-h100", "frontier-mi250x", "h200-node"),
        *("jean-zay-a100", "laptop", "selene-a100", "summit", "v100-edr"),
    ]


@pytest.mark.parametrize("name", bundled_clusters())
def test_every_constant_says_where_it_comes_from(name: str) -> None:
    found = load_cluster(name)

    assert found.name == name
    given = [constant for constant in CONSTANTS if getattr(found, constant) is not None]
    assert sorted(found.origins) == sorted(given)
    assert all(origin.kind in KINDS and origin.source for origin in found.origins.values())


def test_summit_has_five_fitted_constants_and_one_of_them_stands_twice() -> None:
    fitted = [
        name for name, origin in load_cluster("summit").origins.items() if origin.kind == "fitted"
    ]

    assert sorted(fitted) == [
        "compression_rate",
        "efficiency",
        "inter_node_bandwidth",
        "intra_node_bandwidth",
        "nic_efficiency",
        "ring_latency",
    ]
    summit = load_cluster("summit")
    assert summit.inter_node_bandwidth == summit.intra_node_bandwidth


@pytest.mark.parametrize("name", bundled_clusters())
def test_a_cluster_survives_its_text(name: str) -> None:
    found = load_cluster(name)

    assert parse_cluster(to_yaml(found), f"{name}.yaml") == found


def test_a_file_is_read_from_its_path_and_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    assert load_cluster(str(path)).name == "mine"


def test_a_precision_without_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="its devices have no peak_bf16; choose a precision of"):
        load_cluster("summit").peak("bf16")


def test_ranks_fill_one_node_after_the_other() -> None:
    assert [load_cluster("summit").node_of(rank) for rank in (0, 5, 6, 12)] == [0, 0, 1, 2]


def test_a_cluster_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(MissingInputError, match=r"no bundled cluster of that name; .*summit"):
        load_cluster("sumit")
    with pytest.raises(
        MissingInputError, match=r"the file says nothing \(.*\); name a readable one"
    ):
        load_cluster("no/such.yaml")


def test_mistakes_are_told_with_their_line() -> None:
    line = next(n for n, text in enumerate(GOOD.splitlines(), 1) if text.startswith("efficiency"))

    assert "mine.yaml:1: not YAML: while" in refusal("a: {b")
    assert "a cluster file has mappings here" in refusal("- 1")
    assert refusal(GOOD + "jitter: {value: 0, kind: assumed, source: x}\n").startswith(
        f"mine.yaml:{len(GOOD.splitlines()) + 1}: jitter is given twice in this cluster"
    )
    wrong = GOOD.replace("efficiency: {value: 0.8432", "efficiency: {value: 1.2", 1)
    assert refusal(wrong) == (
        f"mine.yaml:{line}: efficiency is '1.2'; "
        "a cluster needs a number above 0 and at most 1 here"
    )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("gpus_per_node", "2.5", "a whole number of at least 1"),
        ("memory_bandwidth", "0", "a positive number"),
        ("memory_bandwidth", "inf", "a positive number"),
        ("memory_bandwidth", "fast", "a positive number"),
        ("jitter", "-1", "a number of at least 0"),
        ("jitter", "[1]", "a number of at least 0"),
    ],
)
def test_no_machine_has_such_a_constant(name: str, value: str, rule: str) -> None:
    text = without(f"{name}:") + f"{name}: {{value: {value}, kind: assumed, source: x}}\n"

    assert f"a cluster needs {rule} here" in refusal(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "jiter: {value: 0, kind: assumed, source: x}",
            "a cluster has no 'jiter' here; did you mean jitter?",
        ),
        ("jitter: {value: 0, kind: assumed, origin: x}", "a cluster has no 'origin' here; choose one of value, kind, source"),
        (
            "jitter: {value: 0, kind: assumed}",
            "jitter has no source; write jitter: {value: …, kind",
        ),
        (
            "jitter: {value: 0, kind: guessed, source: x}",
            "jitter is of kind 'guessed'; a constant is",
        ),
        ("jitter: {value: 0, kind: assumed, source: ''}", "jitter has an empty source; say where"),
        ("", "jitter is missing; give every constant of"),
    ],
)
def test_a_constant_needs_a_value_a_kind_and_a_source(line: str, message: str) -> None:
    assert message in refusal(without("jitter:") + line + "\n")


def test_a_cluster_needs_one_peak() -> None:
    text = "".join(f"{line}\n" for line in GOOD.splitlines() if not line.startswith("peak_"))

    assert "peak_bf16 is missing" in refusal(text)


def test_memory_of_the_host_says_that_ranks_have_their_own() -> None:
    assert {name for name in bundled_clusters() if load_cluster(name).is_of_hosts} == {"laptop"}
    host = 'host_memory_bytes: {value: 1e9, kind: assumed, source: "a test"}\n'
    without = "".join(f"{line}\n" for line in GOOD.splitlines() if "memory_bytes" not in line)
    kept = next(line for line in GOOD.splitlines() if line.startswith("memory_bytes"))

    assert parse_cluster(f"{without}{kept}\n", "mine.yaml").is_of_hosts
    assert not parse_cluster(f"{without}{kept}\n{host}", "mine.yaml").is_of_hosts
