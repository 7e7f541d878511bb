"""Errors for users: each has its exit code, is one line, and is named by a test."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from pathlib import Path

from support.page_blocks import sources

from axsparse.runtime import errors

TESTS = Path(__file__).parents[1]
FRAGMENT = 12
"""Letters of a message that a test has to name, at least."""


def error_classes() -> dict[str, type[errors.AxsparseError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AxsparseError)
    }


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    drawn = re.findall(r"(\w+Error) +(\d+)", errors.__doc__ or "")

    assert {name: int(code) for name, code in drawn} == {
        name: cls.exit_code for name, cls in error_classes().items()
    }


def literal_parts(message: ast.expr) -> tuple[str, ...]:
    """The constant pieces of a string or f-string; none of any other expression."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return (message.value,)
    if isinstance(message, ast.JoinedStr):
        return tuple(
            part.value
            for part in message.values
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
    return ()


def message_parts(call: ast.Call) -> tuple[str, ...]:
    """The constant pieces of the error that a call makes; none of a call that makes none."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name in error_classes() and call.args:
        return literal_parts(call.args[0])
    if name in ("writing", "reading"):
        what, mend = call.args
        *before, last = literal_parts(what) or ("",)
        said = f" cannot be {'written' if name == 'writing' else 'read'} ("
        ends_literally = isinstance(what, ast.JoinedStr) and isinstance(
            what.values[-1], ast.Constant
        )
        middle = (last + said,) if ends_literally else (last, said)
        return (*before, *middle, *(f"); {part}" for part in literal_parts(mend)))
    return ()


def messages() -> dict[tuple[str, ...], str]:
    """The constant pieces of every user-facing error's text, and where it stands."""
    return {
        parts: f"{module}:{node.lineno}"
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (parts := message_parts(node))
    }


def fragments(parts: tuple[str, ...]) -> set[str]:
    """All stretches of FRAGMENT letters."""
    return {part[at : at + FRAGMENT] for part in parts for at in range(len(part) - FRAGMENT + 1)}


def named_in_tests() -> list[str]:
    """Every text and string of the tests, patterns as the text they match, and values of f-strings
    as "…"."""
    found = [path.read_text(encoding="utf-8") for path in TESTS.rglob("*.txt")]
    for path in sorted(TESTS.rglob("*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [literal_parts(part) or ("…",) for part in node.values]
                found.append("".join(itertools.chain.from_iterable(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [re.sub(r"\\(\W)", r"\1", text) for text in found]


def test_the_text_of_every_user_facing_error_is_matched_by_a_test() -> None:
    texts = named_in_tests()
    together = "\n".join(texts)
    known = messages()
    uses = Counter(fragment for parts in known for fragment in fragments(parts))
    unmatched = []
    for parts, where in known.items():
        # What it shares with another message would prove nothing, unless all of it is named.
        alone = (fragment for fragment in fragments(parts) if uses[fragment] == 1)
        whole = re.compile(".+".join(map(re.escape, parts)))
        if not any(fragment in together for fragment in alone) and not any(
            whole.search(text) for text in texts
        ):
            unmatched.append(f"{where}: {'…'.join(parts)}")

    assert not unmatched, "no test names:\n" + "\n".join(unmatched)


def test_user_facing_errors_are_one_line() -> None:
    assert [where for parts, where in messages().items() if "\n" in "".join(parts)] == []
