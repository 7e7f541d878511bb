"""The page about a pruned model."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.cli.prune_order import PruneOrder
from axsparse.cli.prune_page import Facts, page, write_page
from axsparse.config.load import configure
from axsparse.runtime.errors import OutputError


def test_the_page_says_what_gains_and_what_does_not() -> None:
    order = PruneOrder(
        Path("model"), (Path("texts"),), (), Path("out"), "quickstart.yaml", (), "train"
    )
    blocks = {"block7": (0.5, 0.25), "block8": (3.0, 2.5)}
    facts = Facts(2.0, 2.5, 1000, 400, 8000, 9_000_000, 10**9, 7, 2.2, blocks)

    said = page(order, configure(None), facts, {"tokens": 61.0})
    patterned = page(order, configure(None, ["pruning.pattern=2:4"]), facts, {})

    assert "60.0 % of the entries are zero (by magnitude), trained on." in said
    assert "| 7 validation samples | dense | pruned | this folder |" in said
    assert "| perplexity | 7.389 | 9.025 | 12.182 |" in said
    assert "| block7 | 0.5000 | 0.2500 |\n| block8, loss of a target | 3.0000 | 2.5000 |" in said
    assert "2 bits each | 3.2 kB |" in patterned
    assert "whose state is 9.0 MB a rank here; and 2:4 patterns" in said
    assert "| tokens | 01:01 |" in said
    assert "A rank had at most 1.0 GB of memory." in said
    assert "and its pattern, 2:4, on NVIDIA GPUs" in patterned


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^--out: the page in .*/none cannot be written \("):
        write_page(tmp_path / "none", "text")
