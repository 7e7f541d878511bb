"""The planner and the simulator held against published runs and tables, and their parts by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published.__main__ import checked_file, main, scoreboard
from published.interleaved import simulate_interleaved
from published.run_check import FITTABLE, Check, check_runs, choices
from published.run_file import TABLES, RunFile, RunRow, load_runs
from published.run_step import predict_step, run_costs
from support.action_text import dry_run, to_text
from three_axes import seconds_by_plan
from zero_bubble import PUBLISHED, published, zb_h1

from axsparse.config.load import load_config
from axsparse.pipeline.simulator import MessageCost
from axsparse.planner.cluster import Cluster, load_cluster, to_yaml
from axsparse.planner.plan_model import subject
from axsparse.planner.step_cost import stage_seconds
from axsparse.runtime.errors import ConfigError

SMALL: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 1536,
    "num_heads": 16,
    "vocab_size": 51200,
    "sequence_length": 2048,
}
S, H, LAYERS, V = 2048, 1536, 16, 51200
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scoreboard.md"


def run(
    *,
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    samples: int = 16,
    micro: int = 2,
    published: dict[str, Any] | None = None,
    **training: Any,
) -> RunRow:
    """A small GPT on one device, but for what is said."""
    return RunRow.model_validate(
        {
            "name": "run",
            "model": {**SMALL, **(model or {})},
            "layout": layout or {},
            "batch": {"global": samples, "micro": micro},
            "training": training,
            "published": published or {},
        }
    )


def selene(**constants: Any) -> Cluster:
    """Selene but for some constants."""
    return replace(load_cluster("selene-a100"), **constants)


# -- the tables -----------------------------------------------------------------------------


@cache
def table(name: str) -> Check:
    return checked_file(TABLES / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "fitted", "mean", "worst"),
    [
        ("zero-bubble-table4", 0, 0.025, 0.05),
        ("zero-bubble-table9", 0, 0.025, 0.05),
        ("zero-bubble-interleaved", 0, 0.05, 0.08),
        ("megatron-sc21", 3, 0.05, 0.10),
        ("megatron-figure14", 0, 0.06, 0.12),
        pytest.param("megatron-recomputation", 0, 0.05, 0.10, marks=pytest.mark.exhaustive),
        ("samo-summit", 0, 0.0097, 0.02),
        ("dlperf-v100-oneflow", 2, 0.085, 0.20),
        ("dlperf-v100", 2, 0.08, 0.44),
    ],
)
def test_a_bundled_table_is_predicted_within_its_target(
    name: str, fitted: int, mean: float, worst: float
) -> None:
    found = table(name)

    assert "20" in found.source
    assert sum(each.row.fit for each in found.rows) == fitted
    assert found.mean is not None and found.worst is not None
    assert found.mean <= mean
    assert found.worst <= worst
    if name.startswith("zero-bubble"):
        assert found.memory_worst is not None and found.memory_worst < 0.1


def test_the_best_published_layout_is_among_the_first_two() -> None:
    found = [
        choice
        for name in ("dlperf-v100", "megatron-figure14")
        for choice in choices(table(name).rows)
    ]

    assert len(found) == 4
    assert all(choice.place_of_best <= 2 for choice in found)


@pytest.mark.exhaustive
def test_the_page_has_the_scoreboard_as_it_is_printed() -> None:
    found = scoreboard([checked_file(path) for path in sorted(TABLES.glob("*.yaml"))])

    assert "\n".join(found) in PAGE.read_text(encoding="utf-8")


# -- a file of runs -------------------------------------------------------------------------

RUNS = """\
cluster: mine.yaml
rows:
  - name: small
    model: {num_layers: 4, hidden_size: 1024, num_heads: 8, vocab_size: 1024, sequence_length: 512}
    batch: {global: 16, micro: 4}
    published: {seconds_per_step: 0.05}
