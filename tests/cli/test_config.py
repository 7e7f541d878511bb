"""`axsparse config show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import Axsparse

from axsparse.config.load import configure


def test_every_setting_says_where_it_comes_from(axsparse: Axsparse) -> None:
    code, screen, _ = axsparse(
        "config", "show", "--config", "quickstart.yaml", "--set", "train.steps=200"
    )

    pairs = [line.partition(" # ")[::2] for line in screen.splitlines() if " # " in line]
    said = {setting.strip(): origin for setting, origin in pairs}
    assert code == 0
    assert said["steps: 200"] == "--set"
    assert said["hidden_size: 256"] == "quickstart.yaml:4"
    assert said["clip_norm: 1.0"] == "default"
    assert said["g_inter: 2"] == "quickstart.yaml:7"


@pytest.mark.parametrize("text", ["a # b", "two\nlines", "'", "x" * 200])
def test_what_it_prints_is_a_configuration_again(
    text: str, tmp_path: Path, axsparse: Axsparse
) -> None:
    overrides = ["optimizer.betas=[0.8, 0.9]", f"run_dir={json.dumps(text)}"]
    _, screen, _ = axsparse("config", "show", *(w for pair in overrides for w in ("--set", pair)))
    (tmp_path / "again.yaml").write_text(screen)

    again = configure(str(tmp_path / "again.yaml"))

    assert again == configure(None, overrides)
    assert again.run_dir == text
