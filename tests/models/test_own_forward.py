"""Where a module with a forward of its own is cut, and which modules are refused."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from support import own_models
from support.commands import lines_beside, refusal
from support.own_models import Looped, images, noisy_images, words
from support.runs import summed_loss
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import Model
from axsparse.models.model_profile import profile
from axsparse.models.module_buffers import named_tensors
from axsparse.models.own_forward import from_module
from axsparse.models.sequential import OwnValues, Snapshot, plain_model
from axsparse.runtime.errors import ConfigError


def cut(module: nn.Module, data: Callable[[], Any] = images) -> Model:
    return from_module(module, summed_loss, lambda samples: data().read(np.arange(samples))[0])


@pytest.mark.parametrize(
    ("module", "data", "layers"),
    [
        (own_models.Vit, images, "stem blocks.0 blocks.1 blocks.2 head"),
        (own_models.Nested, images, "stem stages.0.0 stages.1.0 stages.1.1 head"),
        (own_models.Dit, noisy_images, "stem blocks.0 blocks.1 blocks.2 head"),
        (
            own_models.ResNet,
            images,
            "stem layer1.0 layer1.1 layer2.0 layer2.1 layer3.0 layer3.1 head",
        ),
        (
            own_models.Stages,
            images,
            "downsample_layers.0 behind.downsample_layers.0 stages.0 downsample_layers.1 "
            "behind.downsample_layers.1 stages.1 head",
        ),
        (own_models.Residual, images, "0 behind.0 1 behind.1 2 head"),
        (own_models.Gpt, words, "stem transformer.h.0 transformer.h.1 transformer.h.2 head"),
    ],
)
def test_members_are_layers_with_the_names_of_the_module(
    module: type[nn.Module], data: Callable[[], Any], layers: str
) -> None:
    model = cut(module(), data)

    found = profile(model)

    assert " ".join(layer.name for layer in found.layers) == layers
    names = {parameter.name for layer in found.layers for parameter in layer.parameters}
    assert names == {name for name, _ in module().named_parameters(remove_duplicate=False)}
    buffers = {buffer.name for layer in found.layers for buffer in layer.buffers}
    assert buffers == {name for name, _ in module().named_buffers()}
    assert found.layers[-1].kind == "head"


def test_a_sequential_with_a_forward_of_its_own_comes_back_as_one() -> None:
    module = own_models.Residual().eval()
    module[0].register_buffer("limit", torch.ones(1))
    vars(module[0].limit)["unit"] = "K"
    [inputs], _ = images().read(np.arange(3))

    back: Any = plain_model(cut(module), {}, module.state_dict())

    assert type(back) is own_models.Residual
    assert vars(back[0].limit) == {"unit": "K"}
    assert torch.equal(back(inputs), module(inputs))


def test_a_segment_is_costed_without_what_is_before_it() -> None:
    found = profile(cut(own_models.ResNet()))

    flops = {layer.name: layer.flops for layer in found.layers}
    assert flops["head"] == 2 * 16 * own_models.CLASSES
    assert flops["stem"] == 2 * 3 * 9 * 8 * 64


def test_the_module_is_left_as_it_was() -> None:
    module = own_models.ResNet()
    module.layer1.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(1)

    cut(module)

    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in before.items())
    assert module.training and not module.layer1.training and module.layer2.training
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def test_inputs_of_a_forward_that_writes_to_them_are_left_as_they_were() -> None:
    [inputs], _ = images().read(np.arange(2))
    before = inputs.clone()

    from_module(own_models.Centred(), summed_loss, lambda _: (inputs,))

    assert torch.equal(inputs, before)


@pytest.mark.parametrize(
    ("module", "data"),
    [(own_models.Windows, images), (own_models.Pooled, images), (own_models.Mixture, words)],
)
def test_batches_may_be_larger_than_the_watched_one(
    module: type[nn.Module], data: Callable[[], Any]
) -> None:
    whole = module()
    values: Any = data().read(np.arange(5))[0]
    expected, state = whole(*values), whole.state_dict()

    result = by_layers(cut(whole, data), state, *values)

    torch.testing.assert_close(result, expected)


def by_layers(
    model: Model, state: dict[str, Tensor], *values: Any, trains: bool | None = None
) -> Tensor:
    """The first result of the layers of a model, one after the other; `trains` is their mode."""
    for layer in model.layers:
        part = layer.build()
        if trains is not None:
            part.train(trains)
        own = {name: state[layer.full_name(name)] for name, _ in named_tensors(part)}
        values = torch.func.functional_call(part, own, tuple(values))
        values = values if isinstance(values, tuple) else (values,)
    result: Tensor = values[0]
    return result


class Reader(nn.Module):
    """Blocks for rows of any number; subclasses may treat more than 4 rows in another way."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Any = None) -> Any:
            x = x + torch.tanh(self.linear(x))
            if isinstance(scale, Tensor):
                return x * scale
            return x * 2 if scale in (True, 2, "long") else x

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x)

    def end(self, x: Tensor) -> Any:
        return x.tanh()

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.end(x)


