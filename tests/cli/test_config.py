"""`axsparse config show` and `schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axsparse.cli.config import main
from axsparse.config.json_schema import editor_schema
from axsparse.config.load import load_config
from axsparse.runtime.errors import EXIT_CONFIG


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([*words])
    screen = capsys.readouterr()
    return int(end.value.code or 0), screen.out, screen.err


def origins(screen: str) -> dict[str, str]:
    """`setting: value` -> the origin behind it."""
    pairs = [line.partition(" # ")[::2] for line in screen.splitlines() if " # " in line]
    return {setting.strip(): origin for setting, origin in pairs}


def test_every_setting_says_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    code, screen, _ = told(
        capsys, "show", "--config", "quickstart.yaml", "--set", "train.steps=200"
    )

    said = origins(screen)
    assert code == 0
    assert said["steps: 200"] == "--set"
    assert said["hidden_size: 256"] == "quickstart.yaml:3"
    assert said["clip_norm: 1.0"] == "default"
    assert said["g_inter: auto"] == "quickstart.yaml:6"


def test_for_a_number_of_ranks_auto_is_decided_as_training_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, screen, _ = told(capsys, "show", "--config", "quickstart.yaml", "--ranks", "6")

    said = origins(screen)
    assert code == 0
    assert said["g_inter: 2"] == "auto (quickstart.yaml:6)"
    assert said["g_data: 3"] == "auto (default)"
    assert said["decay_steps: 60"] == "auto (default)"
    assert said["split: [4, 4]"] == "auto (default)"
    assert said["run_dir: auto"] == "default"


@pytest.mark.parametrize("text", ["a # b", "two\nlines", "'", "x" * 200])
def test_what_it_prints_is_a_configuration_again(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["optimizer.betas=[0.8, 0.9]", f"run_dir={json.dumps(text)}"]
    _, screen, _ = told(capsys, "show", *(w for pair in overrides for w in ("--set", pair)))
    (tmp_path / "again.yaml").write_text(screen)

    again = load_config(str(tmp_path / "again.yaml")).config

    assert again == load_config(None, overrides).config
    assert again.run_dir == text


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, screen, _ = told(capsys, "schema")

    assert code == 0
    assert json.loads(screen) == editor_schema()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["show", "--ranks", "no"], "--ranks: 'no' is no number of ranks to decide for; write 4"),
        (["show", "--set", "layout.g_inter=4", "--ranks", "3"], "layout.g_inter (--set): 4 does n"),
        (["show", "--set", "trian.steps=1"], "trian.steps (--set): unknown key; did you mean"),
        (["shwo"], "config: no command 'shwo'; did you mean show? see axsparse config --help"),
        (["schema", "all"], "unrecognized arguments: all; see --help"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, screen, errors = told(capsys, *words)

    assert (code, screen) == (EXIT_CONFIG, "")
    assert errors.startswith(f"axsparse: error: {line}")
    assert errors.count("\n") == 1


def test_without_a_command_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    code, screen, _ = told(capsys)

    assert code == 0
    assert screen.startswith("usage: axsparse config show")
