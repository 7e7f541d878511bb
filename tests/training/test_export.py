"""Checkpoints as weights for other libraries: the right bits, complete or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.allocated import peak_of
from support.hf import SMALL_LLAMA, config_from, saved_with_pictures, write_llama
from support.images import assert_equal_tensors, image_data, small_wide_resnet, write_safetensors
from support.preparing import MARKED, TURN, folder_of, template_of, write_jsonl
from support.preparing import run as prepare
from support.resuming import dense_state, ran
from support.runs import FEW_MICROBATCHES, mlp, tiny_config, tiny_gpt, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config, DataConfig
from axsparse.data.preparation import Request
from axsparse.data.tokenizers import STDLIB_SEPARATOR, byte_tokenizer, exported_tokenizer
from axsparse.models.layer import Model
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    DataError,
    MissingInputError,
    OutputError,
)
from axsparse.runtime.files.atomic import write_new
from axsparse.runtime.files.safetensors import SafetensorsFile
from axsparse.training import export as exporting
from axsparse.training.checkpoint.checkpoint_folder import manifest_bytes
from axsparse.training.checkpoint.verification import PIECE, Checkpoint, checkpoint_of
from axsparse.training.export import ExportSummary, Form, hf_files, with_card

STEPS = 3


def config_of(**sections: Any) -> Config:
    return tiny_config(**{"train": {"steps": STEPS}, "batch": FEW_MICROBATCHES, **sections})


def tensors_of(path: Path) -> dict[str, Tensor]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.shapes}


def export(checkpoint: Checkpoint, form: Form, path: Path, **how: Any) -> ExportSummary:
    return exporting.export(checkpoint.path, form, path, **how)


newest = partial(checkpoint_of, step=None)


# -- the bits -------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((1, 1), {}),
    "dense": ((1, 1), {"samo": {"enabled": False}}),
    "two heads": ((2, 1), {"model": {"tie_embeddings": False}, "samo": {"index": "mask"}}),
    "bf16": ((2, 2), {"precision": "bf16"}),
    "sharded": ((2, 2), {"precision": "fp16", "samo": {"zero_stage": 1}}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_masters_come_out_bit_by_bit_however_they_were_stored(case: str, tmp_path: Path) -> None:
    layout, sections = LAYOUTS[case]
    config, out = config_of(**sections), tmp_path / "out.safetensors"
    found = ran(layout, config, tmp_path / "run")

    done = export(newest(tmp_path / "run"), "torch", out)

    written = tensors_of(out)
    assert done.tensors == len(written)
    assert done.nbytes == sum(tensor.nbytes for tensor in written.values())
    assert_equal_tensors(written, dense_state(found, tiny_gpt(config)))


def half_frozen(config: Config) -> Model:
    def build(inner: Any) -> nn.Module:
        module: nn.Module = inner()
        module.get_parameter("0.weight").requires_grad_(False)
        return module

    layers = list(mlp().layers)
    layers[1] = replace(layers[1], build=partial(build, layers[1].build))
    return replace(mlp(), layers=layers)


def test_untrained_parameters_come_out_and_trained_ones_as_they_multiply(tmp_path: Path) -> None:
    frozen: dict[str, Tensor] = {}

    def look(trainer: Any) -> None:
        for layer in trainer.layers:
            if layer.spec.name == "hidden1":
                frozen["hidden1.0.weight"] = layer.module.get_parameter("0.weight").detach().clone()

    config = config_of(precision="bf16")
    how: dict[str, Any] = {"model": half_frozen, "data": vector_data()}
    found = ran((1, 1), config, tmp_path / "run", look=look, **how)

    out = tmp_path / "out.safetensors"
    for kind, dtype in (("master", torch.float32), ("weight", torch.bfloat16)):
        export(newest(tmp_path / "run"), "torch", out, trained=kind == "weight", force=True)

        written = tensors_of(out)
        expected = dense_state(found, half_frozen(config), kind)
        assert "hidden1.0.weight" not in expected
        expected["hidden1.0.weight"] = frozen["hidden1.0.weight"].to(dtype)
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        assert_equal_tensors(written, expected)


def test_a_type_by_name_is_that_of_parameters_and_buffers_of_floats(tmp_path: Path) -> None:
    data = image_data(33)
    ran((1, 1), config_of(), tmp_path / "run", model=lambda _: small_wide_resnet(), data=data)

    out = tmp_path / "out.safetensors"
    export(newest(tmp_path / "run"), "torch", out, dtype=lambda _: torch.bfloat16)

    types = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors_of(out).items()}
    assert types.pop("num_batches_tracked") == torch.int64
    assert "running_mean" in types and {*types.values()} == {torch.bfloat16}


def test_a_config_says_the_type_of_most_parameters(run: Path, tmp_path: Path) -> None:
    def dtype(name: str) -> torch.dtype:
        return torch.float32 if name == "embed.token.weight" else torch.bfloat16

    export(newest(run), "hf", tmp_path / "out", dtype=dtype)

    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# -- memory ---------------------------------------------------------------------------------


def test_no_more_than_a_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    config = config_of(pruning={"sparsity": 0.5, "include": "all"})
    data = vector_data(width=500)
    ran((1, 1), config, tmp_path / "run", model=lambda _: mlp(12, 500), data=data)
    largest = 4 * 510 * 511
    checkpoint = newest(tmp_path / "run")

    peak = peak_of(lambda: export(checkpoint, "torch", tmp_path / "out.safetensors", force=True))

    # Dense values, those that are kept, and the mask; all would be 11 tensors.
    assert largest < peak < 3 * largest + PIECE


# -- what is refused ------------------------------------------------------------------------


def rejected(
    kind: type[AxsparseError], checkpoint: Checkpoint, form: Form, path: Path, **how: Any
) -> str:
    """The message; nothing new lies about."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(kind) as caught:
        export(checkpoint, form, path, **how)
    assert sorted(path.parent.rglob("*")) == before
    return str(caught.value)


