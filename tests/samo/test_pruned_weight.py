"""Models whose weights rest as kept entries: the same numbers, by the same modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd import forward_ad

import axsparse as ax
from axsparse.runtime.errors import ConfigError
from axsparse.samo import pruned_weight
from axsparse.samo.pruned_weight import PrunedWeight, multiplied_weights

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
    "falcon": {"num_attention_heads": 4},
    "gpt_oss": {
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
    },
}
COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300, "bos_token_id": 1}


def prune(model: nn.Module, sparsity: float) -> nn.Module:
    with torch.no_grad():
        for _, _, weight, _ in multiplied_weights(model):
            weight[torch.rand_like(weight, dtype=torch.float32) < sparsity] = 0
    return model


def linear_of(sparsity: float, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    made = nn.Linear(64, 48, dtype=dtype)
    prune(made, sparsity)
    return made


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.parametrize("kind", SETTINGS)
def test_transformers_models_compute_the_same(kind: str, sparsity: float) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(
        kind, **{**COMMON, "eos_token_id": None, **SETTINGS[kind]}
    )
    torch.manual_seed(5)
    made = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    dense: Any = prune(made, sparsity)
    expected: Any = copy.deepcopy(dense).float()
    model: Any = ax.accelerate(copy.deepcopy(dense))
    assert any(isinstance(weight, PrunedWeight) for weight in model.parameters())
    tokens = torch.randint(300, (1, 12))
    with torch.no_grad():
        exact, ours, theirs = (each(tokens).logits.float() for each in (expected, model, dense))
        # A prompt of more tokens than are multiplied at once.
        long = torch.randint(300, (1, 40))
        torch.testing.assert_close(model(long).logits, dense(long).logits, atol=0.02, rtol=0.02)
    assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **how), dense.generate(tokens, **how))


def test_whatever_else_is_asked_of_a_weight_is_dense() -> None:
    linear = linear_of(0.7)
    dense = linear.weight.detach().clone()
    weight: Any = ax.accelerate(linear).weight
    assert isinstance(weight, PrunedWeight)
    assert weight.shape == dense.shape
    assert weight.dtype == dense.dtype
    assert not weight.requires_grad
    assert torch.equal(weight + 1, dense + 1)
    assert type(weight + 1) is Tensor
    assert torch.equal(weight.abs().sum(0), dense.abs().sum(0))
    assert torch.equal(torch.stack([weight, weight]), torch.stack([dense, dense]))
    x = torch.randn(2, 64).bfloat16()
    for product in (
        lambda w: x @ w.T,
        lambda w: torch.matmul(x, w.t()),
        lambda w: torch.addmm(torch.ones(48).bfloat16(), x, w.T),
        lambda w: F.linear(x, w),
        lambda w: w @ x.T,
    ):
        torch.testing.assert_close(product(weight), product(dense), atol=0.05, rtol=0.02)
    assert "PrunedWeight((48, 64)" in repr(weight)


BIASES = {"row": (48,), "rows": (4, 48), "one row": (1, 48), "column": (4, 1), "1": (1,), "0": ()}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_any_shape_that_torch_adds_is_added(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    dense = linear_of(0.7).weight.detach().to(dtype)
    x, bias = torch.randn(4, 64, dtype=dtype), torch.randn(shape, dtype=dtype)
    pruned = PrunedWeight.of(dense)

    for ours, theirs in (
        (F.linear(x, pruned, bias), F.linear(x, dense, bias)),
        (torch.addmm(bias, x, pruned.t()), torch.addmm(bias, x, dense.t())),
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(5,), (2, 4, 48)])
def test_a_bias_that_torch_does_not_add_is_refused_as_by_torch(shape: tuple[int, ...]) -> None:
    pruned, x = PrunedWeight.of(linear_of(0.7, torch.float32).weight), torch.randn(4, 64)

    with pytest.raises(RuntimeError, match="size"):
        torch.addmm(torch.randn(shape), x, pruned.t())


def derivative(linear: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        made = linear(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(made).tangent


def in_half_precision(linear: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(x)


USES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "forward mode": derivative,
    "autocast": in_half_precision,
    "trace": lambda linear, x: torch.jit.trace(linear, x)(2 * x),
    "vmap": lambda linear, x: torch.func.vmap(linear)(x),
    "jacobian": lambda linear, x: torch.func.jacfwd(linear)(x[0]),
    "names": lambda linear, x: F.linear(input=x, weight=linear.weight),
    "other": lambda linear, x: torch.matmul(x, other=linear.weight.t()),
    "out": lambda linear, x: torch.matmul(x, linear.weight.detach().t(), out=torch.empty(4, 48)),
    "meta": lambda linear, x: F.linear(x.to("meta"), linear.weight).shape.numel(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_transformations_traces_and_other_names_get_the_dense_weight(
    use: Callable[[nn.Linear, Tensor], Any],
) -> None:
    dense, x = linear_of(0.7, torch.float32), torch.randn(4, 64)
    with torch.no_grad():
        dense.weight.copy_(dense.weight.bfloat16())

    sparse: Any = ax.accelerate(copy.deepcopy(dense))
    theirs, ours = use(dense, x), use(sparse, x)

    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_accelerated_model_can_be_compiled() -> None:
    dense = prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), 0.7)
    for weight in dense.parameters():
        weight.copy_(weight.bfloat16())
    x = torch.randn(2, 5, 64)

    compiled = torch.compile(ax.accelerate(copy.deepcopy(dense)), backend="eager")

    torch.testing.assert_close(compiled(x), dense(x), atol=1e-5, rtol=0)


def test_gradients_of_inputs_are_torchs() -> None:
    linear = linear_of(0.6, torch.float32)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.bfloat16())
    plain = copy.deepcopy(linear)
    fast = ax.accelerate(linear)
    x, y = (torch.ones(2, 64, requires_grad=True) for _ in range(2))
    fast(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad if y.grad is not None else torch.empty(0))


def test_a_pruned_weight_can_be_neither_changed_nor_saved(tmp_path: Path) -> None:
    model = ax.accelerate(linear_of(0.6))
    with pytest.raises(TypeError, match="cannot be changed"), torch.no_grad():
        model.weight.zero_()  # type: ignore[operator]
    for save in (torch.save, save_file):
        with pytest.raises(ConfigError, match="cannot be saved; save it before, or copy the fold"):
            save(model.state_dict(), tmp_path / "model")


def test_a_change_of_type_keeps_it_pruned() -> None:
    linear = linear_of(0.6)
    fast = ax.accelerate(linear).float()
    assert isinstance(fast.weight, PrunedWeight)
    x = torch.randn(1, 64)
    torch.testing.assert_close(fast(x), F.linear(x, fast.weight.expanded(), linear.bias))


def test_what_is_tied_dense_or_an_embedding_stays() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(48, 64), nn.Linear(64, 48, bias=False)
    model.head.weight = model.embedding.weight
    model.dense, model.pruned, model.conv = nn.Linear(9, 9), linear_of(0.5), nn.Conv1d(8, 8, 3)
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.conv.weight.zero_()
    ax.accelerate(model)
    found = {name for name, one in model.named_parameters() if isinstance(one, PrunedWeight)}
    assert found == {"pruned.weight"}


def test_one_weight_of_two_layers_is_held_once() -> None:
    first, second = linear_of(0.5), nn.Linear(64, 48)
    second.weight = first.weight
    ax.accelerate(nn.ModuleList([first, second]))
    assert first.weight is second.weight


def test_a_dense_model_is_said_to_be_one() -> None:
    with pytest.warns(UserWarning, match="no weight has enough zeros; the model stays dense"):
        ax.accelerate(nn.Linear(4, 4))


def test_what_the_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruned_weight, "has_loops", lambda: False)
    with pytest.warns(UserWarning, match="numba or AVX2 is missing"):
        ax.accelerate(linear_of(0.5))
