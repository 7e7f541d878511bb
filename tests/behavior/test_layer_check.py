"""Before the first step each distinct layer is compared with plain torch: what a run would compute
otherwise ends it by name, and nothing else does."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.allocated import peak_of_torch
from support.exhaustive import each_once
from support.hf import SMALL_LLAMA, small_llama
from support.resuming import ran
from support.runs import (
    Doing,
    assert_bitwise,
    mlp,
    random_init,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.data.dataset import ArrayDataset, Dataset
from axsparse.models import sequential
from axsparse.models.layer import Layer, Model, Tie
from axsparse.models.own_forward import from_module
from axsparse.models.sequential import from_sequential
from axsparse.runtime.errors import ConfigError
from axsparse.training import layer_check
from axsparse.training.layer_check import is_checked
from axsparse.training.trainer import Trainer

WIDTH, CLASSES = 16, 5
BATCH = {"batch": {"global_batch_size": 12, "microbatch_size": 3}, "train": {"steps": 2}}
CALLS = "its result changes from call to call; draw from the global random generators"
BACKWARD = "a backward must follow from its inputs alone"


def linear(outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, outputs)


def judged(
    model: Model, layout: tuple[int, int] = (1, 1), data: Dataset | None = None, **sections: Any
) -> None:
    data = vector_data() if data is None else data
    train_in_process(*layout, model, tiny_config(**{**BATCH, **sections}), data)


def declared(build: Callable[[], nn.Module]) -> Model:
    layers = [Layer("in", linear), Layer("odd", build), Layer("out", partial(linear, CLASSES))]
    return Model(layers, summed_loss)


def given(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(7)
    return from_sequential([linear(), make(), linear(CLASSES)], summed_loss)


# -- what ends a run ----------------------------------------------------------------------


def after(does: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """A linear layer, and something that is done to its output."""
    return Doing(lambda m, x: does(m, torch.tanh(m.linear(x))), **parts)


class Noisy(torch.autograd.Function):
    """Its gradient has noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Callable[[], float]) -> Tensor:
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1 + ctx.noise()), None


def noisy(noise: Callable[[], float]) -> nn.Module:
    return after(lambda _, x: Noisy.apply(x, noise))  # type: ignore[no-untyped-call]


def counting() -> nn.Module:
    """Counts its calls outside of buffers."""

    def count(m: Any, x: Tensor) -> Any:
        m.calls += 1
        return x * m.calls

    return after(count, calls=0)


def hooked(*, after: bool = False) -> nn.Module:
    """A layer of which a hook keeps half of the rows where they are: some entries of these survive
    any pruning, and a hook that meets pruned entries alone changes nothing."""
    module = linear()
    keep = torch.arange(WIDTH)[:, None] >= WIDTH // 2

    def mask(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(keep)

    if after:
        module.weight.register_post_accumulate_grad_hook(mask)
    else:
        module.weight.register_hook(lambda gradient: gradient * keep)
    return module


def evaluating() -> nn.Module:
    """A frozen backbone with statistics and dropout, which its user has set to evaluation."""
    module = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    return module.requires_grad_(requires_grad=False).eval()


def own_torch(seed: int = 3) -> nn.Module:
    chance = torch.Generator().manual_seed(seed)
    return after(lambda m, x: x * torch.rand(WIDTH, generator=m.chance), chance=chance)


ROWS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a generator of torch": (own_torch, CALLS),
    "a count outside of buffers": (counting, CALLS),
    "torch's numbers in a backward": (partial(noisy, lambda: float(torch.rand(()))), BACKWARD),
    "numpy's numbers in a backward": (partial(noisy, lambda: float(np.random.rand())), BACKWARD),
}