class ToldOfLength(Reader):
    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x, x.shape[1] > 4)

    def end(self, x: Tensor) -> Any:
        return x


class ToldInWords(Reader):
    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x, "long" if x.shape[1] > 4 else "short")


class Cutting(Reader):
    """Blocks that return 4 rows at most, and a forward that counts what they return."""

    class Block(Reader.Block):
        def forward(self, x: Tensor, scale: Any = None) -> Any:
            return super().forward(x, scale)[:, :4]

    def forward(self, x: Tensor) -> Any:
        rows = 0
        for block in self.blocks:
            x = block(x)
            rows += x.shape[1]
        return self.stem(x) * rows


@pytest.mark.parametrize("module", [ToldOfLength, ToldInWords, Cutting])
def test_samples_may_be_longer_than_the_watched_ones(module: type[nn.Module]) -> None:
    whole = module()
    model = from_module(whole, summed_loss, lambda _: (torch.ones(2, 3, 8),))
    longer = torch.randn(3, 6, 8)

    result = by_layers(model, whole.state_dict(), longer)

    torch.testing.assert_close(result, whole(longer))


class ToldOfMode(Reader):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, self.training)
        return self.stem(x)


class ScaledInTraining(Reader):
    def call(self, block: nn.Module, x: Tensor) -> Any:
        return block(x, 2 if self.training else 1)


@pytest.mark.parametrize("module", [ToldOfMode, ScaledInTraining])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_arguments_may_depend_on_the_mode(
    module: type[nn.Module], given: bool, trains: bool
) -> None:
    whole, x = module().train(given), torch.randn(3, 4, 8)
    model = from_module(whole, summed_loss, lambda _: (torch.ones(2, 3, 8),))

    result = by_layers(model, whole.state_dict(), x, trains=trains)

    torch.testing.assert_close(result, whole.train(trains)(x))


class Averaging(Reader):
    """Averages in training, and draws, from a generator of torch's or of its own, if it is told
    to."""

    mean: Tensor

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.draws, self.own = draws, random.Random(3)  # noqa: S311 - no secret
        self.register_buffer("mean", torch.zeros(8))

    def call(self, block: nn.Module, x: Tensor) -> Any:
        x = block(x)
        if self.training and block is self.blocks[0]:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
            x = x + self.mean.clone()
            x = x + torch.randn_like(x) if self.draws == "torch's" else x
            x = x + self.own.random() if self.draws == "its own" else x
        return x


@pytest.mark.parametrize("draws", ["none", "torch's", "its own"])
def test_a_forward_may_average_and_draw_in_training(draws: str) -> None:
    module = Averaging(draws)
    from_module(module, summed_loss, lambda _: (torch.ones(2, 3, 8),))
    assert not module.get_buffer("mean").any()


class Activated(own_models.Looped):
    """Has an activation in its list by another name as well, which no training changes."""

    def __init__(self) -> None:
        super().__init__(range(4))
        self.act = nn.Tanh()
        self.blocks.append(self.act)


def test_a_member_without_state_may_have_two_names() -> None:
    module, x = Activated(), torch.randn(2, 3, 8, 8)

    model = from_module(module, summed_loss, lambda _: (x,))

    torch.testing.assert_close(by_layers(model, module.state_dict(), x), module(x))


