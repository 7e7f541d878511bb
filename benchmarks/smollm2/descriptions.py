"""python -m smollm2.descriptions STUDY OUT.jsonl: descriptions of packages on PyPI, as further
English to train on.

They are those of well-known packages and of what they require, wave after wave, but for those that
are installed here, without paragraphs of the study's texts, held out or not, and of others before.
"""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from time import sleep
from urllib import error, request

from smollm2.cases import LEAST_TRAINING, SHORT

MOST_ASKED = 3_000  # the wave in which more packages have been asked for is the last one
ENGLISH = 0.98  # the share of a text's characters that are ASCII, at least


def described(name: str, retries: int = 5) -> tuple[str, list[str]]:
    """The description of a package, and the names of what it requires; nothing of none."""
    try:
        with request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as answer:
            found = json.load(answer)["info"]
    except error.URLError as reason:
        if isinstance(reason, error.HTTPError):  # of a package that is not there
            return "", []
        if not retries:
            raise
        sleep(2)
        return described(name, retries - 1)
    required = (re.match(r"[\w.-]+", each) for each in found["requires_dist"] or ())
    return found["description"] or "", [_plain(each.group()) for each in required if each]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def descriptions() -> Iterator[str]:
    """The descriptions of packages that are not installed."""
    wave = {*Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split()}
    asked, here = {*wave}, {_plain(each.metadata["Name"]) for each in distributions()}
    while wave:
        with ThreadPoolExecutor(16) as pool:
            found = dict(zip(sorted(wave), pool.map(described, sorted(wave)), strict=True))
        yield from (text for name, (text, _) in found.items() if name not in here)
        required = {each for _, names in found.values() for each in names} - asked
        wave = required if len(asked) < MOST_ASKED else set()
        asked |= wave


def main() -> None:
    study, out = map(Path, sys.argv[1:])
    files = (study / "texts").glob("english.*.jsonl")
    lines = (line for file in files for line in file.open(encoding="utf-8"))
    seen = {p for each in lines for p in json.loads(each)["text"].split("\n\n") if len(p) > SHORT}
    with out.open("w", encoding="utf-8") as file:
        for text in descriptions():
            parts = [p for p in text.replace("\r\n", "\n").split("\n\n") if p not in seen]
            seen |= {p for p in parts if len(p) > SHORT}
            made = "\n\n".join(parts)
            if len(made) >= LEAST_TRAINING and sum(map(str.isascii, text)) >= ENGLISH * len(text):
                file.write(json.dumps({"text": made}) + "\n")


if __name__ == "__main__":
    main()
