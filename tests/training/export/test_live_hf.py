"""A trained GPT as a folder of Hugging Face's: whole or not at all, from every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.images import assert_equal_tensors
from support.runs import mlp, tiny_config, tiny_gpt, token_data, train_in_process, vector_data
from support.saved import train_and_save
from torch import Tensor

from axsparse.config.model_config import GptConfig, LlamaConfig, of_family
from axsparse.config.schema import Config
from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.hf_gpt2 import gpt2_name, start_from_gpt2
from axsparse.runtime.errors import ConfigError, OutputError
from axsparse.runtime.files.safetensors import TensorHeader, write_safetensors
from axsparse.training.export import hf_folder
from axsparse.training.export.live_hf import save_hf_gpt2

LAYOUTS = [(1, 1, False), (2, 1, False), (4, 1, False), (2, 2, True)]


def config(*, shard: bool = False, **sections: Any) -> Config:
    defaults = {
        "batch": {"global_batch_size": 4, "microbatch_size": 2},
        "train": {"steps": 2},
        "precision": "bf16",
        "samo": {"shard_optimizer": shard},
    }
    return tiny_config(**{**defaults, **sections})


def files_of(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def saved_tensors(path: Path, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a folder holds, under our names and in our shapes."""
    file = open_weights(path)
    assert set(file.shapes) == {gpt2_name(name) for name in names}
    found = {name: file.read(gpt2_name(name)) for name in names}
    return {
        name: t.t() if name.startswith("block") and t.dim() == 2 else t for name, t in found.items()
    }


