"""The contents of a model, and every way in which its declaration can be wrong."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from support.mpirun import LONGEST_SECONDS
from support.runs import random_init
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.survey import survey
from axsparse.runtime.errors import ConfigError


def linear(inputs: int = 3, outputs: int = 4, *, frozen: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, bias=False).requires_grad_(not frozen)


def model(*layers: Layer, ties: Sequence[Tie] = ()) -> Model:
    return Model(layers, loss=lambda output, target: output.sum(), ties=ties)


def layer(name: str, build: Callable[[], nn.Module] | None = None) -> Layer:
    return Layer(name, build or linear(), init=random_init)


# -- what is found --------------------------------------------------------------------------


def test_parameters_have_global_names_shapes_and_say_whether_they_are_trained() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 4)
            self.one.bias.requires_grad_(False)

    (found,) = survey(model(Layer("a", Mixed, kind="head"))).layers

    assert (found.name, found.kind, found.numel) == ("a", "head", 16)
    assert [(p.name, p.shape, p.trained, p.numel) for p in found.parameters] == [
        ("a.one.weight", (4, 3), True, 12),
        ("a.one.bias", (4,), False, 4),
    ]


def test_buffers_have_global_names_shapes_types_and_say_whether_they_are_state() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("cache", torch.zeros(2, 3, dtype=torch.bool), persistent=False)
            self.register_buffer("nothing", None)

    (found,) = survey(model(Layer("a", Buffered))).layers

    assert [(b.name, b.shape, b.dtype, b.persists, b.nbytes) for b in found.buffers] == [
        ("a.cache", (2, 3), torch.bool, False, 6),
        ("a.norm.running_mean", (6,), torch.float32, True, 24),
        ("a.norm.running_var", (6,), torch.float32, True, 24),
        ("a.norm.num_batches_tracked", (), torch.int64, True, 8),
    ]
    assert found.buffer_bytes == 62
    assert found.numel == 12


def test_a_tied_weight_counts_once() -> None:
    found = survey(
        model(
            layer("a"),
            layer("b", linear(frozen=True)),
            layer("c"),
            ties=[Tie("a.weight", "c.weight")],
        )
    )

    assert found.ties == {"c.weight": "a.weight"}
    assert found.num_params == 24
    assert found.counted == ["a.weight"]


def test_flops_are_twice_the_parameters_unless_given() -> None:
    found = survey(model(layer("a"), Layer("b", linear(), flops=7)))

    assert [entry.flops for entry in found.layers] == [24.0, 7.0]
    assert found.flops == 31.0


def test_the_layer_of_a_parameter_is_found_by_name() -> None:
    found = survey(model(layer("a"), layer("b")))

    assert found.layer_of("b.weight") == 1
    with pytest.raises(KeyError):
        found.layer_of("b.bias")


def test_a_survey_costs_no_memory_and_no_random_numbers() -> None:
    devices = []

    def build() -> nn.Module:
        module = nn.Linear(200_000, 200_000)
        devices.append(module.weight.device.type)
        return module

    before = torch.get_rng_state()
    found = survey(model(Layer("huge", build)))

    assert found.num_params == 200_000 * 200_001
    assert devices == ["meta"]
    assert torch.equal(before, torch.get_rng_state())


class ReadsItself(nn.Module):
    """Cannot be built on the meta device, since it reads its values; also draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))
        self.largest = float(self.weight.max())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_layer_that_cannot_be_built_without_memory_is_built_and_thrown_away() -> None:
    before = torch.get_rng_state()

    found = survey(model(Layer("a", ReadsItself)))

    assert found.num_params == 5
    assert torch.equal(before, torch.get_rng_state())


LOOKS = """
import sys
from dataclasses import replace
from torch import nn
from axsparse.config.load import load_config
from axsparse.models.layer import Layer, Model
from axsparse.models.zoo.model_registry import named_model
from axsparse.models.survey import survey

class Drawn(nn.Embedding):
    def __init__(self):
        super().__init__(3, 4)
        nn.init.xavier_normal_(self.weight)
        nn.init.kaiming_normal_(self.weight)
        self.weight.data.normal_()

for name in ("gpt", "vgg19", "wide_resnet101_2", "cnn"):
    survey(replace(named_model(load_config(None, [f"model.name={name}"])), example=None))
survey(Model([Layer("a", Drawn)], loss=lambda output, target: output.sum()))
print("torch._dynamo" in sys.modules)
"""


