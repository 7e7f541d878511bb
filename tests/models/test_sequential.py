"""An `nn.Sequential`, or any list of modules, as a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.allocated import peak_of_torch
from support.images import image_config
from support.runs import on_ranks, summed_loss, train_in_process, vector_data
from torch import Tensor, nn

import axsparse as ax
from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.models.layer import Layer
from axsparse.models.model_profile import profile
from axsparse.models.sequential import from_sequential, structure
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.job import Job
from axsparse.samo.layer_construction import StateOptions, build_layers
from axsparse.samo.state_bytes import StateFormat
from axsparse.training.trainer import build

WIDTH = 16
ONES = torch.ones(WIDTH)


def sequential() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(WIDTH, WIDTH),
            norm=nn.BatchNorm1d(WIDTH),
            relu=nn.ReLU(inplace=True),
            second=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU(inplace=True)),
            last=nn.Linear(WIDTH, 5),
        )
    )


RELU = nn.ReLU()
LISTED = [nn.Embedding(9, 4), nn.Linear(4, 4), RELU, nn.Linear(4, 2), RELU]


NAMED = "first block, norm block, relu block, second block, last head"


@pytest.mark.parametrize(
    ("modules", "kinds", "layers"),
    [
        (sequential(), {}, NAMED),
        (sequential()._modules, {}, NAMED),
        (nn.ModuleDict(sequential()._modules), {}, NAMED),
        (LISTED, {1: "embedding"}, "0 embedding, 1 embedding, 2 block, 3 head, 4 block"),
    ],
)
def test_layers_have_names_or_numbers_and_kinds(modules: Any, kinds: Any, layers: str) -> None:
    """One module without parameters may stand in several places."""
    found = profile(from_sequential(modules, summed_loss, kinds=kinds)).layers

    assert ", ".join(f"{layer.name} {layer.kind}" for layer in found) == layers
    if layers.startswith("first"):
        assert [p.name for p in found[3].parameters] == ["second.0.weight", "second.0.bias"]


class Pair(nn.Linear):
    """Returns its outputs and its inputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class OfPair(nn.Linear):
    """Takes two tensors as one argument."""

    def forward(self, pair: Any) -> Tensor:
        return super().forward(pair[0] + 2 * pair[1])


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_a_forward_of_one_argument_gets_a_tuple_as_from_torch(method: str) -> None:
    modules = nn.Sequential(Pair(WIDTH, WIDTH), OfPair(WIDTH, 5))
    data = vector_data(6)
    still: dict[str, Any] = {"learning_rate": 1e-30, "weight_decay": 0.0, "precision": "fp32"}
    pruning = {"pruning.method": method, "pruning.include": "all"}
    trainer = trainer_of(modules, data=data, config=pruning, steps=1, **still)

    loss = trainer.step().loss

    [inputs], targets = data.read(np.arange(6))
    trained: Any = trainer.model()
    assert loss == pytest.approx(summed_loss(trained(inputs), targets).item() / 6)
    modules.load_state_dict(trained.state_dict())
    torch.testing.assert_close(trained(inputs), modules(inputs))


