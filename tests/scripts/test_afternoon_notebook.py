"""The notebook of examples/afternoon.py: it has the script's code, and its cells run in order."""

from __future__ import annotations

import subprocess
import sys

from support.mpirun import LONGEST_SECONDS
from support.page_blocks import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "afternoon.ipynb"


def test_the_notebook_is_made_of_the_script() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import afternoon_notebook as made; print(made.notebook(), end='')"],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=True,
    )

    hint = "python scripts/afternoon_notebook.py makes it anew"
    assert NOTEBOOK.read_text(encoding="utf-8") == done.stdout, hint
