"""The page on pruned models in use has the figures of the committed result."""

from __future__ import annotations

import json

from support.page_blocks import ROOT

PAGE = ROOT / "docs/howto/use-pruned.md"


def test_the_page_has_the_table_of_the_results() -> None:
    saved = json.loads((ROOT / "benchmarks/results/decode.json").read_text(encoding="utf-8"))
    lines = ["| one thread | ms a token | × bf16 | × fp32 | MB |", "|---|---|---|---|---|"]
    for model, contenders in saved["models"].items():
        for name, row in contenders.items():
            cells = [f"{row['ms a token']['median']:.1f}"]
            for other in ("bf16", "fp32"):
                speed = row.get(f"speed over {other}")
                cells.append(f"{speed['median']:.2f}" if speed else "–")
            lines.append(f"| {model}: {name} | {' | '.join(cells)} | {row['MB']:.0f} |")
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "\n".join(lines)
