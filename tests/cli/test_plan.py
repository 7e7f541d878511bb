"""The command: what it prints and writes, and its one-line errors."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import Axsparse, assert_one_line
from support.runs import of_family

from axsparse.config.load import configure, packaged_folder
from axsparse.config.model_config import HfConfig
from axsparse.planner.cluster import load_cluster
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_MISSING

SMALL = [
    *("--config", "quickstart.yaml", "--cluster", "laptop"),
    *("--set", "model.hidden_size=64", "--set", "model.num_layers=2"),
    *("--set", "layout.g_inter=auto"),
]


@pytest.fixture
def plan(axsparse: Axsparse) -> Axsparse:
    """`plan("--gpus", "4")`: exit code, screen and errors of a small model's plan."""
    return lambda *words: axsparse("plan", *SMALL, *words)


def test_it_prints_the_answer_then_a_recommendation_and_why(plan: Axsparse) -> None:
    code, screen, _ = plan("--gpus", "4", "--memory", "2")

    assert code == 0
    assert screen.splitlines()[:2] == ["fits: 1 stage × 4 replicas, 0.4 of 2 GB", ""]
    assert "quickstart (samo) in fp32 on 4 devices of laptop, 2.0 GB each" in screen
    assert "recommended: 1 stage × 4 replicas" in screen
    assert "because the fewest stages fit: 0.4 GB of 2.0 GB" in screen


def test_members_on_gpus_have_a_note(axsparse: Axsparse) -> None:
    words = [*SMALL, "--gpus", "6", "--set", "layout.g_tensor=2"]
    words[words.index("laptop")] = "summit"
    screen = axsparse("plan", *words)[1]

    assert (
        "note: no two GPUs have trained with several tensor-parallel ranks of a stage so far: "
        in screen
    )


def test_a_cluster_file_to_begin_with_is_printed(axsparse: Axsparse, tmp_path: Path) -> None:
    code, screen, _ = axsparse("plan", "--print-cluster", "a100-pod")
    mine = tmp_path / "mine.yaml"
    mine.write_text(screen)

    assert code == 0
    assert load_cluster(str(mine)) == replace(load_cluster("a100-pod"), name="mine")


def test_where_nothing_fits_it_says_what_would(plan: Axsparse) -> None:
    asked = ("--set", "samo.enabled=false")
    code, screen, errors = plan("--gpus", "2", "--memory", "0.402", *asked, "--json")
    told = json.loads(screen)["refusals"][0]
    memory, fewest = told["least_bytes"] / 1e9, told["fewest_devices"]

    assert (code, errors, json.loads(screen)["plans"]) == (EXIT_CONFIG, "", [])
    assert told["answer"] == (
        f"does not fit: 2 devices would do with {memory:.4g} GB, {fewest} with 0.402, "
        "recomputing activations"
    )
    said = plan("--gpus", "2", "--memory", "0.402", *asked)[1].splitlines()
    assert said[0] == told["answer"]
    assert "rejected, with the work of the stages balanced:" in said


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder of nothing but the config.json of `llama3_8b.yaml`, of two blocks."""
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    folder = tmp_path / "my_llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**llama_settings(), "num_hidden_layers": 2}))
    return folder


def llama_settings() -> dict[str, Any]:
    return of_family(configure("llama3_8b.yaml").model, HfConfig).hf


def test_a_folder_is_planned_like_the_bundled_configuration_of_its_model(
    axsparse: Axsparse, llama: Path
) -> None:
    """Two blocks, whose settings replace the bundled file's."""
    small = json.dumps({**llama_settings(), "num_hidden_layers": 2})
    bundled = (packaged_folder("configs") / "llama3_8b.yaml").read_text()
    rewritten = llama.parent / "llama.yaml"
    rewritten.write_text(re.sub(r"  hf: \{.*\}\n", f"  hf: {small}\n", bundled, count=1))
    asked = ("--gpus", "4", "--memory", "24", "--json")

    by_folder, by_file, by_json = (
        json.loads(axsparse("plan", named, *asked)[1])
        for named in (llama, rewritten, llama / "config.json")
    )

    assert by_folder == by_json
    [mine], [theirs] = by_folder["plans"], by_file["plans"]
    assert (mine.pop("model"), theirs.pop("model")) == ("my_llama", "llama")
    assert mine == theirs
    notes = "\n".join(by_folder["notes"])
    assert "in samples of 4096 tokens; to train it, add --config prune_llama.yaml " in notes
    assert f"--set model.from={llama} --set data.sequence_length=4096" in notes
    assert "no batch is given: planned with 128 samples a step" in notes


def test_a_folder_is_planned_by_the_bundled_file_also_next_to_one_of_its_name(
    axsparse: Axsparse, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--gpus", "4", "--memory", "24", "--json")
    usual = json.loads(axsparse("plan", llama, *asked)[1])
    (tmp_path / "my model").symlink_to(llama)
    noted = json.loads(axsparse("plan", tmp_path / "my model", *asked)[1])["notes"]
    assert f"--set 'model.from={tmp_path}/my model'" in "\n".join(noted)
    monkeypatch.chdir(tmp_path)
    Path("prune_llama.yaml").write_text("model: {name: hf}\nbatch: {global_batch_size: 8}\n")

    hidden = json.loads(axsparse("plan", llama, *asked)[1])

    assert hidden["plans"] == usual["plans"]
    bundled = packaged_folder("configs") / "prune_llama.yaml"
    assert f"--config {bundled} --set" in "\n".join(hidden["notes"])


def test_short_forms_are_settings_and_many_devices_have_a_sample_each(
    axsparse: Axsparse, llama: Path
) -> None:
    asked = ("--gpus", "160", "--memory", "24", "--json")
    short = axsparse("plan", llama, *asked, "--sparsity", "0.9", "--sequence-length", "256")[1]
    sets = ("--set=pruning.sparsity=0.9", "--set=data.sequence_length=256")
    long = axsparse("plan", llama, *asked, *sets)[1]

    [told] = json.loads(short)["plans"]
    assert told == json.loads(long)["plans"][0]
    assert told["memory_bytes"] == 24e9
    assert told["taken"] == {"batch.global_batch_size": 160}
    assert "planned with 160 samples a step" in short


def test_a_gpt2_folder_needs_no_transformers_and_others_say_that_they_do(
    axsparse: Axsparse, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    settings = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    (gpt2 / "config.json").write_text(json.dumps(settings))

    assert axsparse("plan", gpt2, "--gpus", "2", "--memory", "4")[1].startswith("fits: 1 stage ")
    assert_one_line(
        axsparse("plan", llama, "--gpus", "2"),
        EXIT_MISSING,
        "model.hf: needs transformers 5.20 or newer, which is not installed",
    )


def test_in_a_study_what_does_not_fit_is_said_above_what_does(plan: Axsparse) -> None:
    dense = ("--set=samo.enabled=false", "--set=pipeline.extra_in_flight=1", "--microbatch-size=1")
    code, screen, errors = plan("--gpus", "1,4", *dense, "--memory", "0.4026")
    nothing, rejected, _ = plan("--gpus", "1,2", "--memory", "0.4001")

    assert (code, nothing, errors) == (0, EXIT_CONFIG, "")
    first, head, _, *rows = screen.splitlines()
    assert first.startswith("1 device, dense: does not fit: 1 device would do with 0.41 GB, ")
    assert head == "quickstart in fp32 on laptop"
    assert [row.split()[1] for row in rows[:2]] == ["devices", "4"]
    assert [line.split(":")[0] for line in rejected.splitlines()[:2]] == [
        *("1 device, samo", "2 devices, samo")
    ]
