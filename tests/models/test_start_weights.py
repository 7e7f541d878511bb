"""Runs that start from a file, with torchvision's names or ours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.images import (
    assert_equal_tensors,
    buffers_of,
    image_config,
    image_data,
    shapes_of,
    small_vgg,
    small_wide_resnet,
    torchvision_name,
    write_safetensors,
)
from support.runs import (
    job_alone,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

import axsparse as ax
from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.models.sequential import from_sequential
from axsparse.models.start_weights import FromFile, fingerprint, open_weights, start_from
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import DataError
from axsparse.training.trainer import build

STILL = {"learning_rate": 1e-30, "weight_decay": 0.0}


def random_tensors(model: Model, called: Callable[[str], str] = str) -> dict[str, Tensor]:
    """A state dict for a model, under the names of a library."""
    generator = torch.Generator().manual_seed(9)
    state = {}
    for layer in profile(model).layers:
        for parameter in layer.parameters:
            state[called(parameter.name)] = torch.randn(parameter.shape, generator=generator)
        for buffer in layer.buffers:
            state[called(buffer.name)] = (
                torch.rand(buffer.shape, generator=generator) + 0.5
                if buffer.dtype.is_floating_point
                else torch.tensor(7)
            )
    return state


# -- a run ----------------------------------------------------------------------------------


def test_a_run_starts_at_what_a_file_of_torchvisions_names_holds(tmp_path: Path) -> None:
    plain = small_wide_resnet()
    state = random_tensors(plain, torchvision_name)
    path = write_safetensors(tmp_path / "w.safetensors", state)
    model = start_from(plain, open_weights(path), named=torchvision_name)
    config = image_config(train={"steps": 1}, pruning={"sparsity": 0.0}, optimizer=STILL)

    ranks = train_in_process(3, 1, model, config, image_data(33))

    weights = {name: weight for _, trace in ranks for name, weight in trace.weights.items()}
    expected = {name: state[torchvision_name(name)] for name in shapes_of(plain)}
    counts = buffers_of(ranks)
    assert_equal_tensors(weights, {name: expected[name] for name in weights})
    assert set(weights) | set(counts) == set(expected)
    assert counts["stem.bn1.num_batches_tracked"].item() == 7 + 3
    assert not torch.equal(counts["stem.bn1.running_mean"], torch.zeros(4))


def test_a_tied_weight_is_in_a_file_once_or_twice_alike(tmp_path: Path) -> None:
    config = tiny_config(train={"steps": 1}, pruning={"sparsity": 0.0}, optimizer=STILL)
    plain = tiny_gpt(config)
    state = random_tensors(plain)
    del state["head.weight"]
    once = start_from(plain, open_weights(write_safetensors(tmp_path / "once.safetensors", state)))
    state["head.weight"] = state["embed.token.weight"].clone()
    start_from(plain, open_weights(write_safetensors(tmp_path / "twice.safetensors", state)))

    ranks = train_in_process(2, 1, once, config, token_data())

    [head] = [trace.weights["head.weight"] for _, trace in ranks if "head.weight" in trace.weights]
    assert torch.equal(head, state["embed.token.weight"])


def test_ranks_compare_what_they_start_at(tmp_path: Path) -> None:
    state = random_tensors(small_vgg())
    one = write_safetensors(tmp_path / "one.safetensors", state)
    state["classifier.6.bias"][0] += 1
    two = write_safetensors(tmp_path / "two.safetensors", state)

    assert fingerprint(one) != fingerprint(two)
    start = profile(start_from(small_vgg(), open_weights(one))).start
    assert start == f"{one.name} {fingerprint(one)}"


def test_one_tensor_at_a_time_is_read(tmp_path: Path) -> None:
    reads = []

    class Watched:
        def __init__(self, path: Path) -> None:
            self.file = open_weights(path)
            self.path, self.files, self.shapes = path, [path], self.file.shapes
            self.dtype = self.file.dtype

        def read(self, name: str) -> Tensor:
            reads.append(name)
            return self.file.read(name)

    path = write_safetensors(tmp_path / "w.safetensors", random_tensors(small_vgg()))
    model = start_from(small_vgg(), Watched(path))
    assert reads == []  # names and shapes are checked by the header alone
    config = image_config(train={"steps": 1})

    train_in_process(3, 1, model, config, image_data(16))

    twice = [f"features.{n}.weight" for n in (2, 5, 7, 10, 12)]  # for the mask and for the state
    twice += ["classifier.0.weight", "classifier.3.weight"]
    assert sorted(reads) == sorted([*random_tensors(small_vgg()), *twice])


# -- what is refused ------------------------------------------------------------------------


def test_buffers_of_other_numbers_are_refused(tmp_path: Path) -> None:
    plain = small_wide_resnet()
    state = {**random_tensors(plain), "stem.bn1.running_mean": torch.zeros(4, dtype=torch.int8)}
    path = write_safetensors(tmp_path / "w.safetensors", state)
    start = start_from(plain, open_weights(path)).start

    assert start is not None
    start.read("stem.bn1.num_batches_tracked")
    with pytest.raises(DataError, match=r"'stem.bn1.running_mean' is int8, not real floating"):
        start.read("stem.bn1.running_mean")


# -- a pretrained body with a new head --------------------------------------------------------


def body_and_head(classes: int) -> nn.Sequential:
    torch.manual_seed(classes)
    return nn.Sequential(
        OrderedDict(body=nn.Linear(16, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, classes))
    )


def old(name: str) -> str:
    return f"old.{name}"


@pytest.fixture
def pretrained(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A file of another library's names, whose head has other classes."""
    state = {old(name): value for name, value in body_and_head(7).state_dict().items()}
    return write_safetensors(tmp_path / "body.safetensors", state), state


