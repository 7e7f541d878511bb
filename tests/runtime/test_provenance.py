"""Which versions of what a run was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from axsparse.runtime.provenance import checkout_commit


def test_an_installed_package_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.runtime.provenance.CHECKOUT", tmp_path)
    checkout_commit.cache_clear()
    assert checkout_commit() is None

    checkout_commit.cache_clear()
    (tmp_path / ".git").write_text("this is no repository")
    assert checkout_commit() is None
    checkout_commit.cache_clear()


def test_git_is_asked_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout_commit.cache_clear()
    first = checkout_commit()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked again"))

    assert checkout_commit() == first
