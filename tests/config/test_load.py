"""Reading a configuration: what is taken, where it came from, and how mistakes are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axsparse.config import load
from axsparse.config.load import (
    LoadedConfig,
    bundled_configs,
    configure,
    load_config,
    made_in_python,
    to_yaml,
)
from axsparse.config.schema import Config
from axsparse.runtime.errors import AxsparseError, ConfigError, MissingInputError

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes `run.yaml` and returns its path."""

    def write_file(text: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8", newline="")
        return str(file)

    return write_file


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree's folder of two bundled configs, beside a package without one."""
    folder = tmp_path / "tree" / "configs"
    folder.mkdir(parents=True)
    (folder / "quickstart.yaml").write_text("seed: 1\n", encoding="utf-8")
    (folder / "gpt3_2.7b.yaml").write_text("seed: 2\n", encoding="utf-8")
    (folder / "notes.txt").write_text("no config", encoding="utf-8")
    monkeypatch.setattr(load, "PACKAGE", tmp_path / "tree" / "axsparse")
    monkeypatch.chdir(tmp_path)
    return folder


def refused(source: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


# --- what is taken -----------------------------------------------------------------------


def test_without_a_file_everything_is_default() -> None:
    assert load_config(None) == LoadedConfig(Config(), "default", {})


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "null\n"])
def test_an_empty_file_is_all_defaults(write: Write, text: str) -> None:
    assert load_config(write(text)) == LoadedConfig(Config(), "run", {})


def test_keys_know_where_they_were_set(write: Write) -> None:
    file = write("seed: 7\n\nbatch:\n  # small\n  microbatch_size: 4\n  global_batch_size: 48\n")

    loaded = load_config(file, ["batch.global_batch_size=96"])

    assert loaded.where("seed") == "seed (run.yaml:1)"
    assert loaded.where("batch.microbatch_size") == "batch.microbatch_size (run.yaml:5)"
    assert loaded.where("batch.global_batch_size") == "batch.global_batch_size (--set)"
    assert loaded.where("precision") == "precision (default)"
    assert set(loaded.origins) == {"seed", "batch.microbatch_size", "batch.global_batch_size"}


def test_later_overrides_win_over_earlier_ones_and_over_the_file(write: Write) -> None:
    loaded = load_config(write("seed: 1\ntrain: {steps: 5}\n"), ["seed=2", " seed = 3 "])

    assert (loaded.config.seed, loaded.config.train.steps) == (3, 5)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("1e+3", 1e3), (".5", 0.5), ("5.", 5.0), ("+0.25", 0.25)],
)
def test_floats_are_those_of_yaml_1_2(write: Write, text: str, value: float) -> None:
    file = write(f"optimizer: {{learning_rate: {text}}}\n")

    assert load_config(file).config.optimizer.learning_rate == value
    overrides = [f"optimizer.learning_rate={text}"]
    assert load_config(None, overrides).config.optimizer.learning_rate == value


@pytest.mark.parametrize(
    ("text", "value"), [("yes", "yes"), ("1_000", "1_000"), ("1:30", "1:30"), ("'12'", "12")]
)
def test_what_only_yaml_1_1_takes_for_a_value_is_text(text: str, value: str) -> None:
    assert load_config(None, [f"run_dir={text}"]).config.run_dir == value


def test_lists_anchors_and_a_byte_order_mark_are_read(write: Write) -> None:
    file = write("\ufeffseed: &n 3\ntrain: {steps: *n}\nlayout:\n  split:\n  - 4\n  - *n\n")

    config = load_config(file).config

    assert (config.train.steps, config.layout.split) == (3, (4, 3))


# --- bundled configs ---------------------------------------------------------------------


@pytest.mark.parametrize("source", ["gpt3_2.7b", "gpt3_2.7b.yaml"])
def test_a_bundled_config_is_found_by_name(bundled: Path, source: str) -> None:
    loaded = load_config(source)

    assert (loaded.name, loaded.config.seed) == ("gpt3_2.7b", 2)
    assert bundled_configs() == ["gpt3_2.7b", "quickstart"]


def test_an_installed_package_reads_its_own_folder_only(bundled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "axsparse" / "configs"
    folder.mkdir(parents=True)
    (folder / "quickstart.yaml").write_text("seed: 9\n", encoding="utf-8")

    assert load_config("quickstart").config.seed == 9
    assert bundled_configs() == ["quickstart"]


def test_a_file_of_the_same_name_goes_before_a_bundled_config(bundled: Path) -> None:
    Path("quickstart.yaml").write_text("seed: 5\n", encoding="utf-8")

    assert load_config("quickstart.yaml").config.seed == 5
    assert load_config("quickstart").config.seed == 1


def test_a_name_like_no_other_is_not_guessed_at(bundled: Path) -> None:
    with pytest.raises(MissingInputError, match=r"of that name; name an existing one \(bundled: "):
        load_config("nothing.yaml")


@pytest.mark.parametrize("source", ["quikstart", "quikstart.yaml", "./quikstart.yaml"])
def test_a_name_that_is_not_there_is_told_with_the_nearest(bundled: Path, source: str) -> None:
    message = (
        "no such file and no bundled config of that name; "
        "did you mean quickstart? (bundled: gpt3_2.7b, quickstart)"
    )
    with pytest.raises(MissingInputError, match=re.escape(message) + "$"):
        load_config(source)


def test_without_bundled_configs_a_missing_file_is_just_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "PACKAGE", tmp_path / "axsparse")

    with pytest.raises(
        MissingInputError, match="config 'none': no such file; name an existing file"
    ):
        load_config("none")