@pytest.mark.parametrize(("g_inter", "g_data", "shard"), LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_masters_of_every_layout_are_saved(
    g_inter: int, g_data: int, shard: bool, tied: bool, tmp_path: Path
) -> None:
    settings = config(shard=shard)
    model = settings.model.model_copy(update={"tie_embeddings": tied})
    settings = settings.model_copy(update={"model": model})
    path = tmp_path / "new" / "folder" / "gpt2"

    masters = train_and_save(g_inter, g_data, tiny_gpt(settings), settings, path)

    assert_equal_tensors(saved_tensors(path, masters), masters)
    assert ("head.weight" in masters) is not tied
    zeros = (masters["block0.fc1.weight"] == 0).sum().item()
    assert zeros == round(0.8 * masters["block0.fc1.weight"].numel())
    assert open_weights(path).read("transformer.wte.weight").dtype == torch.float32
    assert files_of(path.parent) == ["gpt2"]


def test_a_stage_has_a_file_and_an_index_says_what_is_where(tmp_path: Path) -> None:
    settings = config()
    train_and_save(1, 1, tiny_gpt(settings), settings, tmp_path / "one")
    masters = train_and_save(2, 1, tiny_gpt(settings), settings, tmp_path / "two")

    assert files_of(tmp_path / "one") == ["config.json", "model.safetensors"]
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    index = "model.safetensors.index.json"
    assert files_of(tmp_path / "two") == ["config.json", first, second, index]
    written = json.loads((tmp_path / "two" / index).read_text())
    assert written["weight_map"]["transformer.wte.weight"] == first
    assert written["weight_map"]["transformer.ln_f.bias"] == second
    total = sum(tensor.numel() for tensor in masters.values()) * 4
    assert written["metadata"] == {"total_size": total}


def test_the_weights_of_the_training_precision_can_be_saved_instead(tmp_path: Path) -> None:
    settings = config()

    masters = train_and_save(2, 1, tiny_gpt(settings), settings, tmp_path / "x", masters=False)

    rounded = {name: master.bfloat16() for name, master in masters.items()}
    assert any(not torch.equal(rounded[name].float(), masters[name]) for name in masters)
    found = saved_tensors(tmp_path / "x", masters)
    assert_equal_tensors(found, rounded)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_that_do_not_train_are_saved_as_they_are(tmp_path: Path) -> None:
    settings = config()
    model = tiny_gpt(settings)
    block = model.layers[1]

    def frozen() -> torch.nn.Module:
        module = block.build()
        module.get_parameter("fc1.weight").requires_grad_(False)
        return module

    layers = [*model.layers]
    layers[1] = type(block)(block.name, frozen, init=block.init)
    train_and_save(1, 1, type(model)(layers, model.loss, model.ties), settings, tmp_path / "x")

    trained = train_and_save(1, 1, model, settings, tmp_path / "y")
    saved = open_weights(tmp_path / "x").read("transformer.h.0.mlp.c_fc.weight")
    assert saved.dtype == torch.float32
    assert saved.shape == trained["block0.fc1.weight"].t().shape
    assert (saved != 0).all()
    assert torch.equal(saved, saved.bfloat16().float())


@pytest.mark.parametrize("sparsity", [0.0, 0.8])
@pytest.mark.parametrize("g_inter", [1, 2])
def test_a_run_starts_where_another_was_saved(
    g_inter: int, sparsity: float, tmp_path: Path
) -> None:
    settings = config(pruning={"sparsity": sparsity})
    masters = train_and_save(g_inter, 1, tiny_gpt(settings), settings, tmp_path / "x")
    model = start_from_gpt2(
        tiny_gpt(settings), open_weights(tmp_path / "x"), of_family(settings.model, GptConfig)
    )
    still = config(
        pruning={"sparsity": sparsity}, optimizer={"learning_rate": 1e-30, "weight_decay": 0.0}
    )

    again = train_and_save(3 - g_inter, 1, model, still, tmp_path / "y")

    assert_equal_tensors(again, masters)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_is_there_is_not_written_over(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.touch()
    elif what == "link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
        (path / "precious").touch()

    with pytest.raises(OutputError) as told:
        train_and_save(2, 1, tiny_gpt(config()), config(), path)

    assert str(told.value) == (
        f"save_hf: {path} holds something already; choose another folder, or move it away"
    )
    assert files_of(tmp_path) == ["x"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()

    train_and_save(1, 1, tiny_gpt(config()), config(), tmp_path / "x")

    assert files_of(tmp_path / "x") == ["config.json", "model.safetensors"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "x"

    with pytest.raises(
        OutputError,
        match=rf"^save_hf: {path}: cannot be written \(.*\); choose another folder$",
    ):
        train_and_save(1, 1, tiny_gpt(config()), config(), path)


@pytest.mark.parametrize("place", ["stage", "index"])
def test_nothing_is_left_of_what_could_not_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(
        path: Path, described: Mapping[str, TensorHeader], tensors: Iterator[Tensor], *rest: Any
    ) -> None:
        if path.name.startswith("model-00001"):
            write_safetensors(path, described, tensors, *rest)
        else:
            next(tensors)
            no_space()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if place == "stage":
        monkeypatch.setattr(hf_folder, "write_safetensors", fills_up)
    else:
        monkeypatch.setattr(hf_folder, "write_new", no_space)
    settings = config(shard=True)

    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        train_and_save(2, 2, tiny_gpt(settings), settings, tmp_path / "x")

    assert files_of(tmp_path) == []


def test_hosts_that_do_not_share_the_folder_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(path: Path, *rest: Any) -> None:
        if not path.name.startswith("model-00002"):
            write_safetensors(path, *rest)

    monkeypatch.setattr(hf_folder, "write_safetensors", elsewhere)

    with pytest.raises(
        OutputError,
        match=rf"^save_hf: {tmp_path}/x: rank 0 does not see what stage 1 wrote; choose a "
        "folder that all hosts share$",
    ):
        train_and_save(2, 1, tiny_gpt(config()), config(), tmp_path / "x")

    assert files_of(tmp_path) == []


def test_models_of_ones_own_are_refused(tmp_path: Path) -> None:
    [(trainer, _)] = train_in_process(1, 1, mlp(), config(), vector_data())
    with pytest.raises(
        ConfigError,
        match=r"^save_hf: the model is not the gpt that the configuration describes, or "
        r"transformers has none; save what was trained as model.name gpt or llama$",
    ):
        save_hf_gpt2(trainer, tmp_path / "x")
    tied = tiny_gpt(config())
    loose = type(tied)(tied.layers, tied.loss)
    [(trainer, _)] = train_in_process(1, 1, loose, config(), token_data())
    with pytest.raises(ConfigError, match=r"^save_hf: the model is not the gpt"):
        save_hf_gpt2(trainer, tmp_path / "x")
    assert files_of(tmp_path) == []


def test_the_older_name_is_for_gpts_alone(tmp_path: Path) -> None:
    llama = config().model_copy(update={"model": LlamaConfig()})
    [(trainer, _)] = train_in_process(1, 1, mlp(), llama, vector_data())

    with pytest.raises(
        ConfigError, match=r"^save_hf_gpt2: the model is a llama, not a gpt; call save_hf$"
    ):
        save_hf_gpt2(trainer, tmp_path / "x")
