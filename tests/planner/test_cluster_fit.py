"""From a machine's figures to its constants, and back through the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.surveys import KEPT, SURVEY

from axsparse.planner.cluster import parse_cluster, to_yaml
from axsparse.planner.cluster_fit import Measurements, fitted, spread
from axsparse.planner.step_cost import all_reduce_seconds, edges, stage_seconds, step_costs
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import TrainingError
from axsparse.runtime.grid import Grid

MODEL = SurveyedModel(
    name="four layers",
    survey=SURVEY,
    kept=KEPT,
    precision="fp32",
    gradient="fp32",
    moments=2,
    index="int32",
    checkpoint_activations=1,
)
SEEN = Measurements(
    ranks=4,
    memory_bytes=4e9,
    overhead_bytes=3e8,
    peak=1e10,
    copy_bandwidth=1e9,
    compute_seconds=1e-4,
    compute_of_other=None,
    compress_seconds=2e-5,
    microbatches=3,
    microbatch_size=2,
    forwards=[1.0, 1.0, 1.1, 0.9],
    messages=[(1e3, 1e-3 + 2e3 / 1e8), (1e5, 1e-3 + 2e5 / 1e8), (1e6, 1e-3 + 2e6 / 1e8)],
    all_reduces=[(1e3, 6e-4 + 1.5e3 / 1e7), (1e6, 6e-4 + 1.5e6 / 1e7)],
)


def load() -> StageLoad:
    loads = MODEL.stages(1, 1)
    assert loads is not None
    return loads[0]


def test_the_cost_model_gives_back_what_was_measured() -> None:
    machine = fitted("mine", load(), "fp32", SEEN, "a test")
    stage = stage_seconds(MODEL, load(), machine, 2)

    compute = 3 * (stage.forward + stage.backward - stage.compress)
    assert compute == pytest.approx(SEEN.compute_seconds)
    assert 3 * stage.compress == pytest.approx(SEEN.compress_seconds)
    assert 0 < machine.efficiency <= 1


@pytest.mark.parametrize("passed", [0.0, 3e-5])
def test_weight_gradients_take_what_was_measured_of_them(passed: float) -> None:
    seen = replace(
        SEEN,
        compute_seconds=SEEN.compute_seconds + passed,
        compute_of_other=(1, SEEN.compute_seconds / 2 + passed),
        weight_seconds=4e-5,
    )
    split = replace(load(), weight_flops=9e3)
    machine = fitted("mine", split, "fp32", seen, "a test")
    stage = stage_seconds(MODEL, split, machine, 2)

    assert 3 * (stage.weight - stage.compress) == pytest.approx(4e-5)
    assert machine.origins["weight_share"].source == "a test, with split backwards"
    assert parse_cluster(to_yaml(machine), "mine.yaml") == machine


def test_weight_gradients_that_seem_shorter_than_a_pass_over_the_weights_have_a_share() -> None:
    seen = replace(SEEN, compute_seconds=1.3e-4, compute_of_other=(1, 8e-5), weight_seconds=1e-7)

    machine = fitted("mine", replace(load(), weight_flops=9e3), "fp32", seen, "a test")

    assert machine.weight_share == 0.1


def test_without_weight_gradients_their_share_is_not_known() -> None:
    for split, seconds in ((load(), 4e-5), (replace(load(), weight_flops=9e3), 0.0)):
        seen = replace(SEEN, weight_seconds=seconds)
        assert fitted("mine", split, "fp32", seen, "a test").weight_share is None


@pytest.mark.parametrize("other", [1, 4])
def test_two_sizes_tell_what_does_not_depend_on_size(other: int) -> None:
    slower = SEEN.compute_seconds / 2 * other + 3e-5
    seen = replace(SEEN, compute_seconds=1e-4 + 3e-5, compute_of_other=(other, slower))
    machine = fitted("mine", load(), "fp32", seen, "a test")

    for size, seconds in ((2, seen.compute_seconds), (other, slower)):
        stage = stage_seconds(MODEL, load(), machine, size)
        assert 3 * (stage.forward + stage.backward - stage.compress) == pytest.approx(seconds)
    assert machine.origins["weight_rate"].kind == "fitted"
    assert parse_cluster(to_yaml(machine), "mine.yaml") == machine


def test_a_smaller_microbatch_that_is_cheaper_a_sample_has_no_such_part() -> None:
    seen = replace(SEEN, compute_of_other=(1, SEEN.compute_seconds / 3))

    assert fitted("mine", load(), "fp32", seen, "a test").weight_rate is None


def test_small_blocks_come_on_top_of_what_is_resident_before_the_first_step() -> None:
    machine = fitted("mine", load(), "fp32", SEEN, "a test")

    assert machine.overhead_bytes == SEEN.overhead_bytes + 10e6
    assert machine.origins["overhead_bytes"].source.endswith("and 10 MB later")
    assert machine.is_of_hosts


def test_messages_and_all_reduces_come_back_as_well() -> None:
    machine = fitted("mine", load(), "fp32", SEEN, "a test")
    loads = MODEL.stages(2, 1)
    assert loads is not None
    costs = replace(step_costs(MODEL, loads, machine, Grid(2, 1), 1), messages=[1e5])
    [edge] = edges(costs, machine, Grid(2, 1), 0)

    assert edge.latency + 2 * edge.handling == pytest.approx(1e-3 + 2e5 / 1e8)
    assert all_reduce_seconds(1e6, machine, Grid(1, 4)) == pytest.approx(6e-4 + 0.15)


def test_every_constant_says_where_it_comes_from_and_the_file_reads_back() -> None:
    machine = fitted("mine", load(), "fp32", SEEN, "a test")

    assert parse_cluster(to_yaml(machine), "mine.yaml") == machine
    kinds = {name: origin.kind for name, origin in machine.origins.items()}
    assert (kinds["efficiency"], kinds["ring_latency"]) == ("fitted", "measured")
    assert kinds["nic_bandwidth"] == kinds["inter_node_bandwidth"] == "assumed"


def test_one_rank_knows_nothing_of_messages() -> None:
    alone = replace(SEEN, ranks=1, messages=[], all_reduces=[], compress_seconds=0.0)
    machine = fitted("mine", load(), "fp32", alone, "a test")

    for name in ("intra_node_bandwidth", "ring_bandwidth", "compression_rate"):
        assert machine.origins[name].kind == "assumed"
        assert getattr(machine, name) > 0


def test_a_product_that_is_faster_than_the_peak_is_the_peak() -> None:
    machine = fitted("mine", load(), "fp32", replace(SEEN, peak=1.0), "a test")

    assert machine.efficiency == 1
    assert machine.peak("fp32") > 1


def test_compute_that_is_faster_than_a_copy_is_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"calibrate: forwards and backwards took 1e-09 s, less"
    ):
        fitted("mine", load(), "fp32", replace(SEEN, compute_seconds=1e-9), "a test")


def test_messages_of_noise_fall_back_to_a_rate() -> None:
    noise = replace(SEEN, messages=[(1e3, 2e-3), (1e6, 1e-3)])
    machine = fitted("mine", load(), "fp32", noise, "a test")

    assert machine.intra_node_latency == 0
    assert machine.intra_node_bandwidth > 0


def test_spread_is_that_of_logarithms_without_the_slowest_tenth() -> None:
    assert spread([1.0] * 18 + [50.0, 60.0]) == 0
    assert spread([1.0]) == 0
    assert spread([1.0, 1.1, 1.21, 99.0]) > 0.05
