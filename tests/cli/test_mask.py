"""`axsparse mask`."""

from __future__ import annotations

from pathlib import Path

from support.commands import Axsparse
from support.mask_files import small_mask_file, some_masks


def test_a_file_or_the_run_that_holds_it_is_shown_as_a_table(
    tmp_path: Path, axsparse: Axsparse
) -> None:
    path = small_mask_file(tmp_path)
    kept = [int(mask.sum()) for mask in some_masks().values()]

    code, screen, errors = axsparse("mask", str(path))

    assert (code, errors) == (0, "")
    percent = [f"{100 * (1 - k / n):.3f} %" for k, n in zip(kept, (20, 16, 18), strict=True)]
    total = f"{100 * (1 - sum(kept) / 54):.3f} %"
    assert screen.splitlines() == [
        "tensor                      shape  entries  kept  sparsity",
        f"block0.fc.weight            5 × 4       20  {kept[0]:4}  {percent[0]}",
        f"block1.fc.weight            4 × 4       16  {kept[1]:4}  {percent[1]}",
        f"block2.conv.weight  2 × 1 × 3 × 3       18  {kept[2]:4}  {percent[2]}",
        f"total                                   54  {sum(kept):4}  {total}",
    ]
    assert axsparse("mask", str(tmp_path)) == (code, screen, errors)
