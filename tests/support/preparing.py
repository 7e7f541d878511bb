"""Text that is prepared, and what comes of it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from axsparse.data.documents import Reading
from axsparse.data.preparation import Request, prepare
from axsparse.data.token_file import Sidecar
from axsparse.runtime.console import Console

LINE = "The cat sat on the mat, and the dog did not.\n"


def run(request: Request) -> tuple[Sidecar, str]:
    """The sidecar, and what the screen says."""
    screen = io.StringIO()
    return prepare(request, 1, Console(screen, bar=False)), screen.getvalue()


def outputs(folder: Path) -> dict[str, bytes]:
    """Everything that lies in a finished folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def make_library(folder: Path) -> Path:
    """Text files, a large one among them, JSONL, and files that cannot be used."""
    (folder / "more").mkdir(parents=True)
    (folder / "large.txt").write_text("".join(f"= {n} =\n{LINE * (n % 5)}" for n in range(60)))
    for number in range(20):
        (folder / "more" / f"{number}.txt").write_text(LINE * number)
    records = [json.dumps({"text": f"{number} {LINE}"}) for number in range(80)]
    (folder / "records.jsonl").write_text("\n".join(records))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "lost.txt").symlink_to("/nowhere")
    return folder


def requested(library: Path, out: Path, **values: Any) -> Request:
    return Request(
        **{
            "inputs": (library,),
            "out": out,
            "validation_fraction": 0.1,
            "reading": Reading("regex:^= .* =$"),
            **values,
        }
    )
