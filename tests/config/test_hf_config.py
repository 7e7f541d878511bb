"""Models that a Hugging Face folder names: family and sizes, and what is refused by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import cases_in

from axsparse.config.hf_config import reject_other_heads
from axsparse.config.load import configure, to_yaml
from axsparse.config.model_config import GptConfig, HfConfig
from axsparse.config.validate import remarks
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError

LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
"""As Llama 2 7B has it, but for what says nothing of the model."""
MAMBA_2 = {
    "model_type": "mamba2",
    "layer_norm_epsilon": 1e-5,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}
"""As save_pretrained writes an infinite setting."""


@pytest.fixture(autouse=True)
def _transformers(transformers: Any) -> None:
    """Skips what needs transformers where it is not installed."""


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(settings: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


def model_from(folder: Path, *overrides: str) -> Any:
    return configure(None, [f"model.from={folder}", *overrides]).model


def refusal(folder: Path, *overrides: str, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as told:
        model_from(folder, *overrides)
    return str(told.value).replace(f"{folder}/", "")


LONG = {"max_position_embeddings": 10_485_760, "vocab_size": 202048}
"""As Llama 4 Scout has it."""


@pytest.mark.parametrize(
    ("theirs", "sizes"),
    [
        ({**LLAMA_2, "tokens_per_layer": 4096}, (4096, 32000)),
        ({"model_type": "llama4_text", **LONG}, (10_485_760, 202048)),
        ({"model_type": "llama4", "text_config": LONG}, (10_485_760, 202048)),
        ({"model_type": "gemma3n"}, (32768, 262400)),
    ],
    ids=str,
)
def test_settings_and_sizes_come_from_the_folder(
    folder: Any, theirs: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model = model_from(folder(theirs))

    assert isinstance(model, HfConfig)
    assert model.hf == theirs
    assert (model.sequence_length, model.vocab_size) == sizes


def test_settings_that_are_written_inline_have_their_sizes() -> None:
    inline = configure(None, ["model.name=hf", "model.hf={model_type: qwen3, vocab_size: 9}"])
    assert isinstance(inline.model, HfConfig)
    assert inline.model.hf == {"model_type": "qwen3", "vocab_size": 9}
    assert (inline.model.sequence_length, inline.model.vocab_size) == (32768, 9)


def test_a_gpt2_folder_is_a_gpt_without_dropout_unless_it_is_asked_for(folder: Any) -> None:
    path = folder({"model_type": "gpt2", "n_layer": 3, "resid_pdrop": 0.2})
    model = model_from(path)

    assert isinstance(model, GptConfig)
    assert (model.num_layers, model.hidden_size, model.sequence_length) == (3, 768, 1024)
    assert (model.vocab_size, model.dropout) == (50257, 0.0)
    said = "embd_pdrop 0.1, resid_pdrop 0.2, attn_pdrop 0.1, without which this model trains; "
    assert said in str([*remarks(configure(None, [f"model.from={path}"]), 9999)])
    for own in ("model.dropout=0.0", "model.name=hf"):
        assert [*remarks(configure(None, [f"model.from={path}", own]), 9999)] == []
    given = {"model": {"from": str(path), "dropout": 0.1}}
    assert [*remarks(configure(given), 9999)] == []
    theirs = model_from(path, "model.name=hf")
    assert isinstance(theirs, HfConfig)
    assert (theirs.sequence_length, theirs.vocab_size) == (1024, 50257)


@pytest.mark.parametrize("theirs", [LLAMA_2, MAMBA_2])
def test_what_a_run_writes_down_names_folder_and_sizes_and_is_read_again(
    folder: Any, tmp_path: Path, theirs: dict[str, Any]
) -> None:
    config = configure(None, [f"model.from={folder(theirs)}", "data.sequence_length=8"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    assert f"from: {tmp_path}\n" in to_yaml(config)
    assert ": 1.0e-05\n" in to_yaml(config)
    assert configure(str(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(("changed", "told"), cases_in(Path(__file__).parent / "hf_refusals.txt"))
def test_what_transformers_has_not_or_we_do_not_compute_is_refused_by_name(
    folder: Any, transformers: Any, changed: str, told: str
) -> None:
    settings = {**LLAMA_2, **json.loads(changed)}
    path = folder({key: value for key, value in settings.items() if value is not None})

    said = refusal(path, kind=DataError).replace(transformers.__version__, "VERSION")
    assert said.startswith(f"config.json: {told}")
    assert "newer transformers" not in said.removeprefix(f"config.json: {told}")


def test_attention_in_which_tokens_of_images_see_later_ones_is_taken(folder: Any) -> None:
    settings = {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    assert isinstance(model_from(folder(settings)), HfConfig)


def test_settings_of_a_file_may_be_nested(tmp_path: Path) -> None:
    text = "model:\n  name: hf\n  hf: {model_type: llama, layers: [{a: 1}, null], b: 1}\n"
    (tmp_path / "run.yaml").write_text(text)
    model = configure(str(tmp_path / "run.yaml")).model
    assert isinstance(model, HfConfig)
    assert model.hf == {"model_type": "llama", "layers": [{"a": 1}, None], "b": 1}


@pytest.mark.parametrize("version", ["4.57.1", "5.19.0", None])
def test_without_transformers_or_with_an_older_one_the_extra_is_named(
    version: str | None, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'axsparse[test]'")
    path, said, update = folder(LLAMA_2), f"and {version} is installed", " -U"
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        said, update = "which is not installed (.*)", ""
    else:
        monkeypatch.setattr(transformers, "__version__", version)

    told = refusal(path, kind=MissingInputError)

    way = rf"install it: pip install{update} 'axsparse\[hf\]'"
    assert re.fullmatch(rf"model\.hf: needs transformers 5\.20 or newer, {said}; {way}", told), told


@pytest.mark.parametrize("kind", ["gemma3", "gemma3_text"])
def test_the_text_model_of_one_that_takes_images_is_a_language_model(kind: str) -> None:
    architectures = ["Gemma3ForConditionalGeneration"]

    reject_other_heads(Path("config.json"), {"model_type": kind, "architectures": architectures})
