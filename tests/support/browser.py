"""A page of a headless Chromium of this machine, and all that its console and requests complain
of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WISH = "AXSPARSE_BROWSER"
"""The environment variable that names the browser."""
FLAGS = (
    # Containers have no GPU, a small /dev/shm and only root, whom the sandbox refuses.
    *("--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox", "--hide-scrollbars"),
    # What is asked for elsewhere fails, and is told as a failed request.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
ANSWER_SECONDS = 120.0
"""Far beyond what any answer takes, on a machine that has much else to do."""
PAINTED = """async () => {
  const frame = () => new Promise(done => requestAnimationFrame(done));
  await document.fonts.ready;
  await frame();
  for (const moving of document.getAnimations())
    if (moving.effect.getComputedTiming().endTime < Infinity) moving.finish();
  await frame();
}"""
"""Brings what moves to its end, and ends once all has been painted."""


@contextmanager
def open_page() -> Iterator[tuple[Any, list[str]]]:
    """A page of Playwright's, and the list that its complaints come to."""
    from playwright.sync_api import sync_playwright

    path = shutil.which(os.environ[WISH])
    assert path, f"{WISH}: {os.environ[WISH]!r} is no browser that can be started"
    complaints: list[str] = []

    def hear_console(message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            complaints.append(f"console.{message.type}: {message.text}")

    def hear_response(response: Any) -> None:
        if response.status >= 400:
            complaints.append(f"{response.url}: {response.status}")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(1000 * ANSWER_SECONDS)
        page.on("console", hear_console)
        page.on("response", hear_response)
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        page.on("requestfailed", lambda one: complaints.append(f"{one.url} failed: {one.failure}"))
        yield page, complaints
        browser.close()


def picture(page: Any, box: tuple[float, float, float, float]) -> bytes:
    """A PNG of a part of the page: left, top, width and height, from the page's corner."""
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True))
    found: bytes = page.screenshot(clip=clip, full_page=True)
    return found