@pytest.mark.parametrize("own_modules", [True, False])
def test_a_body_gets_a_new_head(
    own_modules: bool, pretrained: tuple[Path, dict[str, Tensor]]
) -> None:
    path, state = pretrained
    modules = body_and_head(3)
    model = from_sequential(modules, summed_loss)
    if not own_modules:  # each layer starts itself
        build = {"body": lambda: nn.Linear(16, 8), "norm": lambda: nn.BatchNorm1d(8)}
        build["head"] = lambda: nn.Linear(8, 3)
        model = Model([Layer(name, make) for name, make in build.items()], summed_loss)

    model = start_from(model, open_weights(path), named=old, new=["head.*"])

    short = {"train": {"steps": 1}, "batch": {"microbatch_size": 3}, "samo": {"enabled": False}}
    config = tiny_config(optimizer=STILL, **short)
    [(trainer, trace)] = train_in_process(1, 1, model, config, vector_data(classes=3))
    assert torch.equal(trace.weights["body.weight"], state["old.body.weight"])
    assert trace.weights["head.weight"].shape == (3, 8)
    assert trace.weights["head.weight"].abs().sum() > 0
    own = modules.get_parameter("head.weight")
    assert torch.equal(trace.weights["head.weight"], own) is own_modules
    assert isinstance(model.start, FromFile)
    assert model.start.note() == (
        f"{path}: new, and not from the file: head.weight, head.bias; "
        "left out of it: old.head.weight, old.head.bias"
    )
    assert isinstance(trainer.plan.model.start, FromFile)


def test_what_begins_anew_is_part_of_what_ranks_compare(
    pretrained: tuple[Path, dict[str, Tensor]],
) -> None:
    path, _ = pretrained
    made = [
        start_from(
            from_sequential(body_and_head(7), summed_loss), open_weights(path), named=old, new=new
        ).start
        for new in ([], ["head.bias"], ["head.*"])
    ]

    assert len({start.fingerprint for start in made if start is not None}) == 3


def test_new_tensors_are_named_where_a_configuration_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "tie_embeddings": False}
    state = random_tensors(named_model(ax.configure({"model": settings})))
    path = write_safetensors(tmp_path / "body.safetensors", state)
    new = [next(name for name in state if name.endswith("bias"))]
    model = {**settings, "weights": str(path), "new": new}
    run = {"run_dir": str(tmp_path / "run"), "train": {"peak_flops": 1e9}}
    loaded = ax.configure({"model": model, **run}).named("small")
    data = token_data(samples=48)

    build(job_alone(), named_model(loaded), lambda: ax.Datasets(data, data), loaded).close()

    out = capsys.readouterr().out
    assert f"{path}: new, and not from the file: {new[0]}; left out of it: {new[0]}\n" in out
