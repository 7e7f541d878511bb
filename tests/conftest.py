"""The order of the tests."""

from __future__ import annotations

import pytest

LONGEST = ("test_mpirun.py", "test_train.py", "test_enforced_memory.py", "test_split_master.py")
"""Files that would keep one process busy while the others have come to the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