class Counting(Reader):
    """Writes to a buffer of its own in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def end(self, x: Tensor) -> Any:
        self.get_buffer("calls").add_(1)
        return x.tanh()


def test_a_buffer_that_the_watched_forward_writes_to_starts_as_given() -> None:
    module = Counting()
    model = from_module(module, summed_loss, lambda _: (torch.ones(2, 3, 8),))

    assert isinstance(model.start, OwnValues)
    assert model.start.read("calls") == module.get_buffer("calls") == 0
    assert Snapshot(model.start).change(lambda *_: False, lambda *_: False) is None


class Keeping(Reader):
    """Keeps what it computes, as attention maps are kept for pictures."""

    class Block(Reader.Block):
        kept: Any = None

        def forward(self, x: Tensor, scale: Any = None) -> Any:
            self.kept = {"map": super().forward(x, scale)}
            return self.kept["map"]

    def call(self, block: nn.Module, x: Tensor) -> Any:
        self.features = x
        return block(x)

    def end(self, x: Tensor) -> Any:
        self.result = [x.tanh()]
        return self.result[0]


def test_a_forward_may_keep_what_it_computes() -> None:
    module, x = Keeping(), torch.randn(3, 4, 8)
    first: Any = module.blocks[0]
    first.kept = "nothing"
    model = from_module(module, summed_loss, lambda _: (torch.ones(2, 3, 8),))

    assert not hasattr(copy.deepcopy(module), "features")
    assert first.kept == "nothing"
    torch.testing.assert_close(by_layers(model, module.state_dict(), x), module(x))


class Rowed(Reader):
    """Blocks that are told the number of rows, which a hook of a module has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        x = self.drop(self.stem(x))
        rows: Any = self.stem.rows
        for block in self.blocks:
            x = block(x, rows)
        return x.tanh()


def test_hooks_that_record_get_contents_and_others_work_everywhere() -> None:
    module, seen, longer = Rowed(), list[float](), torch.randn(3, 2, 8)
    module.stem.register_forward_hook(lambda stem, _, x: setattr(stem, "rows", x.shape[1]))
    module.stem.register_forward_hook(lambda _, __, x: seen.append(x.sum().item()))
    module.drop.register_forward_hook(lambda _, __, x: seen.append(x.sum().item()))
    module.register_forward_pre_hook(lambda _, x: seen.append(x[0].sum().item()))
    model = from_module(module, summed_loss, lambda _: (torch.ones(2, 3, 8),))
    seen.clear()

    result = by_layers(model, module.state_dict(), longer)

    assert len(seen) == 3
    torch.testing.assert_close(result, module(longer))


def parametrized_head() -> nn.Module:
    """A head that is larger than the blocks, with a list of its own."""
    reader = ToldInWords()
    reader.register_forward_hook(lambda reader, _, x: reader.head(x))
    reader.head = weight_norm(nn.Linear(8, 40))
    return reader


def forward_on_the_instance() -> Any:
    reader: Any = Reader()
    reader.forward = MethodType(ToldOfMode.forward, reader)
    return reader


@pytest.mark.parametrize("make", [parametrized_head, forward_on_the_instance])
@pytest.mark.parametrize("trains", [True, False])
def test_modules_may_be_changed_by_what_is_put_on_them(
    make: Callable[[], nn.Module], trains: bool
) -> None:
    module, x = make(), torch.randn(3, 4, 8)
    model = from_module(module, summed_loss, lambda _: (torch.ones(2, 3, 8),))

    result = by_layers(model, module.state_dict(), x, trains=trains)

    assert model.layers[-1].name == "head"
    torch.testing.assert_close(result, module.train(trains)(x))