@pytest.mark.parametrize(
    ("name", "model", "layout"), each_once(list(ROWS), [declared, given], [(1, 1), (3, 1), (1, 2)])
)
def test_what_is_no_function_of_its_inputs_ends_the_run(
    model: Callable[..., Model], name: str, layout: tuple[int, int]
) -> None:
    build, cause = ROWS[name]
    layer = "odd" if model is declared else "1"

    with pytest.raises(ConfigError, match=rf"^layer {layer}: .*{cause}.*train.check_layers: fal"):
        judged(model(build), layout)


class Listed(nn.Module):
    """A forward of its own around a list, of which a part may be set to evaluation."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.head = linear(CLASSES)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def watched(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(7)
    return from_module(
        Listed(linear(), make()), summed_loss, lambda samples: (torch.randn(samples, WIDTH),)
    )


GIVEN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a hook of a parameter": (hooked, {}),
    "a hook, in a split backward": (hooked, {"pipeline": {"split_backward": True}}),
    "a hook after accumulation": (partial(hooked, after=True), {}),
    "a hook after accumulation, not pruned": (
        partial(hooked, after=True),
        {"pruning": {"sparsity": 0.0}},
    ),
    "a part in evaluation": (evaluating, {}),
    "a part in evaluation, exact sums": (evaluating, {"samo": {"gradient": "exact"}}),
}


@pytest.mark.parametrize(
    ("name", "model", "layout", "check"),
    each_once(list(GIVEN), [given, watched], [(1, 1), (3, 1), (1, 2)], ["auto", False]),
)
def test_what_the_user_set_on_a_module_stays_set(
    name: str, model: Callable[..., Model], layout: tuple[int, int], check: bool | str
) -> None:
    make, sections = GIVEN[name]
    made = model(make)
    prefix = "1." if model is given else "blocks.1."
    assert made.start is not None
    before = made.start.read(f"{prefix}weight")
    config = tiny_config(
        **{**BATCH, **sections, "train": {"steps": 2, "check_layers": check}},
        optimizer={"weight_decay": 0.0},
    )

    ranks = train_in_process(*layout, made, config, vector_data())

    found = [
        {key.removeprefix("blocks."): each for key, each in (trace.weights | trace.buffers).items()}
        for _, trace in ranks
    ]
    if make is evaluating:
        means = [
            each for tensors in found for key, each in tensors.items() if "running_mean" in key
        ]
        assert means and all(not each.any() for each in means)
        return
    [weight, *_] = [tensors["1.weight"] for tensors in found if "1.weight" in tensors]
    assert before is not None
    kept = (weight != 0) & (torch.arange(WIDTH)[:, None] < WIDTH // 2)
    assert kept.any() and torch.equal(weight[kept], before[kept])
    assert not torch.equal(weight, before * (weight != 0))


@pytest.mark.parametrize(
    ("layout", "dtype", "converts"),
    each_once([(1, 1), (2, 1), (1, 2)], [torch.float32, torch.float64], [True, False]),
)
def test_samples_that_lose_by_being_rounded_before_the_first_layer_end_the_run(
    layout: tuple[int, int], dtype: torch.dtype, converts: bool
) -> None:
    """In plain torch a layer that converts nothing would take no wider samples."""
    torch.manual_seed(7)

    def centre(m: Any, x: Tensor, shift: float = 1e3) -> Any:
        return m.linear((x - shift).to(m.linear.weight.dtype) if converts else x - shift)

    model = from_sequential([Doing(centre), linear(CLASSES)], summed_loss)
    near, far = vector_data(), vector_data()
    near._inputs[0] = near._inputs[0].to(dtype)
    far._inputs[0] = far._inputs[0].to(dtype) + 1000

    judged(model, layout, near, precision="bf16")
    judged(model, layout, far)
    with pytest.raises(ConfigError, match=r"^layer 0: output 0 differs by .* not rounded to bf16"):
        judged(model, layout, far, precision="bf16")
    far._inputs[0] = near._inputs[0].double() + 1e6
    model = from_sequential([Doing(partial(centre, shift=1e6)), linear(CLASSES)], summed_loss)
    with pytest.raises(ConfigError, match=r"^layer 0: output 0 differs by .* not rounded to fp32"):
        judged(model, layout, far)
    judged(from_sequential([linear(), linear(CLASSES)], summed_loss), layout, far)


def write(m: Any, x: Tensor) -> Any:
    m.shared.scale = 1.5 * len(x)
    return m.linear(x)


def append(m: Any, x: Tensor) -> Any:
    m.shared.append(1.5 * len(x))
    return m.linear(x)


def write_tensor(m: Any, x: Tensor) -> Any:
    m.shared.scale.add_(1.0)
    return m.linear(x)


class Blocks(nn.Module):
    """Blocks whose forward writes a number of its own inputs' shape, around them."""

    def __init__(self, *blocks: nn.Module, shared: Any = None) -> None:
        super().__init__()
        self.blocks, self.shared = nn.ModuleList(blocks), shared

    def forward(self, x: Tensor) -> Any:
        if self.shared is not None:
            self.shared.rows = 1000 + len(x)
        x = x + 1
        for block in self.blocks:
            x = block(x)
        return x * 2


