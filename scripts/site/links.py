"""Leads the links of pages that stand in the repository to their places on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT_PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "reference/changelog.md": "CHANGELOG.md",
}
"""Pages of the site that are files of the repository outside of docs/."""
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ELSEWHERE = ("http://", "https://", "#", "mailto:")


def rewritten(text: str, page: str, root: Path) -> str:
    """The text of a page, with each link to a file of the repository as the site needs it.

    Links to folders become plain text. FileNotFoundError for a link to nothing.
    """

    def replace(found: re.Match[str]) -> str:
        words, link = found.groups()
        if link.startswith(ELSEWHERE):
            return found[0]
        path, hash_mark, anchor = link.partition("#")
        target = _in_repository(page, path)
        coords = _on_site(target, root)
        if coords is None:
            return words
        here = posixpath.dirname(page) or "."
        return f"[{words}]({posixpath.relpath(coords, here)}{hash_mark}{anchor})"

    return LINK.sub(replace, text)


def outside(root: Path, made: Mapping[str, str]) -> Iterator[str]:
    """The files outside of docs/ that pages link to, each once."""
    pages = {
        path.relative_to(root / "docs").as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "docs").rglob("*.md"))
    }
    found = set()
    for page, text in {**pages, **made}.items():
        for _, link in LINK.findall(text):
            if link.startswith(ELSEWHERE):
                continue
            target = _in_repository(page, link.partition("#")[0])
            coords = _on_site(target, root)
            if coords == f"files/{target}":
                found.add(target)
    yield from sorted(found)


def _in_repository(page: str, path: str) -> str:
    """The path of a link's target below the root of the repository."""
    copied = page.removeprefix("files/")
    source = copied if copied != page else ROOT_PAGES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def _on_site(target: str, root: Path) -> str | None:
    """The page or file of the site for a path of the repository.

    Of a folder of docs/ that is its README, of any other folder None.
    """
    for page, name in ROOT_PAGES.items():
        if target == name:
            return page
    if target.startswith("docs/"):
        page = target.removeprefix("docs/")
        return f"{page}/README.md" if (root / target).is_dir() else page
    if (root / target).is_dir():
        return None
    if not (root / target).is_file():
        raise FileNotFoundError(f"a page links to {target}, which is not there")
    return f"files/{target}"