class OfItsKind(Reader):
    """Looks at the classes of its blocks."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) if isinstance(block, Reader.Block) else -block(x)
        return self.stem(x)


def test_a_forward_may_look_at_the_classes_of_its_blocks() -> None:
    model = from_module(OfItsKind(), summed_loss, lambda _: (torch.ones(2, 3, 8),))

    assert [layer.name for layer in model.layers] == ["blocks.0", "blocks.1", "head"]


class ScaledIfLong(Reader):
    def forward(self, x: Tensor) -> Any:
        scale = torch.full_like(x, 2.0) if x.shape[1] > 4 else None
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale)
        return x.tanh()


class ChangedBetween(Reader):
    def call(self, block: nn.Module, x: Tensor) -> Any:
        x = block(x)
        return x * 1.5 if x.shape[1] > 4 and block is self.blocks[0] else x


class WrittenBetween(Reader):
    def call(self, block: nn.Module, x: Tensor) -> Any:
        x = block(x)
        return x.mul_(1.5) if x.shape[1] > 4 and block is self.blocks[0] else x


class ChangedAtTheEnd(Reader):
    def end(self, x: Tensor) -> Any:
        return x * 1.5 if x.shape[1] > 4 else x


class TurnedIfLong(Reader):
    def forward(self, x: Tensor) -> Any:
        is_long, x = x.shape[1] > 4, self.stem(x)
        for block in reversed(self.blocks) if is_long else self.blocks:
            x = block(x)
        return x.tanh()


class ShorterIfLong(Reader):
    """Gives its blocks a number that the shape tells, so that each of them asks for it."""

    def forward(self, x: Tensor) -> Any:
        is_long, x = x.shape[1] > 4, self.stem(x)
        for block in self.blocks[: 1 if is_long else 2]:
            x = block(x, 2.0 if is_long else 1.0)
        return x.tanh()


class Answering(Reader):
    class Block(Reader.Block):
        def forward(self, x: Tensor, scale: Any = None) -> Any:
            return super().forward(x, scale), x.shape[1] > 4

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x, is_long = block(x)
        return x * 2 if is_long else x.tanh()


REFUSED_IF_LONG: dict[str, type[nn.Module]] = {
    "a tensor that was None": ScaledIfLong,
    "computing between blocks": ChangedBetween,
    "writing between blocks": WrittenBetween,
    "computing behind the blocks": ChangedAtTheEnd,
    "blocks in another order": TurnedIfLong,
    "fewer blocks": ShorterIfLong,
    "another answer": Answering,
}


@pytest.mark.parametrize(("case", "module"), REFUSED_IF_LONG.items())
def test_a_forward_that_shapes_change_is_refused_at_the_first_such_samples(
    case: str, module: type[nn.Module]
) -> None:
    whole = module()
    model = from_module(whole, summed_loss, lambda _: (torch.ones(2, 3, 8),))
    state = whole.state_dict()
    short = torch.ones(3, 4, 8)
    torch.testing.assert_close(by_layers(model, state, short), whole(short))

    found = refusal(lambda: by_layers(model, state, torch.ones(3, 6, 8)), ConfigError)

    assert found == lines_beside(__file__)[case]


class Twice(nn.Module):
    """One norm before and behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(192)
        self.blocks = nn.ModuleList([nn.Linear(192, 192)])

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.blocks[0](self.norm(x.flatten(1))))


class Skips(nn.Module):
    """Blocks that are given the result of a block further up."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(192, 192)

        def forward(self, x: Tensor, skip: Tensor) -> Any:
            return self.fc(x) + skip

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Linear(192, 192) for _ in range(2))
        self.ups = nn.ModuleList(self.Up() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        first = self.downs[0](x.flatten(1))
        second = self.ups[0](self.downs[1](first), first)
        return self.ups[1](second, first)


class Hooked(nn.Module):
    """A list of which a hook makes gradients smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(192, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.body.register_full_backward_hook(self.soften)

    def soften(self, _: nn.Module, given: Any, __: Any) -> Any:
        return None if given[0] is None else (0.1 * given[0],)

    def forward(self, x: Tensor) -> Any:
        return self.body(self.stem(x.flatten(1)))


class Checkpointed(Reader):
    """Runs its blocks in a checkpoint that is a function of autograd."""

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(1)[:, :8]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.stem(x)


class Mixed(Reader):
    """Runs its blocks in half precision."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.stem(x.flatten(1)[:, :8])
            for block in self.blocks:
                x = block(x)
            return x.float()


def locked() -> nn.Module:
    module = own_models.Vit()
    module.blocks[0].lock = threading.Lock()  # type: ignore[assignment]
    return module


class Counted(own_models.Vit):
    """Notes its calls before and behind its blocks, those in evaluation by themselves."""

    calls, finished, scale = 0, 0, 1.0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if not self.training:
            self.last = f"{len(x)} samples"
        result = super().forward(x) * self.scale
        self.finished += 1
        return result


def test_numbers_that_the_forward_writes_may_change_in_the_given_module_and_others_may_not() -> (
    None
):
    module = Counted()
    start = cut(module).start
    assert isinstance(start, OwnValues)
    seen = Snapshot(start)

    module.eval()(images().read(np.arange(3))[0][0])

    assert seen.change(lambda *_: False, lambda *_: False) is None
    module.scale = 2.0
    assert seen.change(lambda *_: False, lambda *_: False) == "scale"


class Filled(own_models.Vit):
    """Fills a view of a tensor that it makes without a device."""

    def forward(self, x: Tensor) -> Any:
        padded = torch.zeros(len(x), 3, 8, 8)
        padded[:, :, 1:].copy_(x[:, :, 1:])
        return super().forward(padded)


class Packed(own_models.Vit):
    """Has quantized weights before its blocks, which no layer behind them can compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.ao.nn.quantized.dynamic.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.packed(x))