def renewed(module: nn.Module, shared: object) -> nn.Module:
    """A new module for each call of a build, with one object."""
    return copy.deepcopy(module, {id(shared): shared})


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
@pytest.mark.parametrize(
    ("writes", "shared", "what"),
    [
        (write, SimpleNamespace(scale=1.0), "'scale' of a SimpleNamespace"),
        (append, [], "a list"),
        (write_tensor, SimpleNamespace(scale=torch.ones(())), "'scale' of a SimpleNamespace"),
    ],
)
@pytest.mark.parametrize("way", ["declared", "given", "own forward"])
def test_an_object_that_two_layers_have_and_one_writes_to_ends_the_run(
    layout: tuple[int, int], writes: Callable[[Any, Tensor], Any], shared: Any, what: str, way: str
) -> None:
    shared = copy.deepcopy(shared)
    first, last = Doing(writes, shared=shared), Doing(lambda m, x: m.linear(x), shared=shared)
    names, loss = ["0", "2"], lambda x, y: summed_loss(x[:, :CLASSES], y)
    if way == "given":
        model = from_sequential([first, linear(), last], loss)
    elif way == "declared":
        parts = [first, linear(), last]
        layers = [Layer(f"{n}", partial(renewed, part, shared)) for n, part in enumerate(parts)]
        model = Model(layers, loss)
    else:
        names = ["blocks.0", "blocks.2"]
        example = vector_data().read(np.arange(2))[0]
        model = from_module(Blocks(first, linear(), last), loss, lambda _: example)

    line = rf"^layer {names[0]}: its forward writes to {what} that layer {names[1]} has too"
    with pytest.raises(ConfigError, match=line):
        judged(model, layout)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_an_object_that_layers_read_alone_or_that_one_forward_writes_is_no_mistake(
    layout: tuple[int, int],
) -> None:
    shared = SimpleNamespace(scale=2.0, sizes=[1, 2])

    def read() -> nn.Module:
        return Doing(lambda m, x: m.linear(x) * m.shared.scale, shared=shared)

    example = vector_data().read(np.arange(2))[0]
    own = Blocks(read(), linear(), Doing(lambda m, x: m.linear(x)), shared=SimpleNamespace())

    judged(from_sequential([read(), linear(), read(), linear(CLASSES)], summed_loss), layout)
    judged(from_module(own, lambda x, y: summed_loss(x[:, :CLASSES], y), lambda _: example), layout)


def test_samples_given_as_integers_reach_the_first_layer_bit_by_bit() -> None:
    arrived: set[float] = set()

    def read(m: Any, bits: Tensor) -> Any:
        x = bits.view(torch.float32)
        if not x.is_meta:
            arrived.update(x.unique().tolist())
        return m.linear((x - 1000).to(m.linear.weight.dtype))

    data = vector_data()
    data._inputs[0] = torch.full_like(data._inputs[0], 1000.5).view(torch.int32)

    judged(
        from_sequential([Doing(read), linear(CLASSES)], summed_loss), data=data, precision="bf16"
    )

    assert arrived == {1000.5}


