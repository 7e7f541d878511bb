"""Cluster files: what they say, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from axsparse.planner.cluster import (
    CONSTANTS,
    KINDS,
    bundled_clusters,
    cluster_text,
    load_cluster,
    parse_cluster,
    to_yaml,
)
from axsparse.runtime.errors import ConfigError, MissingInputError

GOOD = to_yaml(load_cluster("summit"))


def without(name: str) -> str:
    """The good file without the lines that begin so."""
    return "".join(f"{line}\n" for line in GOOD.splitlines() if not line.startswith(name))


@pytest.mark.parametrize("name", bundled_clusters())
def test_every_constant_says_where_it_comes_from_and_survives_its_text(name: str) -> None:
    found = load_cluster(name)

    assert found.name == name
    given = [constant for constant in CONSTANTS if getattr(found, constant) is not None]
    assert sorted(found.origins) == sorted(given)
    assert all(origin.kind in KINDS and origin.source for origin in found.origins.values())
    assert found.is_of_hosts == (name == "laptop")
    assert parse_cluster(to_yaml(found), f"{name}.yaml") == found


def test_summit_has_five_fitted_constants_and_one_of_them_stands_twice() -> None:
    summit = load_cluster("summit")
    fitted = sorted(name for name, origin in summit.origins.items() if origin.kind == "fitted")

    assert fitted == [
        *("compression_rate", "efficiency", "inter_node_bandwidth", "intra_node_bandwidth"),
        *("nic_efficiency", "ring_latency"),
    ]
    assert summit.inter_node_bandwidth == summit.intra_node_bandwidth
    assert [summit.node_of(rank) for rank in (0, 5, 6, 12)] == [0, 0, 1, 2]
    with pytest.raises(ConfigError, match="its devices have no peak_bf16; choose a precision of"):
        summit.peak("bf16")


def test_a_file_is_read_from_its_path_and_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    assert load_cluster(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("sumit", r"no bundled cluster of that name; did you mean summit\?.*a100-pod"),
        ("no/such.yaml", r"cannot be read \(No such file or directory\); name a file, or a bundl"),
    ],
)
def test_a_cluster_that_is_not_there_names_those_that_are(source: str, said: str) -> None:
    with pytest.raises(MissingInputError, match=said):
        load_cluster(source)


def test_a_folder_and_a_file_of_bytes_are_called_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    said = {
        "mine": "a folder and no bundled cluster of that name; choose one of a100-pod, ",
        "./mine": "cannot be read (Is a directory); name a file, or a bundled cluster",
        "bytes.yaml": "byte 0xff is not UTF-8; save the file as UTF-8",
    }

    for source, why in said.items():
        with pytest.raises(MissingInputError, match=re.escape(why)):
            load_cluster(source)


def given(name: str, value: str, kind: str = "assumed", source: str = "x") -> str:
    """A line with one constant."""
    return f"{name}: {{value: {value}, kind: {kind}, source: {source}}}\n"


REFUSED = {
    "a: {b": "mine.yaml:1: not YAML: while",
    "- 1": "a cluster file has mappings here",
    GOOD + given("jitter", "0"): f"mine.yaml:{GOOD.count(chr(10)) + 1}: jitter is given twice in",
    given("efficiency", "1.2"): "mine.yaml:1: efficiency is '1.2'; a cluster needs a number above "
    "0 and at most 1 here",
    given("gpus_per_node", "2.5"): "a cluster needs a whole number of at least 1 here",
    given("memory_bandwidth", "0"): "a cluster needs a positive number here",
    given("memory_bandwidth", ".inf"): "a cluster needs a positive number here",
    given("memory_bandwidth", "fast"): "a cluster needs a positive number here",
    given("jitter", "-1"): "a cluster needs a number of at least 0 here",
    given("jitter", "[1]"): "jitter is 'a list or mapping'; a cluster needs a number of at",
    given("fused_attention", "2"): "a cluster needs 1 for yes or 0 for no here",
    given("jiter", "0"): "mine.yaml:1: a cluster has no 'jiter' here; did you mean jitter?",
    given("velocity", "0"): "a cluster has no 'velocity' here; choose one of memory_bytes, peak_",
    "name: x": "a cluster has no 'name' here; it is named by its file, so leave this key out",
    "jitter: {value: 0, kind: assumed, origin: x}": "has no 'origin' here; choose one of value, k",
    "jitter: {value: 0, kind: assumed}": "jitter has no source; write jitter: {value: …, kind",
    given("jitter", "0", kind="guessed"): "jitter is of kind 'guessed'; a constant is measured, ",
    given("jitter", "0", source="''"): "jitter has an empty source; say where",
    without("jitter"): "cluster file mine.yaml: jitter is missing; give every constant of",
    without("peak_"): "peak_bf16 is missing",
}


@pytest.mark.parametrize("text", REFUSED)
def test_mistakes_are_told_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text, "mine.yaml")

    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_manual_has_every_key_and_a_file_to_begin_with() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "plan.md"
    table = page.read_text().partition("### A cluster file")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    keys = [key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]

    assert sorted(keys) == sorted(CONSTANTS)
    assert parse_cluster(cluster_text("summit"), "summit.yaml") == load_cluster("summit")


def test_a_file_of_other_letters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"peak_fp32: \xff")

    with pytest.raises(
        MissingInputError, match=r"^cluster .*: byte 0xff is not UTF-8; save the file as UTF-8"
    ):
        load_cluster(str(tmp_path / "mine.yaml"))
