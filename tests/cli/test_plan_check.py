"""The command: the scoreboard, a file of one's own, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axsparse.cli.plan import main
from axsparse.planner.published import run_file
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_MISSING, EXIT_OUTPUT

TABLE_9 = "zero-bubble-table9"
RUNS = """\
cluster: selene-a100
rows:
  - name: small
    model: {num_layers: 4, hidden_size: 1024, num_heads: 8, vocab_size: 1024, sequence_length: 512}
    batch: {global: 16, micro: 4}
    published: {seconds_per_step: 0.05}
"""


def told(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, screen and errors."""
    with pytest.raises(SystemExit) as end:
        main(["check", *map(str, args)])
    screen = capsys.readouterr()
    return int(end.value.code or 0), screen.out, screen.err


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs.yaml"
    path.write_text(RUNS)
    return path


def test_without_a_file_it_prints_the_bundled_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = [path for path in run_file.bundled_tables() if path.stem in ("dlperf-v100", TABLE_9)]
    monkeypatch.setattr(run_file, "bundled_tables", lambda: fast)

    code, screen, _ = told(capsys)
    _, text, _ = told(capsys, "--json")

    assert code == 0
    scores = screen.splitlines()[-2:]
    assert [line.split()[:2] for line in scores] == [
        ["dlperf-v100", "v100-edr"],
        [TABLE_9, "a100-roce"],
    ]
    found = json.loads(text)
    assert len(found["rows"]) == 16 + 9
    assert found["rows"][0]["name"] == "DP_1x1x1_2_1536x16"


def test_a_file_is_checked_on_its_cluster_or_another(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    _, own, _ = told(capsys, runs)
    _, other, _ = told(capsys, runs, "--cluster", "v100-edr")

    assert own.startswith("runs on selene-a100\n")
    assert other.startswith("runs on v100-edr\n")
    assert "mean " in own and "worst" in own


def test_a_cluster_file_beside_the_runs_is_found(
    capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    from axsparse.planner.cluster import load_cluster, to_yaml

    runs.with_name("mine.yaml").write_text(to_yaml(load_cluster("dgx-h100")))
    runs.write_text(RUNS.replace("selene-a100", "mine.yaml"))

    _, screen, _ = told(capsys, runs)

    assert screen.startswith("runs on mine\n")


def test_a_plot_is_written(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    code, _, _ = told(capsys, runs, "--plot", tmp_path / "plot.svg")

    assert code == 0
    assert (tmp_path / "plot.svg").read_text().startswith("<svg ")


def test_mistakes_are_one_line_each(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
) -> None:
    missing = told(capsys, tmp_path / "none.yaml")
    cluster = told(capsys, runs, "--cluster", "nowhere")
    plot = told(capsys, runs, "--plot", tmp_path / "no" / "plot.svg")
    runs.write_text(RUNS.replace("micro", "mikro"))
    unknown = told(capsys, runs)

    codes = [each[0] for each in (missing, cluster, plot, unknown)]
    assert codes == [EXIT_MISSING, EXIT_MISSING, EXIT_OUTPUT, EXIT_CONFIG]
    for _, _, line in (missing, cluster, plot, unknown):
        assert line.startswith("axsparse: error: ")
        assert line.count("\n") == 1
    assert "unknown key batch.mikro; did you mean micro?" in unknown[2]
    reason = "No such file or directory"
    assert plot[2] == (
        f"axsparse: error: --plot {tmp_path}/no/plot.svg: cannot be written ({reason}); choose "
        "another place\n"
    )
