"""Valid files made invalid: bytes, JSON values and YAML texts with a few places changed.

A seed decides which; Hypothesis draws it, since a separate draw for every choice would cost more
than the reading.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

DEEP = "a place for deep nesting"
"""Stands in for JSON that Python's own encoder could not write."""
_DEEP_TEXTS = ("[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 50_000)
_TEXTS = (
    *("", "a", "..", ".", "/", "../../../axsparse_fuzz", "/axsparse_fuzz", "~", "%s{}{0}"),
    *("a\0b", "a\r\nb", "a\u2028b", "\x1b[2J", "\ud800", "\u202e", "\U0001f600", "x" * 20_000),
    *("-", "nan", "1e999", "0x10", "manifest.json", "file:///etc/passwd", "*", "None", "true"),
)
_NUMBERS = (
    *(0, 1, -1, 8, 255, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e-320, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
_YAML = (
    *("[", "]", "{", "}", ":", "- ", "? ", "|", ">", "&a", "*a", "!!", "%YAML 1.1\n---\n"),
    *("...", "#", "\t", "\0", "\ufeff", "'", '"', "\\", "@", "&a [*a]", "*nowhere", "<<: *a"),
    *("!!python/object:os.system {}", "!!binary aGk=", "!!timestamp 2001-01-01", "!!int 0x10"),
    *('"\\uD800"', ".inf", ".nan", "0o7", "1_0", "9" * 5000, "[" * 1100, "{a: " * 1100),
    *("- " * 1100, "null", "~", "yes", "auto", "1:2", "2001-01-01", "a\nb: c"),
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: [*d, *d]",
)


def odd_text(rng: Random) -> str:
    """A text that somebody may not have thought of."""
    drawn = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in "abc")
    return rng.choice((drawn, rng.choice(_TEXTS)))


def odd_yaml(rng: Random) -> str:
    """The same, of YAML's special texts as well."""
    return rng.choice((rng.choice(_YAML), odd_text(rng), str(rng.choice(_NUMBERS))))


def odd_value(rng: Random) -> Any:
    """A value of JSON that is hardly wanted."""
    text, number = odd_text(rng), rng.choice(_NUMBERS)
    plain: Any = rng.choice((None, True, False, [], {}))
    return rng.choice((plain, number, text, [number, text], {text: number}, [number] * 65, DEEP))


def bytes_changed(rng: Random, data: bytes) -> bytes:
    """One to three places flipped, cut out, doubled or overwritten, or the end cut off."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(data))
        there = data[start : start + rng.choice((1, 2, 8, 100))]
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in there[:1]) + there[1:]
        special = rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\n"))
        new = rng.choice((flipped, b"", there * 2, rng.randbytes(rng.randint(1, 8)), special))
        rest = rng.choice((data[start + len(there) :],) * 6 + (b"",))
        data = data[:start] + new + rest
    return data


def json_changed(rng: Random, value: Any) -> Any:
    """One to three values of a nested one replaced, removed, renamed or taken from elsewhere."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder, key = _place(rng, value)
        if holder is None:
            return odd_value(rng)
        other, there = _place(rng, value)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[odd_text(rng)] = holder.pop(key)
            case 1:
                holder.insert(0, holder[key])
            case 2:
                holder[key] = copy.deepcopy(other[there])
            case 3 if isinstance(holder[key], str):
                holder[key] += odd_text(rng)
            case _:
                holder[key] = odd_value(rng)
    return value


def _place(rng: Random, value: Any) -> tuple[Any, Any]:
    """A random place in a nested value: who holds it, and the key; (None, None) at the top."""
    holder = key = None
    while isinstance(value, dict | list) and value:
        if holder is not None and rng.random() < 0.25:
            break
        holder = value
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = value[key]
    return holder, key


def json_text(rng: Random, value: Any) -> str:
    """A value as JSON, deep where it is to be; NaN and infinities as Python writes them."""
    return json.dumps(value).replace(f'"{DEEP}"', rng.choice(_DEEP_TEXTS))


def yaml_changed(rng: Random, text: str) -> str:
    """One to three values, keys, lines or places of a YAML text changed."""
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        number = rng.randrange(len(lines))
        line, odd = lines[number], odd_yaml(rng)
        key, _, value = line.partition(":")
        at = rng.randint(0, len(line))
        changed = (f"{key}: {odd}", f"{odd}:{value}", line[:at] + odd + line[at:], line.strip())
        lines[number] = rng.choice(changed)
        if rng.random() < 0.2:
            lines.insert(rng.randrange(len(lines)), line)
        text = "\n".join(lines)
    return text