def test_a_name_with_a_nul_is_not_read() -> None:
    with pytest.raises(MissingInputError, match=r"config '/a\\x00b': cannot be read \(embedded"):
        load_config("/a\0b")


def test_a_folder_beside_is_called_one(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(MissingInputError, match="config 'mine': a folder and no bundled config of"):
        load_config("mine")


def test_a_folder_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError) as caught:
        load_config(str(tmp_path))

    assert str(caught.value) == (
        f"config '{tmp_path}': cannot be read (Is a directory); name a readable YAML file"
    )


# --- broken YAML -------------------------------------------------------------------------


def test_bytes_that_are_not_utf8_are_placed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"seed: 1\nrun_dir: caf\xe9\n")

    assert refused(str(file)) == "run.yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\ntrain: {steps: 2\n",
            "run.yaml:3: not YAML: while parsing a flow mapping, "
            "expected ',' or '}', but got '<stream end>'; correct it there",
        ),
        (
            "seed: *gone\n",
            "run.yaml:1: not YAML: found undefined alias 'gone'; a text that begins with * or & "
            "stands in quotes, such as '*.bias=0'",
        ),
        (
            "seed: 1\n---\nseed: 2\n",
            "run.yaml:2: not YAML: expected a single document in the stream, "
            "but found another document; correct it there",
        ),
        (
            'seed: 1\nrun_dir: "\\U00110000"\n',
            "run.yaml:2: not YAML: chr() arg not in range(0x110000); correct it there",
        ),
        (
            "seed: 1\nrun_dir: \x01\n",
            "run.yaml:2: character '\\x01' is not allowed in YAML; remove it",
        ),
        ("- seed\n", "run.yaml:1: a list is not a mapping; write `key: value` lines"),
        ("# top\n3\n", "run.yaml:2: 3 is not a mapping; write `key: value` lines"),
        ("seed: 1\npruning:\n", "pruning (run.yaml:2): null is not a mapping; write"),
        ("pruning: [1]\n", "pruning (run.yaml:1): a list is not a mapping; write"),
        ("pruning: 'on'\n", "pruning (run.yaml:1): 'on' is not a mapping; write"),
        ("? [1]\n: 2\n", "run.yaml:1: a list or section cannot be a key; write a name"),
        (
            "pruning:\n  sparsity: 0.5\n  at_step: 1\n  sparsity: 0.6\n",
            "pruning.sparsity (run.yaml:4): given twice, first in line 2; keep one of them",
        ),
        ("seed: 1\nseed: 1\n", "seed (run.yaml:2): given twice, first in line 1; keep one"),
        (
            "pruning.sparsity: 0.5\n",
            "pruning.sparsity (run.yaml:1): dotted keys are for --set; "
            "write pruning: {sparsity: …}",
        ),
        ("seed: {a: 1}\n", "seed (run.yaml:1): a mapping is not a value; write a scalar"),
        ("seed: [[1]]\n", "seed (run.yaml:1): a nested list is not a value; write a scalar"),
        ("pruning: &p {sparsity: *p}\n", "pruning.sparsity (run.yaml:1): a mapping is not a"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(write: Write, text: str, message: str) -> None:
    assert refused(write(text)).startswith(message)


@pytest.mark.parametrize(
    ("text", "place", "tag"),
    [
        ("!!python/object:os.system {}\n", "run.yaml:1", "!!python/object:os.system"),
        ("!!set {seed}\n", "run.yaml:1", "!!set"),
        ("pruning: !mine {}\n", "pruning (run.yaml:1)", "!mine"),
        ("!!python/name:os.system seed: 1\n", "run.yaml:1", "!!python/name:os.system"),
        ("seed: !!python/name:os.system x\n", "seed (run.yaml:1)", "!!python/name:os.system"),
        ("seed: !!int three\n", "seed (run.yaml:1)", "!!int"),
        ("optimizer: {betas: !!python/tuple [0, 0]}\n", "optimizer.betas (run.yaml:1)", None),
        ("optimizer: {betas: [0, !!int x]}\n", "optimizer.betas (run.yaml:1)", "!!int"),
    ],
)
def test_tags_are_refused(write: Write, text: str, place: str, tag: str | None) -> None:
    tag = tag or "!!python/tuple"
    assert refused(write(text)) == f"{place}: tag {tag!r} is not allowed; write a plain value"


@pytest.mark.parametrize("mark", ["[", "{a: ", "!!seq [", "- "])
def test_deep_nesting_is_refused_at_once(write: Write, mark: str) -> None:
    """Once, 3,000 brackets took seconds, until the stack was full."""
    assert refused(write("\n" + mark * 5000)) == (
        "run.yaml:2: not YAML: more than 20 lists and mappings within each other; correct it there"
    )


# --- unknown keys and bad overrides ------------------------------------------------------


def test_an_unknown_key_of_a_file_is_told_with_its_line(write: Write) -> None:
    assert refused(write("seed: 1\nbatch:\n  microbatch: 2\n")) == (
        "batch.microbatch (run.yaml:3): unknown key; did you mean batch.microbatch_size?"
    )
    assert refused(write("prunning:\n  sparsity: 0.5\n")) == (
        "prunning (run.yaml:1): unknown key; did you mean pruning?"
    )


# --- values that the schema refuses ------------------------------------------------------


def test_the_first_refused_key_is_told_with_the_number_of_others(write: Write) -> None:
    file = write("seed: -1\nlayout:\n  g_inter: x\n  split: [0, 0]\n")

    assert refused(file) == (
        "layout.g_inter (run.yaml:3): 'x' should be a valid integer or be 'auto' (and 2 more)"
    )


@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(
        st.text(max_size=30),
        st.text("abc:-?![]{}&*#|>%@\"'\\ \n\t1.e", max_size=30),
        st.text(max_size=20).map(lambda value: f"run_dir: {value}"),
    ),
    override=st.one_of(st.text(max_size=20), st.text(max_size=20).map("run_dir={}".format)),
)
def test_any_text_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str, override: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8", newline="")

    assert _lines_of_refusal(str(file), []) <= 1
    assert _lines_of_refusal(None, [override]) <= 1