@pytest.mark.parametrize("lost", ["hooks", "a number"])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_what_the_copy_of_a_module_lost_ends_the_run(
    lost: str, layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = sequential.structure

    def structure(module: nn.Module) -> Any:
        made: Any = usual(module)
        if lost == "hooks" and hasattr(made, "weight"):
            made.weight._backward_hooks = None
        if isinstance(made, nn.LeakyReLU):
            made.negative_slope = 0.5
        return made

    monkeypatch.setattr(sequential, "structure", structure)

    with pytest.raises(ConfigError, match=r"^layer 1: .* differs from plain torch by"):
        judged(given(hooked if lost == "hooks" else nn.LeakyReLU), layout)


READERS: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "a gradient's hook": ("0.weight", lambda net, of: of + net[0].weight.detach()),
    "a forward hook": ("1.running_mean", lambda net, of: of + net[1].running_mean.mean()),
    "a loss": ("2.weight", lambda net, of: of.sum() * net[2].weight.detach().norm()),
    "another loss": (
        "0.weight",
        lambda net, of: of.sum() * net(torch.ones(3, WIDTH)).detach().norm(),
    ),
    "a loss that reads shapes": (
        "",
        lambda net, of: of.sum() * len(torch.zeros_like(net[2].weight.detach().t())),
    ),
    "a loss that reads what is frozen": ("", lambda net, of: of.sum() * net[0].bias.norm()),
}
"""By who reads a given module, and which tensor of it: a function of the module, and of a gradient,
a result or the outputs."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", [(1, 1), (2, 1)])
def test_a_read_of_a_given_weight_of_which_a_copy_is_trained_ends_the_run(
    reader: str, layout: tuple[int, int]
) -> None:
    net: Any = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear(CLASSES))
    net[0].bias.requires_grad_(requires_grad=False)
    name, reads = READERS[reader]
    if reader == "a gradient's hook":
        net[0].weight.register_hook(partial(reads, net))
    elif reader == "a forward hook":
        net[2].register_forward_hook(lambda _, __, result: reads(net, result))
    in_loss = "loss" in reader

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return reads(net, outputs) if in_loss else summed_loss(outputs, targets)

    told = [] if not name else [f"a hook or the loss reads {name} of the given module"]
    with pytest.raises(ConfigError, match=told[0]) if told else nullcontext():
        judged(from_sequential(net, loss), layout)


@pytest.mark.parametrize("broken", ["deferral", "sparse products", "recomputation"])
def test_a_fault_of_the_layouts_own_way_ends_the_run(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from axsparse.models import module_products
    from axsparse.models.module_buffers import BufferCopies
    from axsparse.pipeline.layer_runner import LayerRunner

    pipeline: dict[str, Any] = {}
    if broken == "deferral":
        pipeline = {"split_backward": True}
        monkeypatch.setattr(module_products, "_weight_gradient", lambda x, g: [g.t().mm(x) * 1.01])
        told = "the gradient of parameter weight differs from plain torch by"
    elif broken == "sparse products":
        usual = module_products._input_gradient
        monkeypatch.setattr(module_products, "_input_gradient", lambda *given: usual(*given) * 1.01)
        pipeline, told = {"split_backward": True}, "the gradient of input 0 differs"
    else:
        seeded = LayerRunner._seeded
        monkeypatch.setattr(
            LayerRunner, "_seeded", lambda self, x, key: seeded(self, x, (*key, *calls))
        )
        calls: list[int] = []
        take = BufferCopies.take

        def first(self: BufferCopies) -> Any:
            calls.clear()
            return take(self)

        # Before the first pass, and after it.
        monkeypatch.setattr(BufferCopies, "take", first)
        monkeypatch.setattr(BufferCopies, "learn", lambda *_, **how: calls.append(1))
        pipeline, told = {"checkpoint_activations": 1}, "try pipeline.checkpoint_activations: 0"
    model = given(nn.Dropout) if broken == "recomputation" else given(linear)

    with pytest.raises(ConfigError, match=told):
        judged(model, (2, 1), pipeline=pipeline)


def test_an_error_of_the_users_own_that_names_no_type_stays_as_it_is() -> None:
    def loss(output: Tensor, _: Tensor) -> Tensor:
        if output.is_meta:
            return output.sum()
        raise RuntimeError("no prototype fits this type of batch, which was printed too long ago")

    with pytest.raises(RuntimeError, match=r"^no prototype fits"):
        judged(Model([Layer("out", partial(linear, CLASSES))], loss))


def test_the_packages_own_decoder_is_checked_on_request_only() -> None:
    config = tiny_config()
    own, foreign = tiny_gpt(config), mlp(2)

    assert [is_checked(own, setting) for setting in ("auto", True, False)] == [False, True, False]
    assert [is_checked(foreign, setting) for setting in ("auto", False)] == [True, False]
    for ranks in (1, 2):  # of which two share the words that the head hands to the loss
        sections: dict[str, Any] = {"train": {"steps": 1, "check_layers": True}}
        config = tiny_config(**sections, layout={"g_tensor": ranks})
        train_in_process(2, 1, own, config, token_data(), g_tensor=ranks)


# -- what never does ----------------------------------------------------------------------


def tuples() -> Model:
    """Of several outputs, of which one consists of integers."""
    passing = Doing(lambda m, x: (m.linear(x), (x > 0).sum(1), x))
    table = nn.Embedding(WIDTH + 1, WIDTH)
    taking = Doing(lambda m, x, count, y: m.linear(x) + m.table(count) + y, table=table)
    return from_sequential([passing, taking, linear(CLASSES)], summed_loss)


def experts() -> nn.Module:
    """Sends each sample to one of three matrices, and some of them may get none."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weights = m.linear(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(m.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return x + out

    return Doing(forward, 3, experts=nn.ModuleList(linear() for _ in range(3)))


