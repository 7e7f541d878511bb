"""Every code block and command of README and docs: all are read, and each page's are run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.mpirun import ENVIRONMENT, mpirun_path
from support.page_blocks import PAGES, ROOT, SHELL, SHOWN_ONLY, Block, blocks
from support.warm_python import warm_folder, warm_python

import axsparse as ax
from axsparse.cli.parser import all_parsers
from axsparse.config.load import configure
from axsparse.config.schema import FIELDS, SECTIONS

NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 2,
    "docs/howto/at-your-centre.md": 2,
    "docs/howto/faults.md": 1,
    "docs/howto/gpu.md": 3,
    "docs/howto/plan.md": 1,
}
"""How many blocks of a page are not run; the page says why before each. More are not added."""
REASONS = (
    "needs a GPU",
    "needs several hosts",
    "needs NVIDIA's",
    "installs",
    "runs the tests",
    "needs a checkout",
)
PAGE_SECONDS = 900.0
"""Far beyond what any page takes."""
SMALL = """\
model: {name: gpt, num_layers: 2, hidden_size: 32, num_heads: 4, sequence_length: 32}
batch: {global_batch_size: 8, microbatch_size: 4}
layout: {g_inter: 2}
schedule: {warmup_steps: 5}
train: {steps: 60, eval_every: 30, eval_steps: 1, peak_flops: 1e12}
"""
"""A `quickstart.yaml` in the folder of a page, which comes before the bundled one."""
ALL = [block for page in PAGES for block in blocks(page)]
RUN_PAGES = sorted({b.page for b in ALL if b.language not in SHOWN_ONLY and b.reason is None})


def own_words(command: str) -> list[str]:
    """The words after `axsparse` in a command; [] for a command of something else."""
    words = shlex.split(command, comments=True)
    words = words[: min((words.index(sign) for sign in (">", "|") if sign in words), default=None)]
    for at, word in enumerate(words):
        if word == "axsparse":
            return words[at + 1 :]
        if words[at : at + 2] == ["-m", "axsparse.train"]:
            return ["train", *words[at + 2 :]]
        if words[at : at + 2] == ["-m", "axsparse"]:
            return words[at + 2 :]
    return []


COMMANDS = [
    (block, words)
    for block in ALL
    if block.language in SHELL
    for command in block.commands
    if (words := own_words(command))
]


def test_nothing_is_left_out_but_what_is_known_and_says_why() -> None:
    left = [block for block in ALL if block.reason is not None]

    assert Counter(block.page for block in left) == NOT_RUN
    assert [str(b) for b in left if not str(b.reason).startswith(REASONS)] == []


def test_every_block_says_what_it_is() -> None:
    known = {*SHELL, *SHOWN_ONLY, "python", "yaml", "file"}
    disguised = [
        str(block)
        for block in ALL
        if block.language in SHOWN_ONLY
        and re.search(r"^(\$ |axsparse \w+ -|mpirun )", block.code, re.M)
    ]

    assert [str(block) for block in ALL if block.language not in known] == []
    assert disguised == []


def test_commands_have_the_options_that_they_are_given() -> None:
    parsers = all_parsers()
    for block, words in COMMANDS:
        if words[-1] == "--help":
            continue
        name = " ".join(words[:2]) if " ".join(words[:2]) in parsers else words[0]
        try:
            arguments = parsers[name].parse_args(words[len(name.split()) :])
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{block}: axsparse {shlex.join(words)}") from None
            continue  # an option that prints something and ends, as --help does
        keys = [pair.partition("=")[0] for pair in getattr(arguments, "overrides", [])]
        if block.codes == (0,):
            assert set(keys) <= FIELDS.keys(), str(block)


def test_training_has_the_ranks_that_its_configuration_needs() -> None:
    """On pages and in help texts; how many layers and samples there are is not looked at."""
    commands = [command for block in ALL if block.language in SHELL for command in block.commands]
    for parser in all_parsers().values():
        commands += [line.strip() for line in (parser.description or "").splitlines()]
    trained = 0
    for command in commands:
        launched = re.match(
            r"(?:mpirun -n (\d+) )?axsparse train --config quickstart\.yaml", command
        )
        if launched is not None:
            overrides = all_parsers()["train"].parse_args(own_words(command)[1:]).overrides
            layout = configure("quickstart.yaml", overrides).layout
            stages = 1 if layout.g_inter == "auto" else layout.g_inter
            assert int(launched[1] or 1) % (stages * layout.g_tensor) == 0, command
            trained += 1
    assert trained > 10


def test_settings_in_yaml_are_settings(tmp_path: Path) -> None:
    for number, block in enumerate(block for block in ALL if block.language == "yaml"):
        if yaml.safe_load(block.code).keys() <= {*SECTIONS, *FIELDS}:
            (tmp_path / f"{number}.yaml").write_text(block.code)
            configure(str(tmp_path / f"{number}.yaml"))


def test_python_compiles_and_names_what_there_is() -> None:
    for block in ALL:
        if block.language == "python":
            compile(block.code, str(block), "exec")
            assert set(re.findall(r"\bax\.(\w+)", block.code)) <= set(ax.__all__), str(block)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", RUN_PAGES)
def test_a_page_runs_from_its_first_block_to_its_last(page: str, tmp_path: Path) -> None:
    found = [block for block in blocks(page) if block.reason is None]
    if any("transformers" in block.code for block in found):
        pytest.importorskip("transformers", reason="the page needs transformers")
    (tmp_path / "quickstart.yaml").write_text(SMALL)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for block in found:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.code)
            (tmp_path / block.title).chmod(0o755)
    for block in found:
        if block.language in SHELL:
            run(block, ["bash", "-c", _script(block)], tmp_path)
        elif block.language == "python" and block.title is None:
            setup = tmp_path / "setup.py"
            (tmp_path / "block.py").write_text(
                (setup.read_text() if setup.exists() else "") + block.code
            )
            launcher = [] if block.ranks == 1 else [mpirun_path(), "-n", str(block.ranks)]
            run(block, [*launcher, warm_python(), "block.py"], tmp_path)


def _script(block: Block) -> str:
    """The commands of a block, of which each has to end with a code that the page allows."""
    allowed = "|".join(map(str, block.codes))
    check = f'code=$?; case $code in {allowed}) ;; *) exit "$code" ;; esac'
    return "\n".join(f"{command}\n{check}" for command in block.commands)


def run(block: Block, command: list[str], folder: Path) -> None:
    """Run a block in the folder of its page; a failure shows all that was printed."""
    path = os.pathsep.join(
        [str(folder), str(warm_folder()), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PAGE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{done.stdout}"