def _lines_of_refusal(source: str | None, overrides: list[str]) -> int:
    try:
        to_yaml(load_config(source, overrides).config)
    except AxsparseError as error:
        return len(str(error).splitlines())
    return 0


def test_a_configuration_made_in_python_is_as_strict_as_a_file() -> None:
    config = configure({"optimizer": {"betas": [0.8, 0.9]}, "seed": 7})

    assert (config.optimizer.betas, config.seed) == ((0.8, 0.9), 7)
    with pytest.raises(ConfigError) as unknown:
        configure({"optimizer": {"learning_rat": 1.0}})
    assert str(unknown.value) == (
        "optimizer.learning_rat (configure): unknown key; did you mean optimizer.learning_rate?"
    )
    with pytest.raises(
        ConfigError, match=r"pruning.sparsity \(configure\): 1.0 should be less than 1"
    ):
        configure({"pruning": {"sparsity": 1.0}})


def test_keys_that_were_given_in_python_are_no_defaults() -> None:
    loaded = made_in_python(configure({"seed": 5, "batch": {"global_batch_size": 64}}), "mine")

    assert loaded.where("seed") == "seed (configure)"
    assert loaded.where("batch.global_batch_size") == "batch.global_batch_size (configure)"
    assert loaded.where("batch.microbatch_size") == "batch.microbatch_size (default)"
    assert loaded.where("precision") == "precision (default)"


def test_a_script_takes_a_file_and_overrides_as_the_command_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 3\ntrain:\n  steps: 7\n")

    config = configure(path, ["train.steps=9", "precision=fp32"])

    loaded = made_in_python(config.model_copy(update={"seed": 5}), "model")
    assert (loaded.config.seed, loaded.config.train.steps, loaded.name) == (5, 9, "mine")
    assert loaded.where("seed") == "seed (configure)"
    assert loaded.where("train.steps") == "train.steps (--set)"
    assert loaded.where("precision") == "precision (--set)"
    assert config == configure({"seed": 3, "train": {"steps": 9}, "precision": "fp32"})
    with pytest.raises(ConfigError, match=r"mine.yaml:3\): 'no' is no whole number|train.steps"):
        configure(str(path), ["train.steps=no"])


def test_overrides_win_over_dictionaries_as_they_do_over_a_file() -> None:
    given = {"seed": 3, "train": {"steps": 7, "eval_steps": 0}}
    config = configure(given, ["train.steps=9", "precision=fp32"])

    loaded = made_in_python(config, "mine")
    assert (config.seed, config.train.steps, config.train.eval_steps) == (3, 9, 0)
    assert (config.precision, loaded.name) == ("fp32", "mine")
    assert loaded.where("train.steps") == "train.steps (--set)"
    assert loaded.where("train.eval_steps") == "train.eval_steps (configure)"
    with pytest.raises(ConfigError, match=r"train.step \(--set\): unknown key; did you mean"):
        configure(given, ["train.step=9"])
    with pytest.raises(
        ConfigError, match=r"^configure: '--set' is an option, and .* write key=val"
    ):
        configure(given, ["--set", "train.steps=9"])
    with pytest.raises(ConfigError, match=r"^--set 'steps': not of the form key=value"):
        configure(given, ["steps"])
