"""The chunked cross entropy equals the one of full logits, and never holds all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.allocated import peak_of_torch
from support.devices import AVAILABLE, pretend
from support.exhaustive import by_default
from torch import Tensor

from axsparse.models import losses
from axsparse.models.losses import (
    compiled,
    distillation,
    linear_cross_entropy,
    logits_at_a_time,
    reject_foreign_words,
    summed_cross_entropy,
)
from axsparse.planner.profiled_model import DISTILLED_BYTES
from axsparse.runtime.targets import IGNORED

TOKENS, HIDDEN, WORDS = 24, 16, 100
FP32_TOLERANCE = 1e-5
"""Chunks sum over the words in another order (7e-7 seen)."""
ROUNDINGS = 1.3
"""Bound of the error with chunks, relative to the error with full logits, both measured against
fp32. With chunks, the gradient of the hidden states is rounded to bf16 once more per chunk (1.08
seen)."""


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets chunks of 28 words, so that there are three full ones and a smaller one."""
    monkeypatch.setattr(losses, "CHUNK_WORDS", 28)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", TOKENS)


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator)
    weight = torch.randn(WORDS, HIDDEN, generator=generator)
    targets = torch.randint(WORDS, (2, TOKENS // 2), generator=generator)
    # These words lie at the bounds of chunks, and one token does not count.
    targets.view(-1)[:5] = torch.tensor([0, 27, 28, WORDS - 1, IGNORED])
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return summed_cross_entropy(F.linear(hidden, weight), targets)


def gradients(loss: Tensor, *inputs: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs, torch.tensor(factor))


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_chunks_give_loss_and_gradients_of_whole_logits(size: float) -> None:
    """Also of logits that are too large for an exponential."""
    hidden, weight, targets = case()
    hidden = (hidden.detach() * size).requires_grad_()

    loss, expected = linear_cross_entropy(hidden, weight, targets), whole(hidden, weight, targets)

    torch.testing.assert_close(loss, expected, rtol=FP32_TOLERANCE, atol=0)
    ours = gradients(loss, hidden, weight, factor=0.125)
    theirs = gradients(expected, hidden, weight, factor=0.125)
    for mine, wanted in zip(ours, theirs, strict=True):
        within = FP32_TOLERANCE * float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted, rtol=FP32_TOLERANCE, atol=within)


@pytest.mark.parametrize("words", [200, 300])
def test_targets_of_one_byte_are_words_like_any_other(words: int) -> None:
    """Torch compares 8-bit integers modulo 256: -100 would be the word 156, and 300 be 44."""
    logits = torch.randn(3, words, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([5, 156, 199])

    small, large = (
        distillation([logits], [logits], given, share=0.0, temperature=1.0)
        for given in (targets.to(torch.uint8), targets)
    )

    assert torch.equal(small, large)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_of_half_precision_err_no_more_than_whole_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    hidden, weight, targets = case(dtype)
    exact = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    truth = gradients(whole(*exact, targets), *exact)

    def errors(loss: Tensor) -> list[float]:
        found = gradients(loss, hidden, weight)
        assert [gradient.dtype for gradient in found] == [dtype, dtype]
        return [
            float((gradient.float() - true).norm() / true.norm())
            for gradient, true in zip(found, truth, strict=True)
        ]

    at_once = errors(linear_cross_entropy(hidden, weight, targets))
    monkeypatch.setattr(losses, "CHUNK_WORDS", 10)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", TOKENS)
    in_chunks = errors(linear_cross_entropy(hidden, weight, targets))

    assert in_chunks[0] <= ROUNDINGS * at_once[0]
    assert in_chunks[1] == pytest.approx(at_once[1], rel=1e-3), "products over all tokens"


@pytest.mark.usefixtures("chunked")
def test_the_loss_scale_acts_before_gradients_are_rounded() -> None:
    hidden = torch.tensor([[8.0, 0.0]], dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(WORDS, 2, dtype=torch.float16)
    weight[:, 0] = -1.0
    weight[0, 0] = 1.0
    weight.requires_grad_()

    (gradient,) = gradients(
        linear_cross_entropy(hidden, weight, torch.tensor([0])), weight, factor=65536.0
    )

    assert gradient[1, 0].item() == pytest.approx(8 * 65536 * math.exp(-16), rel=1e-2)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_costs_no_gradient(frozen: int) -> None:
    hidden, weight, targets = case()
    expected = gradients(linear_cross_entropy(hidden, weight, targets), hidden, weight)
    inputs = hidden, weight
    inputs[frozen].requires_grad_(False)

    (gradient,) = gradients(linear_cross_entropy(*inputs, targets), inputs[1 - frozen])

    assert torch.equal(gradient, expected[1 - frozen])


@pytest.mark.usefixtures("chunked")
def test_hidden_states_of_another_type_are_rounded_to_the_weights() -> None:
    """As Mamba of transformers has them, whose residuals are in fp32."""
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4).bfloat16()
    targets = torch.tensor([0, 4, 2])

    found = linear_cross_entropy(hidden, weight, targets)
    taught = distillation((hidden, weight), (hidden, weight), targets, share=0.5, temperature=1.0)

    assert torch.equal(found, linear_cross_entropy(hidden.bfloat16(), weight, targets))
    assert taught == pytest.approx(0.5 * found.item(), rel=1e-2)


@pytest.mark.usefixtures("chunked")
def test_overflow_in_the_hidden_states_is_seen_in_the_loss() -> None:
    hidden, weight, targets = case()
    with torch.no_grad():
        hidden[0, 0, 0] = torch.inf

    assert not linear_cross_entropy(hidden, weight, targets).isfinite()


@pytest.mark.skipif(not AVAILABLE, reason="this torch knows no device written in Python")
@pytest.mark.parametrize("token", [5, -1, -100, 4])
def test_a_token_that_is_no_word_is_refused_on_a_device_by_torch(token: int) -> None:
    """The host does not read the answer, and an ignored target is one that a loss has."""
    tokens = torch.tensor([0, token]).to(pretend())

    for ignored in (None, -100):
        if token == 4 or token == ignored:
            reject_foreign_words(tokens, 5, ignored)
            continue
        with pytest.raises(RuntimeError, match="a token is no word of a vocabulary of 5"):
            reject_foreign_words(tokens, 5, ignored)


def test_one_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, words = 256, 8, 2048
    monkeypatch.setattr(losses, "CHUNK_WORDS", words)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", tokens * words)
    hidden, weight = (
        torch.randn(n, width).bfloat16().requires_grad_() for n in (tokens, 4 * words)
    )
    targets = torch.randint(4 * words, (tokens,))
    chunk = tokens * words

    def there() -> Tensor:
        with torch.no_grad():
            return linear_cross_entropy(hidden, weight, targets)

    def there_and_back() -> None:
        linear_cross_entropy(hidden, weight, targets).backward()
        hidden.grad = weight.grad = None

    # fp32 logits, the bf16 logits that they are made of, and the exponentials of their sum.
    assert peak_of_torch(there) < (4 + 4 + 1) * chunk
    # The products that are summed over chunks are as small as the hidden states.
    assert peak_of_torch(there_and_back) < (4 + 4 + 1) * chunk


@pytest.mark.parametrize(("tokens", "words"), [(4, 100), (1024, 2048), (1024, 2049), (5000, 3000)])
def test_so_many_logits_are_held_at_a_time(
    tokens: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    linear = F.linear

    def counting(hidden: Tensor, weight: Tensor) -> Tensor:
        sizes.append(hidden.shape[0] * weight.shape[0])
        return linear(hidden, weight)

    monkeypatch.setattr(F, "linear", counting)

    linear_cross_entropy(
        torch.ones(tokens, 1), torch.ones(words, 1), torch.zeros(tokens, dtype=torch.long)
    )

    assert max(sizes) == logits_at_a_time(tokens, words)


# -- the fused loss -------------------------------------------------------------------------


def test_a_fused_loss_has_the_loss_and_the_gradients_of_chunks(
    monkeypatch: pytest.MonkeyPatch, chunked: None
) -> None:
    fused: list[int] = []

    def note(function: Any, **options: Any) -> Any:
        def call(*tensors: Tensor) -> Any:
            fused.append(tensors[-1].numel())
            return function(*tensors)

        return call

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(losses, "_is_on_host", lambda hidden: False)
    monkeypatch.setattr(losses, "COMPILED_LOGITS", TOKENS * WORDS)
    hidden, weight, targets = case()
    expected = linear_cross_entropy(hidden, weight, targets)
    loss = compiled(linear_cross_entropy)

    found = loss(hidden, weight, targets)

    torch.testing.assert_close(found, expected, rtol=FP32_TOLERANCE, atol=0)
    both = (gradients(each, hidden, weight) for each in (found, expected))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    assert fused == [TOKENS]
    monkeypatch.setattr(losses, "COMPILED_LOGITS", TOKENS * WORDS - 1)
    assert torch.equal(loss(hidden, weight, targets), expected)
    assert fused == [TOKENS], "more logits than it may keep are computed by chunks"


# -- the divergence from a teacher ---------------------------------------------------------------


def plain(own: Tensor, taught: Tensor, targets: Tensor, share: float, temperature: float) -> Tensor:
    counts = targets != IGNORED
    learnt, known = ((each[counts] / temperature).log_softmax(-1) for each in (own, taught))
    apart = F.kl_div(learnt, known, reduction="sum", log_target=True)
    hard = F.cross_entropy(own[counts], targets[counts], reduction="sum")
    return (1 - share) * hard + share * temperature**2 * apart


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("in_products", [False, True])
def test_the_divergence_in_chunks_is_that_of_full_logits(
    share: float, temperature: float, in_products: bool
) -> None:
    hidden, weight, targets = case()
    generator = torch.Generator().manual_seed(1)
    sizes = ((2, TOKENS // 2, 7), (WORDS, 7))  # hidden states of another width
    hints, teaching = (torch.randn(size, generator=generator) for size in sizes)
    logits = F.linear(hints, teaching)
    expected = plain(F.linear(hidden, weight), logits, targets, share, temperature)
    own = (hidden, weight) if in_products else (F.linear(hidden, weight),)
    taught = (hints, teaching) if in_products else (logits,)

    loss = distillation(own, taught, targets, share=share, temperature=temperature)

    torch.testing.assert_close(loss, expected, rtol=FP32_TOLERANCE, atol=0)
    ours = gradients(loss, hidden, weight, factor=0.125)
    theirs = gradients(expected, hidden, weight, factor=0.125)
    torch.testing.assert_close(ours, theirs, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


@pytest.mark.parametrize(
    "dtype", by_default([torch.float32], [torch.float32, torch.bfloat16]), ids=str
)
def test_the_divergence_never_has_all_logits(dtype: torch.dtype) -> None:
    tokens, words, width = 512, 20_000, 8
    hidden, weight = (torch.randn(n, width).to(dtype).requires_grad_() for n in (tokens, words))
    taught = [torch.randn(n, width).to(dtype) for n in (tokens, words)]
    targets = torch.randint(words, (tokens,))

    def step() -> None:
        distillation((hidden, weight), taught, targets, share=0.5, temperature=2.0).backward()

    step()  # Gradients are there from now on.
    peak = peak_of_torch(step) - weight.nbytes - 3 * hidden.nbytes

    planned = DISTILLED_BYTES * logits_at_a_time(tokens, words)
    assert 0.6 * planned < peak <= planned < 4 * tokens * words
