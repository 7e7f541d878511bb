"""Lists of actions as text, such as "F0 F1 B0"."""

from __future__ import annotations

from collections.abc import Iterable

from axsparse.pipeline.policy import LETTERS, Action


def to_text(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def from_text(text: str) -> list[Action]:
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return [Action(kinds[word[0]], int(word[1:])) for word in text.split()]
