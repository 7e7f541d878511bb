"""Random numbers keyed by what they are for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axsparse.runtime.seeds import keyed_seed, preserved_rng, seed_all

keys = st.lists(
    st.one_of(st.integers(), st.text(st.characters(exclude_characters="\x1f", codec="utf-8"))),
    max_size=4,
)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert keyed_seed(1234, "block3.fc1.weight", "init") == 6869386338117839387


@settings(max_examples=100, deadline=None, derandomize=True)
@example([1], ["1"])
@example([11], [1, 1])
@given(keys, keys)
def test_different_keys_give_different_seeds(one: list[int | str], other: list[int | str]) -> None:
    assert (keyed_seed(*one) == keyed_seed(*other)) == (one == other)


def test_torchs_own_generator_starts_from_a_key_as_from_its_seed() -> None:
    torch.manual_seed(keyed_seed(1, "a"))
    expected = torch.rand(4)

    with preserved_rng(is_seeded=True):
        seed_all(1, "a")
        drawn = torch.rand(4)

    assert torch.equal(drawn, expected)


def test_torchs_own_generator_is_put_back_even_after_a_failure() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def draw_and_fail() -> None:
        with preserved_rng():
            torch.rand(100)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()

    assert torch.equal(torch.rand(2), expected)