class Hashed(nn.Embedding):
    """Maps any whole number to one of its words."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids % self.num_embeddings)


@pytest.mark.parametrize("kind", [nn.Embedding, Hashed])
def test_the_ids_of_an_embedding_that_maps_them_are_not_bounded(kind: type[nn.Embedding]) -> None:
    embedding, after = kind(9, 4), [nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 5)]
    if kind is nn.Embedding:
        assert from_sequential([embedding, *after], summed_loss).vocab_size == 9
        embedding.register_forward_pre_hook(lambda _, inputs: (inputs[0] % 9,))
    model = from_sequential([embedding, *after], summed_loss)
    ids = ArrayDataset(torch.arange(60).view(30, 2), torch.zeros(30, dtype=torch.long))

    [(_, trace)] = train_in_process(1, 1, model, image_config(), ids)

    assert len(trace.losses) == image_config().train.steps


def test_it_starts_at_the_modules_values_and_leaves_the_modules_alone() -> None:
    modules = sequential()
    before = {name: tensor.clone() for name, tensor in modules.state_dict().items()}
    still = image_config(
        pruning={"sparsity": 0.0},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
        train={"steps": 1},
    )

    ranks = train_in_process(2, 1, from_sequential(modules, summed_loss), still, vector_data())

    weights = {name: weight for _, trace in ranks for name, weight in trace.weights.items()}
    assert set(weights) == {name for name, _ in modules.named_parameters()}
    for name, tensor in modules.state_dict().items():
        assert torch.equal(tensor, before[name])
        if name in weights:
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-29)
    assert all(parameter.grad is None for parameter in modules.parameters())


def doubled(modules: nn.Sequential) -> None:
    modules.load_state_dict({key: 2 * value for key, value in modules.state_dict().items()})


COPIES = {
    "second.1.p": "change trainer.layers[3].module.get_submodule('1').p instead",
    "norm.running_mean": "change trainer.layers[1].module.running_mean instead",
}
BEFORE = (
    "change it before, weights by an optimizer of your own (optimizer=), or a copy of the module"
)
LATE: dict[str, tuple[str, Callable[[Any], object]]] = {
    "values": ("first.weight", doubled),
    "data": ("first.weight", lambda net: net[0].weight.data.fill_(1.0)),
    "emptied": ("first.weight", lambda net: setattr(net[0].weight, "data", torch.empty(0))),
    "frozen": ("first.weight.requires_grad", lambda net: net[0].requires_grad_(False)),
    "hook": ("first._forward_hooks", lambda net: net[0].register_forward_hook(print)),
    "gradients": ("first.weight._backward_hooks", lambda net: net[0].weight.register_hook(abs)),
    "evaluation": ("norm.training", lambda net: net[1].eval()),
    "attribute": ("second.1.p", lambda net: setattr(net[3][1], "p", 0.5)),
    "new attribute": ("relu.scale", lambda net: setattr(net[2], "scale", 0)),
    "buffer": ("norm.running_mean", lambda net: net[1].running_mean.fill_(9.0)),
    "replaced buffer": ("norm.running_mean", lambda net: setattr(net[1], "running_mean", -ONES)),
    "layer": ("_modules", lambda net: net.append(nn.Dropout(0.1))),
    "module": ("second._modules", lambda net: setattr(net[3], "1", nn.Dropout(0.1))),
    "parameter": ("first._parameters", lambda net: setattr(net[0], "bias", nn.Parameter(ONES))),
}


def trainer_of(modules: nn.Sequential, **settings: Any) -> ax.Trainer:
    model = from_sequential(modules, summed_loss)
    usual = {"data": vector_data(), "steps": 6, "global_batch_size": 6, "quiet": True}
    return ax.Trainer(model, **{**usual, **settings})


@pytest.mark.parametrize(
    ("kind", "when"), [*((kind, "callback") for kind in LATE), ("data", "before"), ("data", "loop")]
)
def test_what_is_set_after_the_trainer_is_made_is_refused(kind: str, when: str) -> None:
    modules = sequential()
    trainer = trainer_of(modules)
    name, change = LATE[kind]
    after = 0 if when == "before" else 3 + (kind == "replaced buffer")

    def later(step: int, _: object = None) -> None:
        if step == after:
            change(modules)

    def run() -> None:
        later(0)
        for step in trainer if when == "loop" else ():
            trainer.step()
            later(step)
        trainer.train(later)

    with pytest.raises(ConfigError) as raised:
        run()

    way = COPIES.get(name, BEFORE)
    text = f"model: {name} has changed since the Trainer was made, which trains copies; {way}"
    assert (str(raised.value), trainer.steps_done) == (text, after)


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "sparsity": 0.5}])
def test_a_program_may_put_the_trained_weights_into_its_own_module(
    settings: dict[str, Any],
) -> None:
    modules, losses = sequential(), list[float]()
    trainer = trainer_of(modules, **settings)

    def on_step(step: int, result: Any) -> None:
        losses.append(result.loss)
        modules.load_state_dict(trainer.state_dict() or {})
        modules.eval()(torch.ones(2, WIDTH))

    trainer.train(on_step)

    expected = list[float]()
    trainer_of(sequential(), **settings).train(lambda _, result: expected.append(result.loss))
    assert losses == expected
    trainer = trainer_of(modules)
    with pytest.raises(ConfigError, match=r"first\.weight has changed"):
        trainer.train(lambda *_: modules.load_state_dict(sequential().state_dict()))


class Counting(nn.Linear):
    """Notes each call in a number and in a mapping."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 5)
        self.calls, self.shapes = 0, dict[int, torch.Size]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes[self.calls] = x.shape
        return super().forward(x)


def test_a_program_may_use_and_convert_its_module_with_trained_weights_on_each_replica() -> None:
    taken: dict[str, Tensor] = {}

    def trained(transport: Transport) -> int:
        modules = sequential()
        first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        first.weight[0, 0] = 4e-8  # in fp16 6e-8
        modules.first = first
        modules.get_submodule("second.1").eval()
        modules.last = Counting()

        def on_step(step: int, _: object) -> None:
            if step > 1:
                return
            taken.update(trainer.state_dict() or {})
            trainer.state_dict()  # by which all ranks have met
            modules.float().load_state_dict(taken)
            modules.eval().half()(torch.ones(2, WIDTH, dtype=torch.float16))

        config = image_config(layout={"g_data": 2}, train={"steps": 3})
        model = from_sequential(modules, summed_loss)
        trainer = build(Job(transport), model, lambda: Datasets(vector_data(), None), config)
        trainer.train(on_step)
        return trainer.steps_done

    assert on_ranks(2, trained) == [3, 3]


