"""Makes the pictures in docs/pictures/ of real runs: `make screenshots`.

Trains a small GPT twice on four ranks, draws reports, and opens them in a headless Chromium.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from support.browser import PAINTED, open_page, picture
from support.mpirun import run_mpirun

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOST_BYTES = 150_000
RUN = ["--config", "quickstart.yaml", "--steps", "180"]
for setting in (
    *("model.num_layers=6", "model.hidden_size=64", "model.num_heads=4", "precision=fp32"),
    *("train.eval_every=30", "train.eval_steps=2", "train.trace=3", "train.peak_flops=1e12"),
    *("schedule.warmup_steps=20", "layout.g_inter=2", "optimizer.learning_rate=3e-3"),
):
    RUN += ["--set", setting]
RUNS = {
    "ninety": ["--set", "pruning.at_step=60"],
    "half": ["--set", "pruning.at_step=60", "--set", "pruning.sparsity=0.5"],
}


@dataclass(frozen=True)
class Shot:
    """The upper part of a page."""

    page: str
    width: int
    height: int
    scheme: Literal["light", "dark"] = "light"


SHOTS = {
    "report": Shot("report", 1200, 1095),
    "comparison": Shot("comparison", 1200, 900, "dark"),
}


def train(run: Path, more: Sequence[str]) -> None:
    """Train on four ranks."""
    words = ["-m", "axsparse", "train", *RUN, *more, "--run-dir", run.name]
    done = run_mpirun(4, words, cwd=run.parent, python=sys.executable, timeout=3600.0)
    assert done.returncode == 0, done


def axsparse(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "axsparse", *map(str, words)], check=True)  # noqa: S603


def make_pages(folder: Path) -> None:
    """Write the pages that are shown."""
    for name, more in RUNS.items():
        train(folder / name, more)
    ninety, half = (folder / name for name in RUNS)
    axsparse("report", ninety, "--out", folder / "report.html")
    axsparse("report", ninety, half, "--out", folder / "comparison.html")


def main(folder: Path) -> None:
    if not (folder / "comparison.html").exists():
        make_pages(folder)
    with open_page() as (page, complaints):
        for name, shot in SHOTS.items():
            page.emulate_media(color_scheme=shot.scheme)
            page.set_viewport_size({"width": shot.width, "height": shot.height})
            page.goto((folder / f"{shot.page}.html").as_uri())
            page.evaluate(PAINTED)
            assert complaints == []
            height = min(shot.height, page.evaluate("document.body.offsetHeight"))
            png = quantized(picture(page, (0, 0, shot.width, height)))
            assert len(png) < MOST_BYTES, f"{name}: {len(png)} bytes"
            (PICTURES / f"{name}.png").write_bytes(png)
            print(f"{name}.png: {len(png) / 1e3:.0f} kB")


def quantized(png: bytes) -> bytes:
    """A smaller PNG, of 128 colours."""
    image, stored = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(stored, "PNG", optimize=True)
    return stored.getvalue()


if __name__ == "__main__":
    if sys.argv[1:]:  # a folder that keeps the pages, and may have them already
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
