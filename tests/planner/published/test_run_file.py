"""The format of a file of runs: everything it may say, defaults, and one line for each mistake."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from axsparse.planner.cluster import load_cluster
from axsparse.planner.published.run_file import bundled_tables, load_runs
from axsparse.runtime.errors import ConfigError, MissingInputError

WHOLE = """\
cluster: v100-edr            # a bundled name or a file
rows:
  - name: DP_PP_8x1x4_512_1536x16
    model: {family: gpt, num_layers: 16, hidden_size: 1536, num_heads: 16, vocab_size: 51200, sequence_length: 2048, tie_embeddings: true}
    layout: {data: 8, tensor: 1, pipeline: 4, chunks: 1, split: even}
    batch: {global: 512, micro: 2}
    training: {precision: fp16, gradients: fp16, recompute: full, zero: 0, schedule: 1f1b, sparsity: 0}
    fit: false
    published: {tflops_per_gpu: 32.82, flops: megatron}
"""  # noqa: E501
LEAST = """\
rows:
  - name: least
    model: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 128, sequence_length: 32}
    batch: {global: 4}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "runs.yaml"
    path.write_text(text)
    return path


def test_a_whole_row_is_read_as_written(tmp_path: Path) -> None:
    found = load_runs(written(tmp_path, WHOLE))
    [row] = found.rows

    assert (found.cluster, row.devices, row.microbatches) == ("v100-edr", 32, 32)
    assert (row.training.recompute, row.published.tflops_per_gpu) == ("full", 32.82)


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    [row] = load_runs(written(tmp_path, LEAST)).rows

    assert (row.devices, row.microbatches, row.fit) == (1, 4, False)
    assert (row.training.precision, row.training.recompute) == ("fp16", "none")
    assert row.published.seconds_per_step is None


def test_numbers_are_those_of_configurations(tmp_path: Path) -> None:
    text = LEAST.replace("global: 4", "global: 010") + "    published: {seconds_per_step: 1e-3}\n"
    [row] = load_runs(written(tmp_path, text)).rows

    assert row.published.seconds_per_step == 1e-3
    assert row.batch.global_ == 10  # which YAML 1.1 reads as 8


def test_a_llama_and_a_split_by_hand_are_read(tmp_path: Path) -> None:
    given = yaml.safe_load(LEAST)
    given["rows"][0]["model"] |= {
        "family": "llama",
        "num_kv_heads": 2,
        "intermediate_size": 160,
        "head_dim": 16,
    }
    given["rows"][0]["layout"] = {"pipeline": 2, "split": [1, 1]}
    given["rows"][0]["published"] = {"memory_gb": 3, "fits": True, "seconds_per_step": 2}

    [row] = load_runs(written(tmp_path, yaml.safe_dump(given))).rows

    assert row.layout.split == (1, 1)
    assert row.model.num_kv_heads == 2


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        ("clusterr", "summit", "unknown key clusterr; did you mean cluster?"),
        ("rows", [], "rows is empty; give at least one run"),
        ("0.model.num_layer", 3, "row 'a': unknown key model.num_layer; did you mean num_layers?"),
        ("0.published.tflop", 3, "row 'a': unknown key published.tflop; did you mean flops?"),
        ("0.publishd", {}, "row 'a': unknown key publishd; did you mean published?"),
        ("0.batch.globl", 3, "row 'a': unknown key batch.globl; did you mean global?"),
        (
            "0.training.xyz",
            1,
            "row 'a': unknown key training.xyz; known are precision, gradients, recompute, zero, "
            "schedule, sparsity, attention, sequence_parallel, slack",
        ),
        ("0.batch.global", None, "row 'a': batch.global is missing; give it"),
        ("0.name", None, "row 1: name is missing; give it"),
        (
            "0.training.recompute",
            "some",
            "row 'a': training.recompute is 'some', which cannot be: input should be 'none', "
            "'selective' or 'full'; correct it",
        ),
        (
            "0.layout.split",
            [4, 4, 4],
            "row 'a': layout.split has 3 numbers whose sum is 12; give 4 (pipeline × chunks) whose "
            "sum is 16 (num_layers)",
        ),
        ("0.layout.split", [17, 1, -1, -1], "row 'a': layout.split has a negative number"),
        (
            "0.batch.micro",
            3,
            "row 'a': 8 replicas with microbatches of 3 do not divide a batch of 512; correct "
            "layout.data, batch.micro or batch.global",
        ),
        (
            "0.layout.chunks",
            9,
            "row 'a': 16 blocks cannot fill 36 pieces (pipeline × chunks); take fewer",
        ),
        (
            "0.layout.tensor",
            3,
            "row 'a': layout.tensor 3 does not divide num_heads 16; choose a divisor",
        ),
        (
            "0.model.num_kv_heads",
            5,
            "row 'a': num_kv_heads 5 does not divide num_heads 16; choose a divisor",
        ),
        (
            "0.model.hidden_size",
            10**400,
            f"row 'a': model.hidden_size is 1{'0' * 59}, which cannot be: input should be less "
            "than or equal to 1000000000; correct it",
        ),
        (
            "0.batch.global",
            800_000_000,
            "row 'a': 50000000 microbatches in 4 pieces (pipeline × chunks) are more than the "
            "2000000 that are simulated; correct batch.global, batch.micro or layout",
        ),
        ("0.model.num_heads", 7, "row 'a': num_heads 7 does not divide hidden_size 1536"),
        (
            "0.training.schedule",
            "gpipe",
            "row 'a': layout.chunks 2 with schedule gpipe; only 1f1b is interleaved",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, place: str, value: Any, line: str) -> None:
    given = copy.deepcopy(yaml.safe_load(WHOLE))
    given["rows"][0]["name"] = "a"
    if value == "gpipe":
        given["rows"][0]["layout"]["chunks"] = 2
    at: Any = given
    if place.startswith("0."):
        at = given["rows"][0]
    *sections, key = place.removeprefix("0.").split(".")
    for section in sections:
        at = at[section]
    if value is None:
        del at[key]
    else:
        at[key] = value

    with pytest.raises(ConfigError) as error:
        load_runs(written(tmp_path, yaml.safe_dump(given)))

    assert str(error.value).startswith(f"runs.yaml: {line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["rows: [", "- 1", "", "rows: 3", "rows: [text]", "a: &x [*x]"])
def test_what_is_no_file_of_runs_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_runs(written(tmp_path, text))

    assert str(error.value).startswith("runs.yaml: ")
    assert "\n" not in str(error.value)


def test_a_row_to_fit_needs_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 'least': fit is true, but published has no time"):
        load_runs(written(tmp_path, LEAST + "    fit: true\n"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError) as caught:
        load_runs(tmp_path / "none.yaml")

    assert str(caught.value) == (
        f"runs '{tmp_path}/none.yaml': cannot be read (No such file or directory); name a readable "
        "YAML file"
    )


def test_a_file_that_is_no_mapping_is_told_how_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^runs.yaml: no mapping; write `cluster:` and `rows:`$"):
        load_runs(written(tmp_path, "- 1\n- 2\n"))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.yaml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match=r"runs.yaml: not UTF-8; save it as UTF-8"):
        load_runs(path)


def test_bundled_tables_name_their_source_and_a_bundled_cluster() -> None:
    for path in bundled_tables():
        found = load_runs(path)
        assert "20" in found.source
        load_cluster(found.cluster)