def test_to_look_at_layers_loads_no_compiler() -> None:
    """The compiler takes two seconds on each rank; only the rank that measures costs loads it."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_SECONDS,
    )

    assert done.stdout == "False\n"


# -- what is refused ------------------------------------------------------------------------


def oddly_named() -> nn.Module:
    module = nn.Linear(3, 4)
    module.register_parameter("odd\ud800", nn.Parameter(torch.ones(2)))
    return module


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (model(), r"^model: no layers; a model is a list of at least one$"),
        (
            model(layer("a/b")),
            r"^layer 'a/b': names become file names; use letters, digits, '_', '-', '.'$",
        ),
        (model(layer("")), r"^layer '': names become file names; use letters"),
        (
            model(layer("a"), layer("a")),
            r"^layer a: two layers have this name; rename one$",
        ),
        (
            model(layer("a", lambda: nn.ModuleDict({"b": nn.Linear(2, 2)})), layer("a.b")),
            r"^parameter a.b.weight: two parameters have this global name; rename layer a.b$",
        ),
        (
            model(layer("a", lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))),
            r"^layer a: parameter '0.weight' has a max_norm, by which a forward writes to weights: "
            r"replicas would drift apart; leave max_norm out, and normalize the rows that the "
            r"forward has looked up$",
        ),
        (
            model(layer("a", lambda: nn.EmbeddingBag(3, 2, max_norm=1.0))),
            r"^layer a: parameter 'weight' has a max_norm",
        ),
        (
            model(layer("a", linear(frozen=True)), layer("b", nn.Tanh)),
            r"^model: no parameter requires a gradient; there is nothing to train$",
        ),
        (
            model(layer("a"), ties=[Tie("a.weight", "b.weight")]),
            r"^tie a.weight = b.weight: no parameter 'b.weight'$",
        ),
        (
            model(
                layer("a"),
                layer("b"),
                layer("c"),
                ties=[Tie("a.weight", "b.weight"), Tie("b.weight", "c.weight")],
            ),
            r"^tie b.weight = c.weight: b.weight is in two ties; a weight may have two uses, not "
            r"more$",
        ),
        (
            model(layer("a"), ties=[Tie("a.weight", "a.weight")]),
            r"^tie a.weight = a.weight: a.weight is in two ties",
        ),
        (
            model(layer("a"), layer("b", linear(4, 3)), ties=[Tie("a.weight", "b.weight")]),
            r"^tie a.weight = b.weight: shapes \(4, 3\) and \(3, 4\), trained True and True; a tie "
            r"joins two uses of one weight$",
        ),
        (
            model(layer("a"), layer("b", linear(frozen=True)), ties=[Tie("a.weight", "b.weight")]),
            r"trained True and False; a tie joins two uses of one weight$",
        ),
        (
            model(layer("a"), layer("b"), ties=[Tie("b.weight", "a.weight")]),
            r"^tie b.weight = a.weight: the first use comes later in the model; swap them$",
        ),
        (
            model(
                layer("a"),
                Layer("b", linear(), init=lambda name, shape, generator: torch.zeros(shape)),
                ties=[Tie("a.weight", "b.weight")],
            ),
            r"layers a and b have two different `init`s, so that the uses would start differently",
        ),
        (
            model(layer("a"), Layer("b", linear()), ties=[Tie("a.weight", "b.weight")]),
            r"^tie a.weight = b.weight: layer b has no `init`, so that the two uses would start "
            r"differently on two stages; give both layers the same `init`$",
        ),
        (
            model(layer("a", oddly_named)),
            r"^parameter 'a.odd\\ud800': names are printed and are keys of files; use printable ch",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused_with_place_and_mend(
    wrong: Model, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        survey(wrong)


def test_two_uses_within_one_layer_may_start_themselves() -> None:
    def build() -> nn.Module:
        return nn.Sequential(linear(3, 3)(), linear(3, 3)())

    found = survey(model(Layer("a", build), ties=[Tie("a.0.weight", "a.1.weight")]))

    assert found.ties == {"a.1.weight": "a.0.weight"}


def test_a_build_that_makes_values_in_each_call_passes() -> None:
    own = nn.Linear(3, 3)

    found = survey(model(layer("a", lambda: copy.deepcopy(own))))

    assert found.num_params == 12


SHARED = nn.Linear(3, 4)


class OtherNumbers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.linear = nn.Linear(3, 4)


UINT4: torch.dtype = vars(torch)["uint4"]
"""Smaller than a byte; torch's stubs lack it."""


