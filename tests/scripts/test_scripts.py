"""The documentation site, part by part and in full."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.page_blocks import PAGES, ROOT

import axsparse as ax
from axsparse.cli.parser import COMMANDS
from axsparse.config.schema import FIELDS

SITE = ROOT / "scripts" / "site"


@pytest.fixture(scope="module")
def site() -> Any:
    """The modules that build the site."""
    sys.path.insert(0, str(SITE))
    try:
        import links
        import pictures
        import reference_pages
    finally:
        sys.path.remove(str(SITE))
    return SimpleNamespace(links=links, pictures=pictures, pages=reference_pages)


def test_the_reference_has_every_name_setting_and_command(site: Any) -> None:
    api, settings, commands = (make() for make in site.pages.PAGES.values())

    named = set(re.findall(r"^## ax\.(\w+)$", api, re.MULTILINE))
    assert named == set(ax.__all__) - {"__version__"}
    assert set(re.findall(r"^\| `([\w.]+)` \|", settings, re.MULTILINE)) == set(FIELDS)
    assert set(re.findall(r"^## axsparse (\w+)", commands, re.MULTILINE)) == set(COMMANDS)


def test_links_out_of_docs_lead_to_files_of_the_site(site: Any) -> None:
    def led(link: str, page: str) -> str:
        led: str = site.links.rewritten(f"[x]({link})", page, ROOT)
        return led

    assert led("docs/howto/plan.md#a", "index.md") == "[x](howto/plan.md#a)"
    assert led("../../CHANGELOG.md", "reference/auto.md") == "[x](changelog.md)"
    assert led("../../examples/custom_model.py", "howto/python.md") == (
        "[x](../files/examples/custom_model.py)"
    )
    assert led("configs/", "index.md") == "x"
    assert led("docs/decisions/", "index.md") == "[x](decisions/README.md)"
    with pytest.raises(FileNotFoundError, match=r"a page links to none\.txt"):
        led("../../none.txt", "howto/plan.md")


def test_every_page_has_a_place_on_the_site(site: Any) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    made = {*site.pages.PAGES, *site.links.ROOT_PAGES}
    own = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    listed = set(re.findall(r"([\w/-]+\.md)$", config, re.MULTILINE))

    assert listed == made | {page for page in own if not page.startswith("decisions/0")}
    assert yaml.safe_load(config)["strict"] is True


def test_every_picture_of_the_pages_is_drawn(site: Any) -> None:
    found = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"<!-- picture: ([\w-]+) -->", found)

    assert names
    assert all("<svg" in site.pictures.draw(name) for name in names)
