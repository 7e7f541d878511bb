"""`axsparse ticket show`, `import` and `export`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.images import write_safetensors
from support.mpirun import LONGEST_SECONDS
from support.tickets import PARAMETERS, small_ticket, some_masks
from support.unread import unread

from axsparse.cli import ticket
from axsparse.pruning.ticket.ticket_reader import open_ticket
from axsparse.runtime.files.safetensors import SafetensorsFile

Show = Callable[..., tuple[int, str, str]]


def axsparse(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "axsparse", *arguments]
    env = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LONGEST_SECONDS,
        env=env,
        check=False,
    )


@pytest.fixture
def show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Show]:
    """Runs the command in this process; exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            ticket.main([*arguments])
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, said.out, said.err

    monkeypatch.chdir(tmp_path)
    interrupts = signal.getsignal(signal.SIGINT)
    yield run
    signal.signal(signal.SIGINT, interrupts)


def test_a_ticket_is_shown_as_a_table(tmp_path: Path) -> None:
    manifest = open_ticket(small_ticket(tmp_path)).manifest
    kept = [int(mask.sum()) for mask in some_masks().values()]

    said = axsparse("ticket", "show", "ticket.safetensors", cwd=tmp_path)

    assert (said.returncode, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert lines[:4] == [
        f"early-bird, step 640, seed 7, axsparse {manifest.axsparse}",
        f"masks {manifest.hash}",
        f"model {manifest.model_hash}, 6 parameter tensors",
        "",
    ]
    percent = [f"{100 * (1 - k / n):.3f} %" for k, n in zip(kept, (20, 16, 18), strict=True)]
    total = f"{100 * (1 - sum(kept) / 54):.3f} %"
    assert lines[4:] == [
        "tensor                      shape  entries  kept  sparsity",
        f"block0.fc.weight            5 × 4       20  {kept[0]:4}  {percent[0]}",
        f"block1.fc.weight            4 × 4       16  {kept[1]:4}  {percent[1]}",
        f"block2.conv.weight  2 × 1 × 3 × 3       18  {kept[2]:4}  {percent[2]}",
        f"total                                   54  {sum(kept):4}  {total}",
    ]


def test_the_whole_manifest_is_shown_as_json(tmp_path: Path, show: Show) -> None:
    manifest = open_ticket(small_ticket(tmp_path)).manifest

    code, out, err = show("show", "--json", "ticket.safetensors")

    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown == json.loads(manifest.text())
    assert shown["parameters"] == {name: list(shape) for name, shape in PARAMETERS.items()}
    assert shown["tensors"]["block0.fc.weight"]["shape"] == [5, 4]


def test_a_run_stands_for_the_ticket_that_it_found(tmp_path: Path, show: Show) -> None:
    small_ticket(tmp_path)

    assert show("show", str(tmp_path)) == show("show", "ticket.safetensors")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "."], 66, "ticket: . has no ticket.safetensors, which a run writes when it find"),
        (["show"], 78, "the following arguments are required: FILE; see --help"),
        (["show", "t", "u"], 78, "unrecognized arguments: u; see --help"),
        (["eat"], 78, "ticket: no command 'eat'; see axsparse ticket --help"),
        (["show", "none"], 66, "ticket 'none': cannot be read (No such file or directory); name"),
        (["show", "short"], 65, "short: no safetensors file, or cut short; get it anew"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], code: int, message: str, tmp_path: Path, show: Show
) -> None:
    (tmp_path / "short").write_bytes(b"short")

    ended, out, err = show(*arguments)

    assert (ended, out) == (code, "")
    assert err.startswith(f"axsparse: error: {message}")
    assert err.count("\n") == 1


def test_one_of_many_ranks_speaks(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")

    assert show("show", "none") == (0, "", "")


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_is_no_mistake(tmp_path: Path) -> None:
    small_ticket(tmp_path)

    assert unread("ticket", "show", "ticket.safetensors", cwd=tmp_path) == (0, b"")


def test_help_costs_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from axsparse.cli import ticket\n"
        "try: ticket.main(['show', '--help'])\n"
        "except SystemExit: print({'torch', 'mpi4py'} & set(sys.modules))"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "usage: axsparse ticket show" in said.stdout
    assert said.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_group_says_what_it_has(arguments: list[str], show: Show) -> None:
    code, out, err = show(*arguments)

    assert (code, err) == (0, "")
    assert out.startswith("usage: axsparse ticket show FILE")


def test_the_command_is_one_of_axsparse(tmp_path: Path) -> None:
    assert "  ticket     say what" in axsparse("--help", cwd=tmp_path).stdout


def test_masks_come_in_and_go_out_and_replace_nothing(tmp_path: Path, show: Show) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    model = ["--set=model.name=llama", "--set=model.num_layers=2", "--set=model.hidden_size=8"]
    model += ["--set=model.num_heads=2", "--set=model.intermediate_size=5"]
    mask = torch.ones(5, 8)
    mask[0] = 0
    write_safetensors(tmp_path / "masks.safetensors", {name: mask})

    code, out, err = show("import", "masks.safetensors", "--out", "t", *model)
    assert (code, out, err) == (0, "t: masks of 1 tensors, 20.000 % pruned\n", "")
    code, out, err = show("export", "t", "--out", "o.safetensors", "--names", "hf")
    assert (code, out) == (0, "o.safetensors: masks of 1 tensors, 20.000 % pruned\n")
    assert SafetensorsFile(tmp_path / "o.safetensors").read(name).tolist() == mask.tolist()

    before = sorted(tmp_path.iterdir())
    for arguments in (["import", "masks.safetensors", "--out", "t", *model], ["export", "t"]):
        code, _, err = show(*arguments, *([] if "--out" in arguments else ["--out", "t"]))
        assert code == 74
        assert err == (
            "axsparse: error: --out: t is there already; choose another place, or move it away\n"
        )
    code, _, err = show("export", "t", "--out", "gone/o.safetensors")
    assert code == 74
    reason = "No such file or directory"
    assert err == (
        f"axsparse: error: --out: gone/o.safetensors cannot be written ({reason}); choose another "
        "place\n"
    )
    assert sorted(tmp_path.iterdir()) == before
