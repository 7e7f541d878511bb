"""The hooks of mkdocs for the site: generated pages, pictures, links out of docs/."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import links
import pictures
import reference_pages
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PICTURE = re.compile(r"<!-- picture: ([\w-]+) -->")
HIDDEN = re.compile(r"<!--(?! picture).*?-->\n?", re.DOTALL)
"""Comments are for the tests of the pages, not for readers."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of the source, and the files that pages link to."""
    made = {page: make() for page, make in reference_pages.PAGES.items()}
    for page, name in links.ROOT_PAGES.items():
        made[page] = (ROOT / name).read_text(encoding="utf-8")
    made[config.extra_css[0]] = pictures.STYLE
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for path in links.outside(ROOT, made):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draw the pictures, and lead links to where the site has their targets."""
    drawn = PICTURE.sub(lambda found: pictures.draw(found[1]), HIDDEN.sub("", markdown))
    return links.rewritten(drawn, page.file.src_uri, ROOT)
