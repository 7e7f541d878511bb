"""The page of a run in a browser, if one is installed: pip install PyQt6-WebEngine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS
from support.pages import step_line

from axsparse.cli.report import main

pytest.importorskip("PyQt6", reason="PyQt6-WebEngine, a browser for tests, is not installed")
BROWSER = Path(__file__).parents[1] / "support" / "browser.py"


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_its_window_and_is_readable(tmp_path: Path, width: int, scheme: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(step_line(n) for n in range(1, 40)))
    (run / "config.yaml").write_text("# torch 2.0\nseed: 1\n")
    with pytest.raises(SystemExit):
        main([str(run)])

    done = subprocess.run(
        [sys.executable, BROWSER, run / "report.html", str(width), scheme, tmp_path / "shot.png"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_SECONDS,
    )

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["console"] == []
    assert found["overflow"] <= 0
    assert found["dark"] == (scheme == "dark")
    assert found["background"] == ("rgb(22, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert found["letters"] >= 9
    assert len(found["pictures"]) >= 5
    assert all(300 <= wide <= width and high >= 150 for wide, high in found["pictures"])
    assert (tmp_path / "shot.png").stat().st_size > 10_000
