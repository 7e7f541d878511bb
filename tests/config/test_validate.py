"""Rules between fields: which layouts and batches fit, and what is told where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.config.load import load_config
from axsparse.config.validate import (
    check_batch,
    check_config,
    check_data,
    check_gpu_settings,
    check_rounds,
)
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.grid import Grid


def _config_refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, overrides))
    return str(caught.value)


def _batch_refusal(grid: Grid, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_batch(load_config(None, overrides), grid)
    return str(caught.value)


def test_the_end_of_a_search_says_where_it_comes_from() -> None:
    search = ("pruning.method=early-bird", "pruning.interval=4", "train.steps=24")
    asked = load_config(None, search)
    settled = load_config(None, (*search, "pruning.until_step=12")).config

    with pytest.raises(
        ConfigError, match=r"end at 20, after pruning.until_step 12 \(auto, by train.steps 24\); "
    ):
        check_rounds(asked, settled)


# --- check_config ------------------------------------------------------------------------


def test_a_fused_backward_cannot_be_split() -> None:
    refusal = _config_refusal("pipeline.split_backward=true", "pipeline.compile=true")

    assert refusal == (
        "pipeline.split_backward (--set): true, but pipeline.compile fuses each layer's backward "
        "into one; choose auto, which leaves it whole, or set pipeline.compile to false"
    )
    check_config(load_config(None, ("pipeline.split_backward=auto", "pipeline.compile=true")))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.sequence_length=128",),
        ("schedule.warmup_steps=100",),
        ("schedule.warmup_steps=100", "train.steps=5"),
        ("schedule.warmup_steps=300", "schedule.decay_steps=300"),
        ("pruning.at_step=99",),
        ("pruning.at_step=100", "pruning.sparsity=0"),
        ("pruning.at_step=100", "samo.enabled=false"),
        ("layout.split=[4, 4]", "layout.g_inter=2"),
        ("layout.split=[4, 4]",),
        ("optimizer.betas=[0.95, 0.9]",),
        ("model.name=cnn", "model.channels=1", "data.source=digits"),
        ("model.name=cnn", "data.source=images", "data.path=x"),
        ("model.name=vgg19", "data.source=images", "data.path=x"),
    ],
)
def test_consistent_settings_pass(overrides: tuple[str, ...]) -> None:
    check_config(load_config(None, overrides))


def test_images_lie_somewhere() -> None:
    assert _config_refusal("model.name=vgg19", "data.source=images") == (
        "data.path (default): data.source images needs the folder that holds train/<class>/ and "
        "val/<class>/; set data.path"
    )


@pytest.mark.parametrize(
    ("model", "source", "wanted"),
    [("gpt", "digits", "stdlib or tokens"), ("cnn", "stdlib", "digits or images")],
)
def test_a_model_reads_data_of_its_kind(model: str, source: str, wanted: str) -> None:
    assert _config_refusal(f"model.name={model}", f"data.source={source}") == (
        f"data.source (--set): {source} is nothing that model.name {model} can read; "
        f"choose {wanted}, or another model"
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("model.name=cnn", "data.source=digits"),
            "digits have 1 channels, model.name cnn takes 3; choose data.source images, "
            "or model.name cnn with model.channels 1",
        ),
        (
            ("model.name=cnn", "model.channels=1", "data.source=images", "data.path=x"),
            "images have 3 channels, model.name cnn takes 1; choose data.source digits, "
            "or model.name cnn with model.channels 3",
        ),
        (
            ("model.name=vgg19", "data.source=digits"),
            "digits have 1 channels, model.name vgg19 takes 3; choose data.source images, "
            "or model.name cnn with model.channels 1",
        ),
    ],
)
def test_images_have_as_many_channels_as_the_model_takes(
    overrides: tuple[str, ...], text: str
) -> None:
    assert _config_refusal(*overrides) == f"data.source (--set): {text}"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("model.name=vgg19", "model.num_heads=4"),
            "model.num_heads (--set): unknown key for model.name vgg19, which has name, weights, "
            "from, new, num_classes, dropout; it is for model.name gpt and llama: remove it, or "
            "choose another model.name",
        ),
        (
            ("model.num_classes=10",),
            "model.num_classes (--set): unknown key for model.name gpt, which has name, weights, "
            "from, new, num_layers, hidden_size, num_heads, sequence_length, vocab_size, "
            "tie_embeddings, dropout; it is for model.name vgg19 and wide_resnet101_2 and cnn: "
            "remove it, or choose another model.name",
        ),
        (
            ("model.name=wide_resnet101_2", "model.dropout=0.1"),
            "model.dropout (--set): unknown key for model.name wide_resnet101_2, which has name, "
            "weights, from, new, num_classes; it is for model.name gpt and vgg19: remove it, or "
            "choose another model.name",
        ),
    ],
)
def test_fields_that_the_named_model_does_not_have_are_refused(
    overrides: tuple[str, ...], text: str
) -> None:
    assert _config_refusal(*overrides) == text


def test_a_model_is_written_without_the_fields_of_others() -> None:
    config = load_config(None, ["model.name=cnn", "model.channels=1"]).config

    assert config.model_dump()["model"] == {
        "name": "cnn",
        "weights": None,
        "from": None,
        "new": (),
        "num_classes": 1000,
        "channels": 1,
    }


def test_heads_must_divide_the_width() -> None:
    assert _config_refusal("model.num_heads=25", "model.hidden_size=96") == (
        "model.num_heads (--set): 25 does not divide model.hidden_size 96; "
        "choose one of 3, 4, 6, 8, 12, 16, 24, 32"
    )


def test_samples_are_at_most_as_long_as_the_model_takes() -> None:
    assert _config_refusal("data.sequence_length=129") == (
        "data.sequence_length (--set): 129 is above model.sequence_length 128; "
        "choose at most 128, or auto"
    )


def test_only_llamas_separate_documents() -> None:
    assert _config_refusal("data.separate_documents=true") == (
        "data.separate_documents (--set): true, but tokens of model.name gpt see all tokens before "
        "them; choose false, or model.name llama"
    )
    check_config(load_config(None, ["data.separate_documents=true", "model.name=llama"]))


def test_the_warm_up_ends_before_the_decay() -> None:
    assert _config_refusal("schedule.warmup_steps=51", "schedule.decay_steps=50") == (
        "schedule.warmup_steps (--set): 51 is above schedule.decay_steps 50; choose at most 50"
    )


def test_the_loss_scale_begins_at_its_floor_or_above() -> None:
    assert _config_refusal("loss_scale.initial=1024", "loss_scale.floor=4096") == (
        "loss_scale.initial (--set): 1024 is below loss_scale.floor 4096, so that an overflow "
        "would raise it; choose at least 4096"
    )


def test_pruning_happens_within_the_run() -> None:
    assert _config_refusal("pruning.at_step=100") == (
        "pruning.at_step (--set): 100 is not below train.steps 100; choose at most 99"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("pruning.method=gradual", "pruning.at_step=20", "pruning.until_step=20"),
            "pruning.until_step (--set): 20 is not between pruning.at_step 20 and train.steps "
            "100; choose one in between, or auto",
        ),
        (
            ("pruning.until_step=100",),
            "pruning.until_step (--set): 100 is not between pruning.at_step 0 and train.steps "
            "100; choose one in between, or auto",
        ),
        (
            ("pruning.method=gradual", "pruning.pattern=2:4"),
            "pruning.pattern (--set): 2:4 is drawn once, and pruning.method gradual draws again; "
            "choose one of magnitude, random, custom, zeros, wanda, sparsegpt, snip",
        ),
        (
            ("pruning.pattern=2:4", "pruning.layers=[block0.*=0.5]"),
            "pruning.layers (--set): sparsities of their own, but a pattern keeps as much "
            "everywhere; leave one of them out, or use pruning.exclude",
        ),
        (
            ("pruning.pattern=2:4", "pruning.distribution=erk"),
            "pruning.distribution (--set): erk, but a pattern keeps as much everywhere; choose "
            "uniform, or leave pruning.pattern out",
        ),
        (
            ("pruning.method=rigl", "pruning.at_step=5"),
            "pruning.at_step (--set): 5, but pruning.method rigl starts from a sparse network; "
            "choose 0",
        ),
        (
            ("pruning.method=set", "pruning.rewarm_steps=5"),
            "pruning.rewarm_steps (--set): 5, but pruning.method set changes the mask all the "
            "time; choose 0",
        ),
        (
            ("pruning.method=zeros", "pruning.at_step=3"),
            "pruning.at_step (--set): 3, but pruning.method zeros draws its masks tensor by tensor "
            "before the first step; choose 0",
        ),
        (
            ("pruning.method=zeros", "pruning.distribution=erk"),
            "pruning.distribution (--set): erk, but pruning.method zeros draws its masks tensor by "
            "tensor before the first step; choose uniform",
        ),
        (
            ("pruning.method=gradual", "pruning.rewind_step=0"),
            "pruning.rewind_step (--set): 0, but pruning.method gradual goes on with the weights "
            "it has; choose never",
        ),
        (
            ("pruning.at_step=5", "pruning.rewind_step=6"),
            "pruning.rewind_step (--set): 6 is above pruning.at_step 5, the first pruning; choose "
            "at most that",
        ),
    ],
)
def test_pruning_settings_that_contradict_each_other_are_refused(
    overrides: tuple[str, ...], said: str
) -> None:
    assert _config_refusal(*overrides) == said


def test_nesterov_needs_momentum() -> None:
    check_config(load_config(None, ("optimizer.nesterov=true",)))
    assert _config_refusal("optimizer.nesterov=true", "optimizer.momentum=0") == (
        "optimizer.nesterov (--set): true with optimizer.momentum 0, which has nothing to look "
        "ahead by; set optimizer.momentum above 0, 0.9 say, or this to false"
    )


@pytest.mark.parametrize("key", ["train.nvtx", "train.memory_history"])
def test_what_looks_into_a_gpu_needs_one(key: str) -> None:
    loaded = load_config(None, [f"{key}=true"])
    check_gpu_settings(loaded, has_gpu=True)
    check_gpu_settings(load_config(None), has_gpu=False)

    with pytest.raises(ConfigError) as caught:
        check_gpu_settings(loaded, has_gpu=False)

    assert str(caught.value) == (
        f"{key} (--set): true looks into a GPU, and the ranks train without one; choose false"
    )


def test_state_is_offloaded_from_gpus_only() -> None:
    loaded = load_config(None, ["samo.offload=true"])
    check_gpu_settings(loaded, has_gpu=True)

    with pytest.raises(ConfigError) as caught:
        check_gpu_settings(loaded, has_gpu=False)

    assert str(caught.value) == (
        "samo.offload (--set): true takes state off a GPU, and there is none; choose false"
    )


def test_a_split_has_one_entry_a_stage() -> None:
    assert _config_refusal("layout.split=[4, 4]", "layout.g_inter=3") == (
        "layout.split (--set): [4, 4] is for 2 stages, g_inter is 3; choose 3 entries, or auto"
    )


# --- check_batch -------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "size"), [(Grid(1, 1), 48), (Grid(2, 2), 24), (Grid(1, 48), 1)])
def test_a_batch_of_whole_microbatches_passes(grid: Grid, size: int) -> None:
    check_batch(load_config(None, [f"batch.microbatch_size={size}"]), grid)


def test_the_microbatch_divides_a_replicas_share(tmp_path: Path) -> None:
    file = tmp_path / "quickstart.yaml"
    file.write_text("batch:\n  microbatch_size: 5\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        check_batch(load_config(str(file)), Grid(2, 2))

    assert str(caught.value) == (
        "batch.microbatch_size (quickstart.yaml:2): 5 does not divide the 24 sequences of a "
        "replica (48 = 2 replicas × 24); choose one of 1, 2, 3, 4, 6, 8, 12, 24"
    )


def test_a_microbatch_that_divides_only_the_global_batch_is_refused() -> None:
    assert "16 does not divide the 24 sequences" in _batch_refusal(
        Grid(1, 2), "batch.microbatch_size=16"
    )


def test_the_choices_are_the_nearest_ones() -> None:
    told = _batch_refusal(Grid(1, 1), "batch.global_batch_size=960", "batch.microbatch_size=100")

    assert told == (
        "batch.microbatch_size (--set): 100 does not divide the 960 sequences of a replica "
        "(960 = 1 replica × 960); choose one of 40, 48, 60, 64, 80, 96, 120, 160"
    )


def test_the_replicas_divide_the_global_batch() -> None:
    assert _batch_refusal(Grid(2, 4), "batch.global_batch_size=50") == (
        "batch.global_batch_size (--set): 50 does not divide evenly over 4 replicas "
        "(50 = 4 replicas × 12 + 2); choose 48 or 52, "
        "or as layout.g_data one of 1, 2, 5, 10, 25, 50"
    )
    assert _batch_refusal(Grid(1, 4), "batch.global_batch_size=1") == (
        "batch.global_batch_size (--set): 1 does not divide evenly over 4 replicas "
        "(1 = 4 replicas × 0 + 1); choose 4, or as layout.g_data 1"
    )


# --- check_data --------------------------------------------------------------------------


def test_data_that_just_fits_passes() -> None:
    check_data(load_config(None), source="stdlib", words=256, vocab_size=256, num_samples=48)
    check_data(load_config(None), source="stdlib", words=None, vocab_size=999, num_samples=48)


def test_the_model_has_a_row_for_every_token_of_the_data() -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(load_config(None), source="stdlib", words=256, vocab_size=257, num_samples=48)

    assert str(caught.value) == (
        "model.vocab_size (default): 256 is below the vocabulary of stdlib, 257; "
        "choose at least 257"
    )


def test_the_data_fills_a_step() -> None:
    with pytest.raises(DataError) as caught:
        check_data(load_config(None), source="stdlib", words=256, vocab_size=256, num_samples=47)

    assert str(caught.value) == (
        "stdlib: 47 samples cannot fill a step of batch.global_batch_size (default) 48; "
        "take more data, a smaller batch or a smaller data.sequence_length"
    )


def test_numbers_that_nobody_means_are_refused_at_once() -> None:
    """Once, all their divisors were looked for."""
    said = _config_refusal(f"model.hidden_size={'9' * 400}", "model.num_heads=8")

    assert "8 does not divide model.hidden_size 9999" in said
    assert "; choose one of 1, 3, 9, 11" in said


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("model.num_key_value_heads=3",),
            "model.num_key_value_heads (--set): 3 does not divide model.num_heads 8; choose one of "
            "1, 2, 4, 8",
        ),
        (
            ("model.head_dim=5",),
            "model.head_dim (--set): rotary embeddings turn pairs, and 5 is odd; choose an even "
            "number",
        ),
        (
            ("model.rope_low_factor=4",),
            "model.rope_low_factor (--set): 4 is not below model.rope_high_factor 4, so that no "
            "wavelength would lie between long and short; choose less than 4",
        ),
        (
            ("model.num_heads=7",),
            "model.num_heads (--set): 7 does not divide model.hidden_size 256; choose one of 1, 2, "
            "4, 8, 16, 32, 64, 128",
        ),
    ],
)
def test_sizes_of_a_llama_fit_each_other(overrides: tuple[str, ...], text: str) -> None:
    assert _config_refusal("model.name=llama", *overrides) == text
    check_config(load_config(None, ["model.name=llama", "model.num_heads=7", "model.head_dim=6"]))
