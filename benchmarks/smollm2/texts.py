"""English and code that every machine with Python has: documents to train on, others held out."""

from __future__ import annotations

import json
import sysconfig
import zlib
from collections.abc import Iterable, Mapping
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, cast

from axsparse.data.stdlib import EXCLUDED_FOLDERS

Domain = Literal["english", "code"]
DOMAINS: tuple[Domain, ...] = ("english", "code")
HELD_OUT_OF = 8
"""One document in so many is held out."""
CODE_OF = 8
"""One module in so many is used, so that there is as much code as English."""
LEAST_TRAINING, LEAST_HELD_OUT = 2_000, 4_000
"""Characters of the shortest document that is used."""
SHORT = 60
"""Characters of paragraphs that may stand in both parts, such as headings."""


def write_texts(folder: Path) -> None:
    """Write <domain>.train.jsonl and <domain>.held_out.jsonl for each domain.

    The name of a document decides its part. A paragraph of a held-out document is in no document
    of the training part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain, documents in (("english", _english()), ("code", _code())):
        training, held_out = parted(documents)
        _write(folder / f"{domain}.train.jsonl", training, LEAST_TRAINING)
        _write(folder / f"{domain}.held_out.jsonl", held_out, LEAST_HELD_OUT)


def parted(documents: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The documents to train on, without paragraphs that are held out, and those held out."""
    held_out = {name for name in documents if zlib.crc32(name.encode()) % HELD_OUT_OF == 0}
    seen = {p for name in held_out for p in documents[name].split("\n\n") if len(p) > SHORT}
    training = [
        "\n\n".join(p for p in text.split("\n\n") if p not in seen)
        for name, text in sorted(documents.items())
        if name not in held_out
    ]
    return training, [documents[name] for name in sorted(held_out)]


def _write(path: Path, texts: Iterable[str], least: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            if len(text) >= least:
                file.write(json.dumps({"text": text}) + "\n")


def _english() -> Mapping[str, str]:
    """Python's language reference, by topic, and the descriptions of installed packages."""
    found = {f"topic {name}": text for name, text in topics.items()}
    for installed in distributions():
        about = cast(Message, installed.metadata)
        text = about.get_payload() or about["Description"] or ""
        found[f"package {about['Name']}"] = str(text)
    return found


def _code() -> Mapping[str, str]:
    """The modules of the standard library, without tests and without the topics above."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        is_used = zlib.crc32(name.as_posix().encode()) // HELD_OUT_OF % CODE_OF == 0
        if is_used and not {*name.parts} & {*EXCLUDED_FOLDERS, "pydoc_data"}:
            found[name.as_posix()] = path.read_text(encoding="utf-8", errors="ignore")
    return found