def one_norm() -> nn.Module:
    """Two blocks have one batch norm, whose statistics are those of both."""
    vit = own_models.Vit()
    norm = nn.BatchNorm1d(5, affine=False)
    vit.blocks[0].norm1 = vit.blocks[1].norm1 = norm
    return vit


def one_buffer() -> nn.Module:
    """The first block changes a buffer that is the second's as well."""
    vit = own_models.Vit()
    for block in (vit.blocks[0], vit.blocks[1]):
        block.register_buffer("seen", torch.zeros(()))
    vit.blocks[1].seen = vit.blocks[0].seen
    vit.blocks[0].register_forward_hook(lambda block, *_: block.seen.add_(1) and None)
    return vit


def test_an_embedding_may_have_sparse_gradients() -> None:
    module = own_models.Gpt()
    wpe: Any = module.transformer["wpe"]
    wpe.sparse = True

    assert len(cut(module, words).layers) == 5


KEEP = torch.arange(own_models.WORDS).remainder(2).unsqueeze(-1)
EVEN = (lambda gradient: gradient * KEEP, lambda gradient: gradient * 0.5, lambda _: None)
UNEVEN = (
    lambda gradient: gradient.clamp(-2e-3, 2e-3),
    lambda gradient: gradient * (100 / gradient.norm()).clamp(max=1),
    lambda gradient: gradient + torch.randn_like(gradient),
    torch.sign,
)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_at_both_ends_are_those_that_sum(kind: str) -> None:
    def cut_with(hook: Callable[[torch.Tensor], Any]) -> None:
        module: Any = own_models.Gpt()

        def late(parameter: torch.Tensor) -> None:
            parameter.grad = hook(parameter.grad)  # type: ignore[arg-type]

        getattr(module.lm_head.weight, kind)(hook if kind == "register_hook" else late)
        cut(module, words)

    for hook in EVEN:
        cut_with(hook)
    for hook in UNEVEN:
        with pytest.raises(ConfigError, match=r"^model: transformer\.wte\.weight and lm_head\.wei"):
            cut_with(hook)


class Listed(nn.Module):
    """Layers in a list of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> Any:
        return self.steps[0](x)


class HookedInTraining(own_models.Looped):
    """Makes the gradient between two blocks smaller, in training."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](self.stem(x.flatten(1)))
        if self.training and x.requires_grad:
            x.register_hook(lambda gradient: 0.1 * gradient)
        return self.out(self.blocks[2](self.blocks[1](x)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "a U-shaped network": (own_models.UNet, images),
    "a block far up": (Skips, images),
    "sums over layers": (own_models.Sums, images),
    "another order": (lambda: Looped([2, 1, 0]), images),
    "a block twice": (lambda: Looped([0, 1, 2, 1]), images),
    "values decide": (own_models.ByValue, images),
    "a count decides": (own_models.ByCount, images),
    "a made tensor is written to": (Filled, images),
    "blocks are written to": (own_models.Told, images),
    "a list whose hook writes gradients": (Hooked, images),
    "a hook in training": (lambda: HookedInTraining(range(3)), images),
    "no copy": (locked, images),
    "a list of Python's": (Listed, images),
    "a module at both ends": (Twice, images),
    "one norm of two blocks": (one_norm, images),
    "one buffer of two blocks": (one_buffer, images),
    "quantized": (Packed, images),
    "a reentrant checkpoint": (Checkpointed, images),
    "autocast around blocks": (Mixed, images),
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", REFUSED)
def test_a_forward_of_another_form_is_refused_by_name(case: str) -> None:
    module, data = REFUSED[case]
    torch.manual_seed(1)

    line = refusal(lambda: cut(module(), data), ConfigError)

    assert line == lines_beside(__file__)[case]
