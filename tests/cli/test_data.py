"""`axsparse data prepare`, and training on what it writes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS, run_mpirun

from axsparse.cli.data import parser
from axsparse.config.load import load_config
from axsparse.config.model_config import TextFamily, of_family
from axsparse.runtime.errors import ConfigError

TEXT = "The cat sat on the mat, and the dog did not.\n"
CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [
    f"--set={setting}"
    for setting in (
        *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"),
        *("model.sequence_length=16", "batch.global_batch_size=4", "train.steps=3"),
        *("train.eval_every=0", "train.eval_steps=1", "train.peak_flops=1e12"),
        *("pipeline.checkpoint_activations=0", "schedule.warmup_steps=1", "run_dir=run"),
    )
]


def axsparse(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "axsparse", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        env=env,
        check=False,
    )


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "in").mkdir()
    for number in range(30):
        (folder / "in" / f"{number}.txt").write_text(f"{number} {TEXT * 9}")
    options = ["--out", "words", "--workers", "1", *arguments]
    return axsparse("data", "prepare", "in", *options, cwd=folder)


@pytest.mark.exhaustive
def test_a_folder_is_prepared_and_trained_on_by_two_ranks(tmp_path: Path) -> None:
    said = prepare(tmp_path, "--train-bpe", "300", "--validation-fraction", "0.2")
    assert said.returncode == 0, said.stderr
    [shown] = [line for line in said.stdout.splitlines() if line.startswith("train begins with 24")]
    assert f" {TEXT[:40]}" in shown

    command = ["-m", "axsparse.train", "--config", "gpt_wikitext103.yaml", *SMALL]
    options = ["--set=data.path=words", "--set=model.vocab_size=300"]
    done = run_mpirun(2, [*command, *options], cwd=tmp_path)

    assert done.returncode == 0, done
    assert "· tokens words train: " in done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    assert records[0]["loss"] == pytest.approx(5.7, abs=0.3)  # ln 300
    assert records[-1]["eval_loss"] < records[0]["loss"]


@pytest.mark.exhaustive
def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    assert prepare(tmp_path, "--validation-fraction", "0.2").returncode == 0

    options = ["--set=data.path=words", "--set=model.vocab_size=255"]
    said = axsparse("train", "--config", "gpt_bookcorpus.yaml", *SMALL, *options, cwd=tmp_path)

    assert said.returncode == 78
    assert said.stderr.splitlines()[-1] == (
        "axsparse: error: model.vocab_size (--set): 255 is below the vocabulary of tokens words "
        "train, 256; choose at least 256"
    )


def test_tokens_have_to_be_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["data.source=tokens"])

    assert str(caught.value) == (
        "data.path (default): data.source tokens needs the folder that `axsparse data prepare` "
        "wrote; set data.path"
    )


def test_the_screen_says_what_was_done(tmp_path: Path) -> None:
    said = prepare(tmp_path, "--validation-fraction", "0")

    lines = said.stdout.splitlines()
    assert lines[0] == "30 files, 12.2 kB · bytes → words"
    assert lines[1] == "train: 30 documents, 12.3k tokens"
    assert lines[2] == "train begins with 24 tokens: '0 The cat sat on the mat'"
    assert lines[3].startswith("12.2 kB in 00:0")
    assert len(lines) == 4


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(TEXT * 50_000)
    options = ["--out", "o", "--validation-fraction", "0", "--workers", "1"]

    said = axsparse("data", "prepare", "a", *options, cwd=tmp_path, AXSPARSE_PROGRESS="bar")

    assert " 2/2  MB  " in said.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a"], 78, "the following arguments are required: --out"),
        (["a", "--out", "o"], 78, "one of the arguments --validation --validation-fraction"),
        (["a", "--out", "o", "--validation-fraction", "1"], 78, "'1' is no fraction of at least 0"),
        (["a", "--out", "o", "--validation-fraction", "x"], 78, "'x' is no fraction of at least"),
        (["a", "--out", "o", "--workers", "0"], 78, "'0' is no whole number of at least 1"),
        (["a", "--out", "o", "--validation-fraction", "0"], 66, "input: a is neither a file nor"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    said = axsparse("data", "prepare", *arguments, cwd=tmp_path)

    assert said.returncode == code
    assert said.stderr.startswith("axsparse: error: ")
    assert message in said.stderr
    assert said.stderr.count("\n") == 1


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    (tmp_path / "t.json").symlink_to("never")
    (tmp_path / "a").write_text(TEXT)
    arguments = ["a", "--out", "o", "--validation-fraction", "0", "--tokenizer", "t.json"]
    # Opening a pipe that nobody writes waits, so that there is time to interrupt.
    process = subprocess.Popen(
        [sys.executable, "-m", "axsparse", "data", "prepare", *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell would hand down that SIGINT is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # Opening the other end waits until the command has opened its own.
        with (tmp_path / "never").open("w"):
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        process.kill()

    assert process.returncode == 130
    assert said == (
        "axsparse: error: interrupted; start it again with the same arguments to go on\n"
    )


def test_one_of_many_ranks_works(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(TEXT)
    options = ["--out", "o", "--validation-fraction", "0"]

    said = axsparse("data", "prepare", "a", *options, cwd=tmp_path, PMI_RANK="1")

    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")
    assert not (tmp_path / "o").exists()


def test_help_costs_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; from axsparse.cli import data\n"
        "try: data.main(['prepare', '--help'])\n"
        "except SystemExit: print({'torch', 'mpi4py', 'tokenizers'} & set(sys.modules))"
    )

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "A killed run goes on where it was" in said.stdout
    assert said.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_group_says_what_it_has(arguments: list[str], tmp_path: Path) -> None:
    said = axsparse("data", *arguments, cwd=tmp_path)

    assert said.returncode == 0
    assert said.stdout.startswith("usage: axsparse data prepare INPUT")
    assert axsparse("data", "cook", cwd=tmp_path).stderr == (
        "axsparse: error: data: no command 'cook'; see axsparse data --help\n"
    )


@pytest.mark.parametrize("name", ["gpt_wikitext103", "gpt_bookcorpus"])
def test_bundled_configs_say_how_their_data_are_prepared(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    (command,) = [line for line in lines if line.startswith("#   axsparse data prepare ")]

    arguments = parser().parse_args(shlex.split(command)[4:])

    config = load_config(name).config
    assert str(arguments.out) == config.data.path
    assert config.data.source == "tokens"
    assert 0 <= of_family(config.model, TextFamily).vocab_size - arguments.train_bpe < 128


def test_the_tokenizer_of_a_folder_ends_documents_as_its_settings_say(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(TEXT)
    made = axsparse(
        *("data", "prepare", "a", "--out", "o", "--validation-fraction", "0"),
        *("--train-bpe", "300"),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    words = json.loads((tmp_path / "o" / "tokenizer.json").read_text())["model"]["vocab"]
    last = max(words, key=words.get)
    (tmp_path / "o" / "tokenizer_config.json").write_text(json.dumps({"eos_token": last}))

    said = axsparse(
        *("data", "prepare", "a", "--out", "p", "--validation-fraction", "0"),
        *("--tokenizer", "o"),
        cwd=tmp_path,
    )

    assert said.returncode == 0, said.stderr
    assert json.loads((tmp_path / "p" / "tokens.json").read_text())["separator"] == words[last]
