"""Which versions of what a run was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.runtime.provenance import checkout_commit


def test_an_installed_package_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.runtime.provenance.CHECKOUT", tmp_path)
    assert checkout_commit() is None

    (tmp_path / ".git").write_text("this is no repository")
    assert checkout_commit() is None