def half_frozen() -> nn.Module:
    """A frozen matrix, one that no forward uses, and one that trains."""
    frozen = linear().requires_grad_(requires_grad=False)
    return Doing(lambda m, x: m.linear(torch.tanh(m.frozen(x))), frozen=frozen, unused=linear())


def attention() -> nn.Module:
    """The gradient of the keys' bias is zero but for rounding."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.view(len(x), 4, 4)
        each = (part(x) for part in (m.linear, m.key, m.value))
        return F.scaled_dot_product_attention(*each).flatten(1)

    return Doing(forward, 4, 4, key=nn.Linear(4, 4), value=nn.Linear(4, 4))


def watching() -> nn.Module:
    """Hooks on tensors of the forward, which torch refuses where these have no gradients."""

    def forward(m: Any, x: Tensor) -> Any:
        scaled = 2 * x
        out = m.linear(scaled)
        for each in (scaled, out):
            each.register_hook(lambda gradient: 2 * gradient)
        return out

    return Doing(forward)


def moving() -> nn.Module:
    """Its output follows from a buffer that it changes."""

    def forward(m: Any, x: Tensor) -> Any:
        if m.training:
            m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return m.linear(x - m.mean.to(x.dtype))

    return Doing(forward, mean=torch.zeros(WIDTH))


def tied() -> Model:
    build = partial(nn.Linear, WIDTH, WIDTH, bias=False)
    layers = [
        Layer("one", build, init=random_init),
        Layer("between", nn.Tanh),
        Layer("two", build, init=random_init),
    ]
    return Model(layers, summed_loss, [Tie("one.weight", "two.weight")])


def tokens() -> Model:
    return from_sequential(
        [nn.Embedding(9, 4), nn.Flatten(), linear(), linear(CLASSES)], summed_loss
    )


def quantized() -> nn.Module:
    """In a layer before which nothing gets a gradient."""
    packed = torch.ao.nn.quantized.dynamic.Linear(WIDTH, WIDTH, dtype=torch.float16)
    return after(lambda m, x: m.packed(x.float()).to(x.dtype), packed=packed)


FINE: dict[str, Callable[[], Model]] = {
    "dropout": lambda: given(partial(nn.Dropout, 0.5)),
    "dropout in a declared layer": lambda: declared(partial(nn.Dropout, 0.5)),
    "batch norm": lambda: given(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))),
    "tied weights": tied,
    "a mixture of experts": lambda: given(experts),
    "no parameters": lambda: given(nn.Tanh),
    "in place": lambda: given(partial(nn.ReLU, inplace=True)),
    "tuples": tuples,
    "integers": tokens,
    "frozen": lambda: given(half_frozen),
    "all frozen": lambda: given(lambda: linear().requires_grad_(requires_grad=False)),
    "attention": lambda: given(attention),
    "hooks on activations": lambda: given(watching),
    "a buffer that moves": lambda: given(moving),
    "spectral norm": lambda: given(lambda: nn.utils.parametrizations.spectral_norm(linear())),
    "a hook in the build": lambda: declared(hooked),
    "numbers of Python and numpy": lambda: given(
        lambda: after(lambda _, x: x * random.random() + float(np.random.rand()))  # noqa: S311
    ),
    "quantized": lambda: given(quantized),
    "all in evaluation": lambda: from_sequential(
        nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), linear(CLASSES)).eval(),
        summed_loss,
    ),
    "recurrent": lambda: given(
        lambda: after(lambda m, x: m.cell(x), cell=nn.GRUCell(WIDTH, WIDTH))
    ),
}
WAYS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "one stage": ((1, 1), {}),
    "split backwards": ((3, 1), {"pipeline": {"split_backward": True}}),
    "recomputation, two replicas": ((1, 2), {"pipeline": {"checkpoint_activations": 1}}),
    "bf16": ((2, 1), {"precision": "bf16"}),
    "fp16, exact sums": ((1, 2), {"precision": "fp16", "samo": {"gradient": "exact"}}),
}


@pytest.mark.parametrize(("name", "way"), each_once(list(FINE), list(WAYS)))
@pytest.mark.filterwarnings("ignore:.*(non-full|batch_norm|an autograd kernel)")
def test_what_plain_torch_computes_alike_is_never_stopped(name: str, way: str) -> None:
    layout, sections = WAYS[way]
    if name == "spectral norm":  # whose own vectors are in fp32
        sections = {**sections, "precision": "fp32"}
    data: Dataset | None = None
    if name == "integers":
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(9, (24, 4), generator=generator)
        data = ArrayDataset(words, torch.randint(CLASSES, (24,), generator=generator))

    judged(FINE[name](), layout, data, **sections)


@pytest.mark.parametrize("way", WAYS)
def test_the_check_leaves_nothing_behind(way: str) -> None:
    """The same bits of losses, weights, moments and buffers as without, and of random numbers."""
    layout, sections = WAYS[way]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.calls = linear(), nn.BatchNorm1d(WIDTH), 0
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.dropout(self.norm(self.linear(x)))
            return x * random.random() + np.random.rand() * 0.1  # noqa: S311 - noise

    module = nn.Sequential(Mixed(), Mixed(), linear(CLASSES))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    traces = []
    for checks in (True, False):
        config = tiny_config(**{**BATCH, **sections, "train": {"steps": 3, "check_layers": checks}})
        torch.manual_seed(1)
        random.seed(1)
        ranks = train_in_process(
            *layout, from_sequential(module, summed_loss), config, vector_data()
        )
        traces.append((ranks, random.random(), torch.rand(()).item()))  # noqa: S311

    for (ours, trace), (theirs, expected) in zip(traces[0][0], traces[1][0], strict=True):
        assert_bitwise(trace, expected)
        calls = [
            [layer.module.calls for layer in each.layers if isinstance(layer.module, Mixed)]
            for each in (ours, theirs)
        ]
        assert calls[0] == calls[1]
    assert traces[0][1:] == traces[1][1:]
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    assert all(child.calls == 0 for child in module if isinstance(child, Mixed))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that are compared."""
    names: list[str] = []
    usual = layer_check._Comparison.reject_difference

    def note(self: Any) -> None:
        names.append(self.layer.spec.name)
        usual(self)

    monkeypatch.setattr(layer_check._Comparison, "reject_difference", note)
    return names