"""


def test_the_command_checks_a_file_on_the_cluster_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml(load_cluster("dgx-h100")))
    runs = tmp_path / "runs.yaml"
    runs.write_text(RUNS)
    monkeypatch.setattr(sys, "argv", ["published", str(runs), "--json"])

    main()

    printed = capsys.readouterr()
    assert printed.err == ""
    [row] = json.loads(printed.out)["rows"]
    assert (row["name"], row["published"]) == ("small", 0.05)
    assert checked_file(runs).cluster.name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("micro: 4", "mikro: 4", "row 'small': batch.mikro: Extra inputs are not permitted"),
        ("name: small", "fit: false", "row 1: name: Field required"),
        ("micro: 4", "micro: 3", "row 'small': 1 replicas with microbatches of 3 do not divide"),
        ("num_heads: 8", "num_heads: 7", "row 'small': num_heads 7 does not divide hidden_size"),
        (
            "published",
            "layout: {split: [3]}\n    published",
            "layout.split has 1 numbers whose sum",
        ),
        ("published", "layout: {pipeline: 9}\n    published", "4 blocks cannot fill 9 pieces"),
        ("published: {", "fit: true\n    published: {memory_gb: 3} #", "published has no time to"),
        (RUNS, "rows: []", "rows is empty; give at least one run"),
        (RUNS, "- 1", "no mapping; write `cluster:` and `rows:`"),
        (RUNS, "rows: [", "not YAML"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    path = tmp_path / "runs.yaml"
    path.write_text(RUNS.replace(old, new))

    with pytest.raises(ConfigError) as error:
        load_runs(path)

    assert line in str(error.value)
    assert "\n" not in str(error.value)


# -- the parts, by hand ---------------------------------------------------------------------


def test_rows_find_the_constants_again_and_leave_alone_what_they_say_nothing_about() -> None:
    rows = [
        run(recompute="full"),
        run(model={"hidden_size": 8192, "num_heads": 64}, recompute="full"),
        run(layout={"data": 64, "tensor": 4}, samples=64, micro=1, gradients="fp32"),
    ]
    truth = selene(efficiency=0.7, traffic=1.6, nic_efficiency=0.6)

    def fitted(rows: list[RunRow]) -> Cluster:
        told = [
            row.model_copy(
                update={
                    "fit": True,
                    "published": run(
                        published={"seconds_per_step": predict_step(row, truth).seconds}
                    ).published,
                }
            )
            for row in rows
        ]
        return check_runs(RunFile("x", "selene-a100", "", told), selene()).cluster

    for name in FITTABLE:
        assert getattr(fitted(rows), name) == pytest.approx(getattr(truth, name), rel=0.05)
    assert fitted(rows[:1]).nic_efficiency == selene().nic_efficiency


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (4, 3, 12), (8, 2, 32)])
def test_the_interleaved_bubble_is_that_of_the_paper(
    stages: int, chunks: int, microbatches: int
) -> None:
    found = simulate_interleaved(
        [[1 / chunks] * chunks] * stages,
        [[2 / chunks] * chunks] * stages,
        [MessageCost()] * stages,
        microbatches,
    )

    # (p - 1) / v of a microbatch (Narayanan et al., 2021, section 2.2.2).
    expected = 3 * microbatches + 3 * (stages - 1) / chunks
    assert found.seconds == pytest.approx(expected)


def test_a_survey_and_the_formulas_of_published_runs_predict_alike() -> None:
    loaded = load_config("gpt3_2.7b", ["model.num_layers=4"])
    asked = subject(loaded, selene()).workload("dense")
    [load] = asked.stages(1, 1) or []
    sizes = loaded.config.model
    row = run(
        model={field: getattr(sizes, field) for field in SMALL},
        samples=1,
        micro=1,
        recompute="full",
        attention="fused",
        precision="bf16",
    )

    surveyed, counted = stage_seconds(asked, load, selene(), 1), run_costs(row, selene())

    assert surveyed.forward == pytest.approx(counted.forward[0][0], rel=0.1)
    assert surveyed.backward == pytest.approx(counted.backward[0][0], rel=0.1)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.exhaustive if int(line.split()[2]) >= 96 else ())
        for line in PUBLISHED.splitlines()
    ],
)
def test_a_row_of_the_table_comes_out(line: str) -> None:
    [row] = published(line)
    known: dict[str, Any] = row["published"]
    found: dict[str, Any] = row["simulated"]

    assert found["1F1B"] == pytest.approx(known["1F1B"], abs=2e-4)
    assert found["ZB-H1"] == pytest.approx(known["ZB-1p"], abs=2e-4)
    assert found["1p"] < known["1F1B"]
    # Scores of attention go with the backward, so a deferred microbatch takes less than half.


def test_zb_h1_of_three_stages_and_four_microbatches() -> None:
    assert [to_text(zb_h1(stage, 3, 4)) for stage in range(3)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 4))
def test_zb_h1_never_waits_for_ever_and_holds_no_more_than_1f1b(
    stages: int, microbatches: int, slack: int
) -> None:
    most = dry_run([zb_h1(stage, stages, microbatches, slack) for stage in range(stages)])

    assert max(most) <= min(microbatches, stages + slack)


@pytest.mark.parametrize("name", ["3.6B", "7.5B", "39.1B"])
def test_plans_count_runs_with_tensor_parallelism_as_the_formulas_do(name: str) -> None:
    [row] = [each for each in load_runs(TABLES / "megatron-sc21.yaml").rows if each.name == name]
    machine = load_cluster("selene-a100")

    by_formula = predict_step(row, machine).seconds

    assert seconds_by_plan(row, machine) == pytest.approx(by_formula, rel=0.06)
