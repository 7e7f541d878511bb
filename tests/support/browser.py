"""A headless Chromium, driven over its debugging pipe: opens pages, asks them, takes pictures."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
"""Under which a browser may be installed."""
WISH = "AXSPARSE_BROWSER"
"""The environment variable that names the browser to take; it must then be there."""
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"),
    # Containers have no GPU, a small /dev/shm and only root, whom the sandbox refuses.
    *("--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    # What is asked for elsewhere fails, and is told as a failed request.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
ANSWER_SECONDS = 120.0
"""Far beyond what any answer takes, on a machine that has much else to do."""
PAINTED = """(async () => {
  const frame = () => new Promise(done => requestAnimationFrame(done));
  await document.fonts.ready;
  await frame();
  for (const moving of document.getAnimations())
    if (moving.effect.getComputedTiming().endTime < Infinity) moving.finish();
  await frame();
  return true;
})()"""
"""Brings what moves to its end, and ends once all has been painted."""
Event = dict[str, Any]


def find_browser() -> str | None:
    """The path of a Chromium; None if there is none and nobody insists on one."""
    wish = os.environ.get(WISH)
    if wish is None:
        return next((path for name in NAMES if (path := shutil.which(name))), None)
    found = shutil.which(wish)
    assert found, f"{WISH}: {wish!r} is no browser that can be started"
    return found


class Browser:
    """A process of Chromium, which knows only sites of this host."""

    def __init__(self, path: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        log = str(Path(self._home.name, "log"))
        ours, theirs = _pipe(), _pipe()
        # It reads commands from descriptor 3, and writes answers to descriptor 4.
        self._pid = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, ours[0], 3),
                (os.POSIX_SPAWN_DUP2, theirs[1], 4),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._unread = b""
        self._last_id = 0
        self._tabs: dict[str, Tab] = {}

    def open(self) -> Tab:
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        return tab

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Ask for a method of the DevTools protocol, and return its answer; events go to tabs."""
        self._last_id += 1
        wanted = self._last_id
        message: Event = {"id": wanted, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while (answer := self.next_message()).get("id") != wanted:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def next_message(self) -> Event:
        """The next answer or event; AssertionError once the browser is silent or gone."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._from], [], [], left)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, f"the browser has ended: {self._log()}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: Event = json.loads(line)
        tab = self._tabs.get(message.get("sessionId", ""))
        if tab is not None and "method" in message:
            tab.receive(message["method"], message["params"])
        return message

    def close(self) -> None:
        """End it, and remove what it has written."""
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._home.cleanup()

    def _log(self) -> str:
        return Path(self._home.name, "log").read_text(errors="replace")[-2000:]


class Tab:
    """One page, and all that its console and its requests complain of."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._loading: dict[str, str] = {}
        self._is_loaded = False
        self.complaints: list[str] = []
        """Errors and warnings since the last `go`."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        """Open a page, and wait until it is painted and asks for nothing more."""
        self.complaints.clear()
        self._loading.clear()
        self._is_loaded = False
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self._wait(lambda: self._is_loaded and not self._loading)
        self.ask(PAINTED)
        self._wait(lambda: not self._loading)

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """Change what the system's user prefers."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int = 900, scale: float = 1.0) -> None:
        """Change the window; `scale` is the number of pixels of a picture for one of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or of its promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, box: Sequence[float]) -> bytes:
        """A PNG of a part of the page: left, top, width and height, from the page's corner."""
        x, y, width, height = box
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        found = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def receive(self, event: str, said: Event) -> None:
        """Take an event of the protocol."""
        if event == "Page.loadEventFired":
            self._is_loaded = True
        elif event == "Network.requestWillBeSent":
            # Of the script of a worker only the worker hears the end.
            if (said.get("type"), said["initiator"]["type"]) != ("Script", "other"):
                self._loading[said["requestId"]] = said["request"]["url"]
        elif event == "Network.loadingFinished":
            self._loading.pop(said["requestId"], None)
        else:
            self.complaints += self._complaint(event, said)

    def _complaint(self, event: str, said: Event) -> Iterator[str]:
        if event == "Network.loadingFailed":
            url = self._loading.pop(said["requestId"], "?")
            yield f"{url} failed: {said['errorText']}"
        elif event == "Network.responseReceived" and said["response"]["status"] >= 400:
            yield f"{said['response']['url']}: {said['response']['status']}"
        elif event == "Runtime.exceptionThrown":
            yield f"exception: {said['exceptionDetails']}"
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            words = " ".join(str(one.get("value", one)) for one in said["args"])
            yield f"console.{said['type']}: {words}"
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            yield f"{said['entry']['level']}: {said['entry']['text']}"

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._browser.next_message()


def _pipe() -> tuple[int, int]:
    """Ends for reading and writing, both beyond the descriptors that the browser is given."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
