"""That every fault of the list is injected, by its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = [*sorted((TESTS / "faults").glob("test_*.py")), TESTS / "behavior" / "test_failures.py"]
"""Where `make test-faults` looks."""
LIST = TESTS.parent / "docs" / "howto" / "faults.md"


def injected() -> set[int]:
    """The numbers in all `pytest.mark.fault(…)`."""
    return {
        number
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault"
        for number in map(ast.literal_eval, node.args)
    }


def test_the_list_has_no_other_faults() -> None:
    rows = re.findall(r"^\| (\d+) \|", LIST.read_text(encoding="utf-8"), re.MULTILINE)

    assert list(map(int, rows)) == list(range(1, 21))
    assert injected() == set(range(1, 21))