class WithBuffer(nn.Module):
    def __init__(self, buffer: Callable[[], Tensor], *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("k", buffer(), persistent=persistent)
        self.linear = nn.Linear(3, 4)


def sparse() -> Tensor:
    with torch.device("cpu"):
        return torch.eye(3).to_sparse()


class SparseParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(sparse(), requires_grad=False)
        self.linear = nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            Layer("a", linear(), kind="blocks"),  # type: ignore[arg-type]
            r"^layer a: kind is 'blocks'; choose one of block, embedding, head$",
        ),
        (
            Layer("a", lambda: nn.LazyLinear(4)),
            r"^layer a: parameter 'weight' has no shape yet; give its module all sizes",
        ),
        (
            Layer("a", lambda: OtherNumbers(torch.complex64)),
            r"^layer a: parameter 'k' is torch.complex64; parameters are real floating point",
        ),
        (
            Layer("a", lambda: OtherNumbers(torch.int64)),
            r"^layer a: parameter 'k' is torch.int64; parameters are real floating point",
        ),
        (
            Layer("a", lambda: SHARED),
            r"^layer a: its build returned the same parameters twice; make new ones in every call",
        ),
        (
            Layer("a", lambda: nn.Sequential(SHARED, nn.Tanh())),
            r"^layer a: its build returned the same parameters twice; make new ones in every call",
        ),
        (
            Layer("a", ReadsItself, init=random_init),
            r"^layer a: its build raised RuntimeError: .*meta",
        ),
        (
            Layer("a", lambda: nn.Linear("three", 4)),  # type: ignore[arg-type]
            r"^layer a: its build raised TypeError: .*; mend the",
        ),
        (
            Layer("a", lambda: None),  # type: ignore[arg-type,return-value]
            r"^layer a: its build returned NoneType; return a torch",
        ),
        (
            Layer("a", lambda: WithBuffer(sparse)),
            r"^layer a: buffer 'k' is torch.sparse_coo, which cannot be saved; keep its indices",
        ),
        (
            Layer("a", lambda: WithBuffer(sparse, persistent=False)),
            r"^layer a: buffer 'k' is torch.sparse_coo, which cannot be saved; keep its indices",
        ),
        (
            Layer("a", lambda: WithBuffer(lambda: torch.empty(3, dtype=UINT4))),
            r"^layer a: buffer 'k' is torch.uint4, which cannot be saved; keep it as integers, or",
        ),
        (
            Layer("a", SparseParameter),
            r"^layer a: parameter 'k' is torch.sparse_coo, which has no dense values",
        ),
        (
            Layer("b", lambda: nn.SyncBatchNorm(3)),
            r"^layer b: SyncBatchNorm needs torch.distributed, and its results would depend on "
            r"the layout; use BatchNorm, which sees one microbatch$",
        ),
        (nn.Linear(3, 4), r"^model: layer 0 is Linear; make it Layer\(name, build\), or the model"),
    ],
)
def test_layers_that_would_silently_be_others_are_refused(wrong: Layer, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        survey(model(wrong))


def test_a_cache_of_any_type_passes_since_it_is_not_saved() -> None:
    def cached() -> nn.Module:
        return WithBuffer(lambda: torch.empty(3, dtype=UINT4), persistent=False)

    assert [buffer.persists for buffer in survey(model(Layer("a", cached))).layers[0].buffers] == [
        False
    ]


def test_values_that_a_build_loads_are_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    values = nn.Linear(3, 4).state_dict()

    def pretrained() -> nn.Module:
        module = nn.Linear(3, 4)
        module.load_state_dict(values)
        return module

    survey(model(Layer("a", pretrained)))

    assert not recwarn.list
