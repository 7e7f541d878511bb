"""Which versions of what a run was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.runtime.provenance import git_hash


def test_an_installed_package_has_no_git_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.runtime.provenance.CHECKOUT", tmp_path)
    assert git_hash() is None

    (tmp_path / ".git").write_text("this is no repository")
    assert git_hash() is None
