"""`axsparse plan` recommends the number that `layout.g_inter: auto` takes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from support.exhaustive import by_default
from support.local_world import LocalWorld, WorldTransport
from support.page_blocks import BUNDLED

from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.models.model_profile import profile
from axsparse.models.zoo.model_registry import model_without_weights
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.plan_model import planned_model
from axsparse.planner.stage_memory import GPU_OVERHEAD, HOST_OVERHEAD, memory_budget
from axsparse.runtime.errors import ConfigError
from axsparse.samo.precision import DTYPES
from axsparse.training.plan import plan_run

RANKS = 8
SMALL = (
    *("batch.global_batch_size=32", "layout.g_inter=auto", "data.source=stdlib"),
    *("data.path=null", "precision=bf16"),
)
MACHINES = {
    # name: bytes that a rank's device or its share of the host has, and whether that is a host
    "GPUs of 16 GB": (16e9, False),
    "GPUs of 40 GB": (40e9, False),
    "GPUs of 80 GB": (80e9, False),
    "CPUs with 3 GB a rank": (3e9, True),
    "CPUs with 60 GB a rank": (60e9, True),
}
ALL = sorted({*BUNDLED} - {"prune_llama"})  # whose weights have to be there
QUICK = ("quickstart", "gpt3_xl", "gpt3_13b")


def cluster_of(memory: float, *, on_host: bool) -> Cluster:
    if on_host:
        node = load_cluster("laptop")
        return replace(node, memory_bytes=memory, overhead_bytes=HOST_OVERHEAD, gpus_per_node=RANKS)
    return replace(load_cluster("dgx-h100"), memory_bytes=memory, overhead_bytes=GPU_OVERHEAD)


def planned(loaded: Config, cluster: Cluster) -> tuple[int | None, dict[str, object]]:
    """The stages that a plan recommends on all ranks, and the settings that its command adds: the
    microbatch size too, where the configuration leaves it to a default."""
    try:
        found = planned_model(loaded, cluster).plan("start", cluster, RANKS)
    except ConfigError:
        return None, {}
    layout = found.recommended.layout
    assert layout.grid.size == RANKS
    return layout.grid.g_inter, {**found.taken, "batch.microbatch_size": layout.microbatch_size}


def trained(loaded: Config, memory: float, *, on_host: bool) -> int | None:
    overhead = HOST_OVERHEAD if on_host else GPU_OVERHEAD
    model = model_without_weights(loaded)
    with contextlib.suppress(ConfigError):
        return plan_run(
            loaded,
            model,
            profile(model, DTYPES[loaded.precision]),
            WorldTransport(LocalWorld(RANKS), 0),
            budget=memory_budget(memory, overhead, on_host=on_host),
            on_host=on_host,
        ).coords.grid.g_inter
    return None


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", by_default(QUICK, ALL))
def test_a_plan_and_a_training_take_the_same_stages(
    transformers: Any, name: str, machine: str
) -> None:
    memory, on_host = MACHINES[machine]
    loaded = configure(name, SMALL)

    stages, added = planned(loaded, cluster_of(memory, on_host=on_host))
    options = tuple(f"{key}={value}" for key, value in added.items())

    with_options = configure(name, (*SMALL, *options))
    assert trained(with_options, memory, on_host=on_host) == stages
