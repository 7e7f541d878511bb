"""Cluster files: what they say, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

from axsparse.planner.cluster import CONSTANTS, cluster_text, load_cluster, parse_cluster


def test_summit_has_five_fitted_constants_and_one_of_them_stands_twice() -> None:
    summit = load_cluster("summit")
    fitted = sorted(name for name, origin in summit.origins.items() if origin.kind == "fitted")

    assert fitted == [
        *("compression_rate", "efficiency", "inter_node_bandwidth", "intra_node_bandwidth"),
        *("nic_efficiency", "ring_latency"),
    ]
    assert summit.inter_node_bandwidth == summit.intra_node_bandwidth
    assert [summit.node_of(rank) for rank in (0, 5, 6, 12)] == [0, 0, 1, 2]


def test_the_manual_has_every_key_and_a_file_to_begin_with() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "plan.md"
    table = page.read_text().partition("### A cluster file")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    keys = [key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])]

    assert sorted(keys) == sorted(CONSTANTS)
    assert parse_cluster(cluster_text("summit"), "summit.yaml") == load_cluster("summit")