TAKEN = "is not what an export leaves, and stays; choose another place"


def test_a_file_that_goes_away_while_it_is_read_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_part(*_: object) -> Tensor:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(SafetensorsFile, "read_part", read_part)
    checkpoint = newest(run)

    assert rejected(MissingInputError, checkpoint, "torch", tmp_path / "out.safetensors") == (
        f"checkpoint {checkpoint.path}: 0000-embed.safetensors cannot be read (Stale file handle); "
        "take another one, or one that its run keeps"
    )


def test_a_configuration_of_another_version_is_told(run: Path, tmp_path: Path) -> None:
    folder, manifest = newest(run).path, newest(run).manifest
    other = manifest.model_copy(update={"config": {**manifest.config, "tomorrow": 1}})
    (folder / "manifest.json").write_bytes(manifest_bytes(other))

    assert rejected(DataError, newest(run), "hf", tmp_path / "out") == (
        f"checkpoint {folder}: 'tomorrow' of its configuration is none of this axsparse; use "
        "the version that wrote it"
    )
    export(newest(run), "torch", tmp_path / "out.safetensors")


# -- where it appears -----------------------------------------------------------------------


@pytest.mark.parametrize(("form", "name"), [("torch", "out.safetensors"), ("hf", "out")])
def test_only_force_replaces_an_export(form: Form, name: str, run: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    export(newest(run), form, path)
    file = path / "model.safetensors" if form == "hf" else path
    inode = file.stat().st_ino

    assert rejected(OutputError, newest(run), form, path) == (
        f"{path} is there already; choose another place, or give --force (in Python force=True) to "
        "replace it"
    )
    assert file.stat().st_ino == inode
    export(newest(run), form, path, force=True)
    assert file.stat().st_ino != inode
    assert sorted(one.name for one in tmp_path.iterdir()) == [name, "run"]


def test_weights_over_the_bound_of_a_file_go_out_in_several_beside_their_index(
    run: Path, transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, alone = tmp_path / "out", tmp_path / "alone"
    export(newest(run), "hf", alone)
    tensors = tensors_of(alone / "model.safetensors")
    sizes = sorted(tensor.nbytes for tensor in tensors.values())
    bound = sizes[-1] - 1
    monkeypatch.setattr(exporting, "FILE_BYTES", bound)

    export(newest(run), "hf", out)
    files = sorted(out.glob("model-*.safetensors"))

    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2 and [file.name for file in files] == names
    for file in files:
        held = tensors_of(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= bound
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert_equal_tensors({n: tensors_of(out / index["weight_map"][n])[n] for n in tensors}, tensors)
    whole, parted = map(transformers.AutoModelForCausalLM.from_pretrained, (alone, out))
    assert_equal_tensors(parted.state_dict(), whole.state_dict())
    # A part that is of another file makes the folder somebody's.
    (out / "model-00009.safetensors").touch()
    assert TAKEN in rejected(OutputError, newest(run), "hf", out, force=True)
    (out / "model-00009.safetensors").unlink()
    monkeypatch.undo()
    export(newest(run), "hf", out, force=True)
    assert sorted(one.name for one in out.iterdir()) == sorted(one.name for one in alone.iterdir())


def test_nothing_else_is_ever_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").touch()
    write_llama(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").touch()
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "real.safetensors").touch()
    (tmp_path / "link.safetensors").symlink_to("real.safetensors")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "exports").mkdir()
    export(newest(run), "torch", tmp_path / "exports" / "mine.safetensors")
    names = ("model", "theirs", "file", "dangling", "link", "exports")
    forms: dict[str, Form] = dict.fromkeys(names, "hf")

    for name in (*forms, "folder.safetensors", "link.safetensors"):
        form, path = forms.get(name, "torch"), tmp_path / name
        assert rejected(OutputError, newest(run), form, path, force=True) == f"{path} {TAKEN}"


def test_a_llama_goes_out_beside_the_files_that_its_folder_had(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the names of its body, and with the layers that transformers ignores."""
    start, out = tmp_path / "start", tmp_path / "out"
    weights = {name.removeprefix("model."): one for name, one in write_llama(start).items()}
    layers = SMALL_LLAMA["hf"]["num_hidden_layers"]
    for number in (layers, 92):
        weights[f"layers.{number}.eh_proj.weight"] = torch.ones(2, 3)
    write_safetensors(start / "model.safetensors", weights)
    ignored = "_keys_to_ignore_on_load_unexpected"
    monkeypatch.setattr(transformers.LlamaForCausalLM, ignored, [r"layers\.92.*"])
    more = {"torch_dtype": "float32", "num_nextn_predict_layers": 1}
    settings = {**SMALL_LLAMA["hf"], **more}
    (start / "config.json").write_text(json.dumps(settings))
    (start / "tokenizer.json").write_text("words")
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    for name in ("vocab.txt", "vocab.bin"):
        (start / name).write_text("words")
    (start / "modeling_own.py").write_text("raise SystemExit")
    (start / "LICENSE").write_text("copies have to carry it")
    (start / "README.md").write_text("---\nlicense: mit\n---\n![a](assets/a.png)\n")
    for folder in ("assets", "onnx", ".git", "checkpoint-5/global_step5"):
        (start / folder).mkdir(parents=True)
    (start / "assets" / "a.png").symlink_to(start / "LICENSE")
    (start / ".gitattributes").write_text("*.bin lfs")
    left = ("onnx/model.onnx", "onnx/config.json", ".git/HEAD", "checkpoint-5/trainer_state.json")
    (start / "checkpoint-5" / "global_step5" / "deep.txt").symlink_to(start / "LICENSE")
    (start / "onnx" / "again").symlink_to(start, target_is_directory=True)
    others = ("flax_model.msgpack", "mm_projector.bin", "model.safetensors.index.json")
    states = "checkpoint-5/global_step5/mp_rank_00_model_states.pt"
    shard = "checkpoint-5/__0_0.distcp"  # of torch.distributed.checkpoint
    for name in (*left, *others, shard, "pytorch_model-00001-of-00002.bin", states):
        (start / name).write_text("{}")
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]  # sentence-transformers'
    (start / "modules.json").write_text(json.dumps(modules))
    (start / "2_Dense").mkdir()
    (start / "2_Dense" / "model.safetensors").write_text("of the module")
    config = config_of(
        model={**SMALL_LLAMA, "hf": settings, "from": str(start)},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
        pruning={"sparsity": 0.0},
    )
    ran((2, 1), config, tmp_path / "run", model=lambda c: named_model(c))

    assert export(newest(tmp_path / "run"), "hf", out).notes == []

    def written() -> list[str]:
        return sorted(path.name for path in out.iterdir())

    templates = "additional_chat_templates"
    assert written() == [
        *(".gitattributes", "2_Dense", "LICENSE", "README.md", templates, "assets"),
        *("checkpoint-5", "config.json", "model.safetensors", "modeling_own.py", "modules.json"),
        *("onnx", "tokenizer.json", "vocab.bin", "vocab.txt"),
    ]
    below = {path.name for path in (*out.glob("checkpoint-5/**/*"), *out.glob("onnx/**/*"))}
    assert below == {"config.json", "deep.txt", "global_step5", "trainer_state.json"}
    assert (out / "2_Dense" / "model.safetensors").read_text() == "of the module"
    assert (out / templates / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (out / "assets" / "a.png").read_text() == "copies have to carry it"
    assert not (out / "assets" / "a.png").is_symlink()
    assert (out / "README.md").read_text() == (
        "---\nlicense: mit\n---\n# out\n\nstart, trained by axsparse for 3 steps.\n"
        "\n![a](assets/a.png)\n"
    )
    assert json.loads((out / "config.json").read_text()) == settings
    assert_equal_tensors(tensors_of(out / "model.safetensors"), weights)
    # What somebody has put there is kept.
    (out / "assets" / "mine.txt").touch()
    assert TAKEN in rejected(OutputError, newest(tmp_path / "run"), "hf", out, force=True)
    (out / "assets" / "mine.txt").unlink()
    # A later export replaces it, also where the folder is gone, which is told.
    shutil.rmtree(start)
    [note] = export(newest(tmp_path / "run"), "hf", out, force=True).notes
    assert note.startswith(f"model.from {start} is gone: its other files, such as its token")
    assert written() == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == 1
    # The tokenizer of the data has ends of its own, which do not replace the model's.
    files, notes = hf_files(config.model, torch.float32, byte_tokenizer(STDLIB_SEPARATOR))
    assert notes == [note] and "tokenizer.json" in files
    for name in ("config.json", "generation_config.json"):
        read = json.loads(cast(bytes, files[name]))
        assert read["bos_token_id"] == 1, name


@pytest.mark.parametrize("both", [True, False])
def test_a_tied_weight_goes_out_under_the_names_of_its_file(
    transformers: Any, tmp_path: Path, *, both: bool
) -> None:
    del transformers
    start, out = tmp_path / "start", tmp_path / "out"
    weights = write_llama(start)
    tied = weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if not both:
        del weights["model.embed_tokens.weight"]
    write_safetensors(start / "model.safetensors", weights)
    settings = {**SMALL_LLAMA["hf"], "tie_word_embeddings": True, "dtype": "float16"}
    (start / "config.json").write_text(json.dumps(settings))
    config = config_of(model={**SMALL_LLAMA, "hf": settings, "from": str(start)})
    ran((1, 1), config, tmp_path / "run", model=lambda c: named_model(c))

    export(newest(tmp_path / "run"), "hf", out)

    written = tensors_of(out / "model.safetensors")
    assert written.keys() == weights.keys()
    trained = written["lm_head.weight"]
    assert torch.equal(written.get("model.embed_tokens.weight", trained), trained)
    assert not torch.equal(tied, trained)
    assert json.loads((out / "config.json").read_text()) == settings  # as its folder had it


def test_a_config_of_pictures_and_text_says_the_type_that_is_written(
    transformers: Any, tmp_path: Path
) -> None:
    saved_with_pictures(transformers, "gemma3", tmp_path)
    config = config_from(tmp_path).model
    own = (tmp_path / "config.json").read_bytes()

    files = [hf_files(config, dtype, None)[0] for dtype in (torch.float32, torch.bfloat16)]

    assert files[1]["config.json"] == own
    text = files[0]["config.json"]
    assert isinstance(text, bytes)
    said = json.loads(text)
    assert (said["dtype"], said["text_config"]["dtype"]) == ("float32", "float32")


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
NAMED = [{"name": "default", "template": template_of(TURN)}, {"name": "rag", "template": "{{ 1 }}"}]


@pytest.mark.parametrize("base", [None, "bare", "other", "same"])
@pytest.mark.parametrize("template", [template_of(TURN), template_of(MARKED), NAMED])
def test_the_template_that_chats_were_learnt_by_goes_out_and_their_end_ends_a_text(
    base: str | None, template: Any, transformers: Any, tmp_path: Path
) -> None:
    """Without a folder that the model begins at, with one without chats, with others, and its
    own."""
    chats = folder_of("plain", tmp_path, chat_template=template)
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": SAID}])
    sidecar, _ = prepare(Request((source,), tmp_path / "tokens", tokenizer=chats))
    data = DataConfig(source="tokens", path=str(tmp_path / "tokens"))
    settings = {**SMALL_LLAMA, "hf": {**SMALL_LLAMA["hf"], "eos_token_id": 0}}
    if base is not None:
        start = tmp_path / "start"
        write_llama(start)
        (start / "config.json").write_text(json.dumps(settings["hf"]))
        kind = {"bare": "none", "other": "refuses"}.get(base)
        folder = chats if kind is None else folder_of(kind, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, start)
        settings["from"] = str(start)
        if base == "same":
            (start / "generation_config.json").write_text('{"eos_token_id": [0, 257], "top_k": 3}')

    made = exported_tokenizer(data, "tokens", sidecar.train.digest)
    files, _ = hf_files(config_of(model=settings).model, torch.float32, made)

    out = tmp_path / "out"
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_new(out / name, content)
    theirs, ours = map(transformers.AutoTokenizer.from_pretrained, (str(chats), str(out)))
    assert ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(SAID) == theirs.apply_chat_template(SAID)
    ends = transformers.GenerationConfig.from_pretrained(str(out))
    assert ends.eos_token_id == [0, 257]
    assert ends.bos_token_id == (None if base == "same" else 0 if base is None else 1)
    if base == "same" and isinstance(template, str):
        assert files["generation_config.json"] == tmp_path / "start" / "generation_config.json"
        assert "chat_template.jinja" not in files


def test_a_folder_that_has_changed_since_is_told(tmp_path: Path) -> None:
    write_llama(tmp_path / "start")
    config = config_of(model={**SMALL_LLAMA, "from": f"{tmp_path}/start"})
    ran((1, 1), config, tmp_path / "run", model=lambda c: named_model(c))
    settings = tmp_path / "start" / "config.json"
    changed = json.loads(settings.read_text()) | {"rms_norm_eps": 0.5}
    settings.write_text(json.dumps(changed))

    assert rejected(ConfigError, newest(tmp_path / "run"), "hf", tmp_path / "out") == (
        f"{settings}: the checkpoint is not of model.hf.rms_norm_eps 1e-05; set "
        "model.hf.rms_norm_eps to 0.5"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("card", "page"),
    [
        ("---\nlicense: mit\n---\n# A\n", "---\nlicense: mit\n---\nMADE\n# A\n"),
        ("---\nlicense: mit\n---", "---\nlicense: mit\n---\nMADE\n"),
        ("\n---\nlicense: mit\n---\n\n# A\n", "---\nlicense: mit\n---\nMADE\n\n# A\n"),
        ("# A\n---\nb\n---\n", "MADE\n# A\n---\nb\n---\n"),
    ],
)
def test_a_card_begins_by_the_facts_that_the_folders_begins_by(
    card: str, page: str, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(card)

    assert with_card("MADE", tmp_path) == page