class Watching(nn.Module):
    """Counts the calls of its linear layer by a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.linear.register_forward_hook(self.note)

    def note(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


def test_hooks_of_a_module_are_of_its_copy_and_those_of_other_objects_stay_theirs() -> None:
    class Recorder:
        calls = 0

        def note(self, *_: object) -> None:
            self.calls += 1

    module, recorder = Watching(), Recorder()
    module.linear.register_forward_hook(recorder.note)
    module.linear.register_forward_pre_hook(partial(recorder.note, "by name"))

    made: Any = structure(module).to_empty(device="cpu")
    made(torch.ones(1, WIDTH))

    assert (recorder.calls, module.calls, made.calls) == (2, 0, 1)


def test_ranks_that_made_other_values_are_told_apart() -> None:
    torch.manual_seed(1)
    one = profile(from_sequential([nn.Linear(3, 2)], summed_loss)).start
    two = profile(from_sequential([nn.Linear(3, 2)], summed_loss)).start
    torch.manual_seed(1)

    assert profile(from_sequential([nn.Linear(3, 2)], summed_loss)).start == one != two


class Tagged(nn.Parameter):
    """A user's own class of parameters."""

    no_decay: bool


def renamed(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, __: object) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


@pytest.mark.parametrize(
    "clip", [lambda weight: weight.clamp_(-0.05, 0.05), lambda w: w.data.clamp_(-0.05, 0.05)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_of_the_copy_that_a_callback_writes_are_trained(
    clip: Callable[[Tensor], object], precision: str
) -> None:
    settings = {"learning_rate": 1e-6, "precision": precision, "sparsity": 0.0}
    trainer = trainer_of(sequential(), **settings)

    def clipped(*_: object) -> None:
        with torch.no_grad():
            clip(trainer.layers[0].module.get_parameter("weight"))

    trainer.train(clipped)

    weights = trainer.state_dict()
    assert weights is not None
    assert weights["first.weight"].abs().max() == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_pruned_entries_that_a_callback_writes_are_zero_again_when_they_are_read(
    precision: str, is_counted: bool
) -> None:
    trainer = trainer_of(sequential(), precision=precision, sparsity=0.5)
    weight = trainer.layers[0].module.get_parameter("weight")
    pruned, read = weight == 0, list[bool]()

    def written(*_: object) -> None:
        with torch.no_grad():
            (weight if is_counted else weight.data).add_(0.5)
        trainer.state_dict()  # looks at the weights, as each call does
        read.append(bool(weight[pruned].any()))

    trainer.train(written)

    assert pruned.count_nonzero() == pruned.numel() / 2
    assert not weight[pruned].any()
    assert not (is_counted and any(read))
    assert (trainer.state_dict() or {})["first.weight"][~pruned].mean() > 0.4


def test_a_dense_weight_that_a_callback_writes_is_trained_where_replicas_gather_others() -> None:
    def trained(transport: Transport) -> float:
        config = image_config(
            layout={"g_data": 2},
            samo={"zero_stage": 3, "weights": "sparse"},
            pruning={"sparsity": 0.5},
            optimizer={"learning_rate": 1e-6},
        )
        model = from_sequential(sequential(), summed_loss)
        trainer = build(Job(transport), model, lambda: Datasets(vector_data(), None), config)
        bias = trainer.layers[0].module.get_parameter("bias")
        trainer.train(lambda *_: torch.no_grad()(bias.fill_)(0.5) is None)
        return float((trainer.state_dict() or {"first.bias": torch.ones(1)})["first.bias"][0])

    assert on_ranks(2, trained) == pytest.approx([0.5, 1.0], abs=1e-4)


def test_what_a_user_has_set_is_there_while_a_run_trains_and_in_its_model() -> None:
    made: Any = nn.Conv2d(4, 4, 3)
    made.to(memory_format=torch.channels_last)
    modules = nn.Sequential(nn.Conv2d(3, 4, 3), made, nn.Flatten(), nn.Linear(4, 5))
    made.weight = Tagged(made.weight.detach())
    made.weight.no_decay = True
    made.register_buffer("window", torch.ones(2))
    made.window.unit = "s"
    made.register_state_dict_post_hook(renamed)
    data = ArrayDataset(torch.randn(8, 3, 5, 5), torch.arange(8) % 5)
    sizes = {"global_batch_size": 4, "sparsity": 0.0, "steps": 2, "precision": "fp32"}
    trainer = trainer_of(modules, data=data, config={"batch.microbatch_size": 4}, **sizes)
    trainer.train()
    model: Any = trainer.model()
    taken: Any
    for taken in (trainer.layers[1].module, model[1]):
        assert type(taken.weight) is Tagged
        assert taken.weight.no_decay
        assert taken.window.unit == "s"
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert "1.kernel" in model.state_dict()


def small() -> nn.Module:
    return nn.Linear(256, 256, bias=False)


def test_a_layer_is_held_in_fp32_until_it_has_masters_and_no_longer() -> None:
    layer = Layer("all", lambda: nn.Sequential(*(small() for _ in range(4))))
    types = StateFormat(torch.bfloat16, torch.bfloat16, ("mean", "square"))
    options = StateOptions(types, seed=1, masks=None)

    peak = peak_of_torch(lambda: build_layers([layer], {}, options))

    # Weights and gradients in bf16, masters and two moments.
    assert peak < (2 + 2 + 4 + 4 + 4 + 1) * 4 * 256 * 256
