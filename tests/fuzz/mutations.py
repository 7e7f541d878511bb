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
    *("", " ", "a", "..", ".", "/", "../../../axsparse_fuzz", "/axsparse_fuzz", "~", "%s{}{0}"),
    *("..\\axsparse", "a\0b", "a\nb", "a\r\nb", "a\u2028b", "\x1b[2J", "\ud800", "\u202e"),
    *("\U0001f600", "é" * 70, "x" * 20_000, "-", "nan", "1e999", "0x10", "CON", "-rf", "step-1"),
    *("manifest.json", "file:///etc/passwd", "*", "None", "true"),
)
_NUMBERS = (
    *(0, 1, -1, 2, 7, 8, 255, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**63, 2**64, -(2**63)),
    *(10**18, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
_YAML = (
    *("[", "]", "{", "}", ":", "- ", "? ", "|", ">", "&a", "*a", "!!", "%YAML 1.1\n---\n"),
    *("---", "...", "#", "\t", "\0", "\x07", "\ufeff", "\u2028", "'", '"', "\\", "@", "`"),
    *("&a [*a]", "*nowhere", "<<: *a", "!!python/object:os.system {}", "!!binary aGk="),
    *("!!timestamp 2001-01-01", "!<tag:yaml.org,2002:int> x", "!!int 0x10", "!!float .nan"),
    *('"\\uD800"', '"\\U99999999"', "'a\n\n b'", ".inf", "-.inf", ".nan", "1e999", "0o7", "1_0"),
    *("9" * 400, "9" * 5000, "-" * 300, "[" * 1100, "{a: " * 1100, "- " * 1100, "x" * 20_000),
    *("null", "~", "true", "yes", "auto", "1:2", "2001-01-01", "../../x", "/axsparse_fuzz"),
    *("a\nb: c", "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: [*d, *d]"),
)


def odd_text(rng: Random) -> str:
    """A text that somebody may not have thought of."""
    if rng.random() < 0.3:
        return "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in "abc"
        )
    return rng.choice(_TEXTS)


def odd_yaml(rng: Random) -> str:
    """The same, of YAML's special texts as well."""
    return rng.choice((rng.choice(_YAML), odd_text(rng), str(odd_number(rng))))


def odd_number(rng: Random) -> int | float:
    """A number at some edge, or any small one."""
    return rng.choice((rng.choice(_NUMBERS), rng.randrange(-10, 100)))


def odd_value(rng: Random) -> Any:
    """A value of JSON that is hardly wanted."""
    match rng.randrange(8):
        case 0:
            return rng.choice((None, True, False, [], {}))
        case 1 | 2:
            return odd_number(rng)
        case 3 | 4:
            return odd_text(rng)
        case 5:
            return [odd_number(rng), odd_text(rng)]
        case 6:
            return rng.choice(({odd_text(rng): odd_number(rng)}, [odd_number(rng)] * 65))
    return DEEP


def bytes_changed(rng: Random, data: bytes) -> bytes:
    """One to three places flipped, cut out, doubled, turned or overwritten, or the end cut off."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(data))
        stop = min(len(data), start + rng.choice((1, 1, 2, 8, 100)))
        there = data[start:stop]
        match rng.randrange(7):
            case 0:
                new = bytes(byte ^ 1 << rng.randrange(8) for byte in there[:1]) + there[1:]
            case 1:
                new = b""
            case 2:
                new = there * 2
            case 3:
                new = rng.randbytes(rng.randint(1, 8))
            case 4:
                new = rng.choice((b"\0", b"\xff", b"\xef\xbb\xbf", b"{", b"]", b'"', b"\n"))
            case 5:
                new = there[::-1]
            case _:
                return data[:start]
        data = data[:start] + new + data[stop:]
    return data


def json_changed(rng: Random, value: Any) -> Any:
    """One to three values of a nested one replaced, removed, renamed, swapped or doubled."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        holder, key = _place(rng, value)
        if holder is None:
            return odd_value(rng)
        other, there = _place(rng, value)
        match rng.randrange(10):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[odd_text(rng)] = holder.pop(key)
            case 1:
                holder.insert(0, holder[key])
            case 2:
                holder[key], other[there] = copy.deepcopy((other[there], holder[key]))
            case 3:
                holder[key] = copy.deepcopy(other[there])
            case 4 if isinstance(holder, dict):
                holder[odd_text(rng)] = odd_value(rng)
            case 5 | 6 if isinstance(holder[key], int | float):
                holder[key] = odd_number(rng)
            case 5 | 6 if isinstance(holder[key], str):
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
        match rng.randrange(8):
            case 0 | 1 | 2 if ":" in line:
                lines[number] = f"{line.partition(':')[0]}: {odd}"
            case 3 if ":" in line:
                lines[number] = f"{odd}:{line.partition(':')[2]}"
            case 4:
                other = rng.randrange(len(lines))
                lines[number], lines[other] = lines[other], line
            case 5:
                lines.insert(number, line)
            case 6:
                lines[number] = rng.choice((" ", "  ", "\t", "")) + line.strip()
            case _:
                at = rng.randint(0, len(line))
                lines[number] = line[:at] + odd + line[at:]
        text = "\n".join(lines)
    return text
