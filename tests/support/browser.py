"""Opens a page in Chromium, as PyQt6-WebEngine brings it, and prints what it found as JSON.

python browser.py PAGE WIDTH light|dark PICTURE
"""

from __future__ import annotations

import json
import os
import sys

SCHEMES = {"dark": 0, "light": 1}
ASK = """
JSON.stringify({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  height: document.documentElement.scrollHeight,
  dark: matchMedia('(prefers-color-scheme: dark)').matches,
  background: getComputedStyle(document.body).backgroundColor,
  letters: Math.min(...[...document.querySelectorAll('figure svg text')].map(
    text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)),
  pictures: [...document.querySelectorAll('svg')].map(
    svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height]),
})
"""


def main(page: str, width: str, scheme: str, picture: str) -> None:
    """Print the answer to `ASK` with the messages of the console, and save a picture."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = flags
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    said: list[str] = []

    class Page(QWebEnginePage):  # type: ignore[misc]
        def javaScriptConsoleMessage(self, *message: object) -> None:
            said.append(str(message[1]))

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.setPage(Page(view))
    view.resize(int(width), 900)
    view.show()

    def answered(text: str) -> None:
        view.grab().save(picture)
        print(json.dumps(json.loads(text) | {"console": said}))
        application.quit()

    def ask() -> None:
        view.page().runJavaScript(ASK, answered)

    # Chromium paints a moment after it has loaded.
    view.loadFinished.connect(lambda _: QTimer.singleShot(1000, ask))
    view.load(QUrl.fromLocalFile(page))
    QTimer.singleShot(60_000, application.quit)
    application.exec()


if __name__ == "__main__":
    main(*sys.argv[1:])