def test_alike_layers_are_compared_once_a_stage(compared: list[str]) -> None:
    def scaled(factor: float) -> nn.Module:
        return after(lambda m, x: x * m.factor, factor=factor)

    modules = [scaled(1.0), scaled(1.0), scaled(2.0), linear(), linear(), linear(CLASSES)]
    judged(from_sequential(modules, summed_loss))

    assert compared == ["0", "2", "3", "5"]


def test_alike_layers_of_transformers_are_compared_once(compared: list[str]) -> None:
    judged(small_llama(), data=token_data())

    assert compared == ["model.embed_tokens", "model.layers.0", "model.norm", "lm_head"]


def check_and_step(model: Model, data: Dataset, **sections: Any) -> list[int]:
    """The most bytes of the check, and of a step."""
    peaks: list[int] = []

    def measure(trainer: Trainer) -> None:
        step = trainer._step
        peaks.extend(peak_of_torch(work) for work in (step.check_layers, step.train_step))

    train_in_process(1, 1, model, tiny_config(**sections), data, before=measure)
    return peaks


@pytest.mark.parametrize("recomputed", [0, 1])
def test_the_check_needs_the_memory_of_a_step_and_of_one_layer(recomputed: int) -> None:
    width, samples, layers = 64, 256, 12

    class Wide(nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.factor = factor

        def forward(self, x: Tensor) -> Any:
            return x + self.down(torch.tanh(self.up(x))) * self.factor

    modules = [*map(Wide, range(layers)), nn.Linear(width, CLASSES)]
    check, step = check_and_step(
        from_sequential(modules, summed_loss),
        vector_data(2 * samples, width),
        batch={"global_batch_size": 2 * samples, "microbatch_size": samples},
        pipeline={"checkpoint_activations": recomputed},
        pruning={"sparsity": 0.0},
        train={"steps": 1},
    )
    boundary = samples * width * 4
    of_layer = 8 * boundary  # its inputs, outputs and what its backward needs
    assert layers * boundary < check <= step + of_layer


def test_the_check_of_a_large_vocabulary_copies_a_part_of_its_weight_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_check, "ENTRIES_AT_ONCE", 1 << 12)
    vocabulary = 1 << 14
    model = small_llama(vocab_size=vocabulary)
    weight = vocabulary * SMALL_LLAMA["hf"]["hidden_size"] * 4
    check, step = check_and_step(model, token_data(), pruning={"sparsity": 0.0})
    assert check <= step + 1.25 * weight  # the gradient of plain torch


@pytest.mark.parametrize(("seconds", "is_said"), [(4.0, True), (0.5, False)])
def test_a_check_of_more_than_a_second_says_how_long_it_took(
    seconds: float,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(0.0, seconds)))
    monkeypatch.setattr(layer_check, "time", clock)
    model = given(nn.Tanh)

    ran((1, 1), tiny_config(**BATCH), tmp_path, model=lambda _: model, data=vector_data())

    line = "compared 3 of 3 layers with plain torch in 4.0 s (train.check_layers)\n"
    assert (line in capsys.readouterr().out) == is_said
