"""Reports and the documentation site in a headless Chromium: `make test-browser`.

Of every page: nothing is complained of in the console, no request fails, nothing is wider than a
window of 1,200 or 400 pixels, pictures are painted and their texts are readable, in light and dark.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image
from support.browser import PAINTED, WISH, open_page, picture
from support.mpirun import LONGEST_SECONDS, run_alone
from support.page_blocks import ROOT
from support.pages import step_line

pytestmark = pytest.mark.exhaustive

WIDTHS, HEIGHT = (1200, 400), 900
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
LEAST_LETTERS = 9.0
"""Pixels of a picture's letters, as they are shown."""
LEAST_CONTRAST = 3.0
"""Between a picture's letters and what is behind them (WCAG: graphics, and large letters)."""
MOST_OF_ONE_COLOUR = 0.995
"""The part of a picture that one colour may have; the rest is what was painted."""
ON_SITE = "article .picture svg, article img"
"""The pictures of the site; its signs are left out."""
ASK = Path(__file__).with_name("page_faults.js").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Browsed:
    """A page of a browser, and what it has complained of since it was opened last."""

    page: Any
    complaints: list[str]

    def go(self, address: str) -> None:
        self.complaints.clear()
        self.page.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
        self.page.goto(address)
        self.page.evaluate(PAINTED)

    def faults(self, address: str, pictures: str) -> list[str]:
        """The faults of a page in any window; `pictures` selects its pictures."""
        self.page.emulate_media(color_scheme="light")
        self.go(address)
        found = []
        for scheme in SCHEMES:
            self.page.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                self.page.set_viewport_size({"width": width, "height": HEIGHT})
                found += [f"{scheme}, {width} px: {one}" for one in self._faults(scheme, pictures)]
        return self.complaints + found

    def _faults(self, scheme: str, pictures: str) -> Iterator[str]:
        self.page.evaluate(PAINTED)
        found = self.page.evaluate(ASK.replace("PICTURES", pictures))
        if found["overflow"] > 0:
            yield f"{found['overflow']} pixels wider than the window"
        if not (found["paper"] < 0.1 if scheme == "dark" else found["paper"] > 0.8):
            yield f"the paper has {found['paper']:.2f} of the light of white"
        if found["cut"]:
            yield f"texts go beyond their pictures: {found['cut'][:3]}"
        if found["keys"]:
            yield f"{found['keys']} keys of legends have no colour"
        for name, least in (("letters", LEAST_LETTERS), ("contrast", LEAST_CONTRAST)):
            if found[name] is not None and found[name][0] < least:
                yield f"{name}: {found[name][0]:.1f} of {found[name][1]!r}"
        for box in found["pictures"]:
            if box[2] < 100 or box[3] < 15:
                yield f"a picture of {box[2]:.0f} × {box[3]:.0f} pixels"
            elif (part := _of_one_colour(picture(self.page, box))) > MOST_OF_ONE_COLOUR:
                yield f"{100 * part:.1f} % of the picture at {box} have one colour"


@pytest.fixture(scope="module")
def browsed() -> Iterator[Browsed]:
    if WISH not in os.environ:
        pytest.skip(f"`make test-browser` opens these pages in the browser that {WISH} names")
    with open_page() as (page, complaints):
        yield Browsed(page, complaints)


def _of_one_colour(png: bytes) -> float:
    """The part of a picture that its most frequent colour has."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counts = image.getcolors(image.width * image.height)
    assert counts is not None
    return max(count for count, _ in counts) / (image.width * image.height)


def axsparse(*words: object) -> None:
    done = run_alone(["-m", "axsparse", *map(str, words)])
    assert done.returncode == 0, str(done)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of axsparse's commands: of a run that was pruned and traced, and of others."""
    folder = tmp_path_factory.mktemp("pages")
    run, other = folder / "run", folder / ("a-long-name-of-a-run_" * 5)
    small = ["--steps", "12", "--set", "train.trace=2", "--set", "pruning.at_step=4"]
    small += ["--set", "train.eval_every=4", "--set", "train.peak_flops=1e12"]
    small += ["--set", "train.eval_steps=1", "--set", "model.num_layers=2"]
    small += ["--set", "layout.g_inter=1"]
    axsparse("train", "--config", "quickstart.yaml", *small, "--run-dir", run)
    other.mkdir()
    lines = [step_line(n, skipped=n == 20, loss=None if n == 20 else 3 / n) for n in range(1, 400)]
    (other / "metrics.jsonl").write_text("".join(lines))
    (other / "config.yaml").write_text(f"# torch 2.0\nseed: {'1' * 200}\n")
    made = {name: folder / f"{name}.html" for name in ("one", "several")}
    axsparse("report", run, "--out", made["one"])
    axsparse("report", run, other, "--out", made["several"])
    return made


@pytest.mark.parametrize("name", ["one", "several"])
def test_pages_of_commands_fit_are_painted_and_readable(
    name: str, browsed: Browsed, pages: dict[str, Path]
) -> None:
    assert browsed.faults(pages[name].as_uri(), "svg") == []

    assert browsed.page.locator("svg").count() >= 7


@dataclass(frozen=True)
class Site:
    """The built site."""

    address: str
    folder: Path

    @contextmanager
    def without_words(self) -> Iterator[None]:
        """Leaves its search nothing to index, which takes half of the time of each page."""
        index = self.folder / "search" / "search_index.json"
        whole = index.read_text(encoding="utf-8")
        index.write_text(json.dumps(json.loads(whole) | {"docs": []}), encoding="utf-8")
        yield
        index.write_text(whole, encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The documentation site, served on this host."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Site(f"http://127.0.0.1:{server.server_port}", folder)
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_search_of_the_site_finds_a_setting(browsed: Browsed, site: Site) -> None:
    browsed.go(f"{site.address}/index.html")

    browsed.page.locator("[data-md-component=search-query]").fill("keep_best")
    browsed.page.locator(".md-search-result__item").first.wait_for()

    assert "keep_best" in browsed.page.locator(".md-search-result__list").inner_text()
    assert browsed.complaints == []


def test_every_page_of_the_site_is_whole(browsed: Browsed, site: Site) -> None:
    pages = sorted(site.folder.rglob("*.html"))
    found = []
    with site.without_words():
        for page in pages:
            name = page.relative_to(site.folder).as_posix()
            found += [
                f"{name}: {fault}" for fault in browsed.faults(f"{site.address}/{name}", ON_SITE)
            ]

    assert found == [] and len(pages) > 80
