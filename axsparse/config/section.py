"""The base of all sections of the configuration, the types that several settings share, and the
errors of rules between the settings of one section."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from axsparse.runtime.errors import ConfigError
from axsparse.runtime.files.paths import expanded

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Natural = Annotated[int, Field(ge=0, le=10**9)]
"""A count that may be 0."""
Width = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A size of a tensor: products of two fit torch's whole numbers."""
Few = Annotated[int, Field(ge=1, le=10_000)]
"""A number of things that a process makes one by one, such as layers."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A fraction that may be 0 but never 1: a sparsity, a dropout, a decay coefficient."""
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Turns the lists of YAML into the tuples of a frozen configuration."""


def _plain(value: Any) -> Any:
    """The value in Python's own types, if it is a number or an array of numpy or torch."""
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _path_text(value: object) -> object:
    """The text of a `Path`; PydanticCustomError for null and an empty text."""
    if value is None or value == "":
        raise PydanticCustomError("path", "Input should be a path, and not empty")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _expanded(text: str) -> str:
    """`expanded` of a setting; PydanticCustomError for what is no path."""
    try:
        return expanded(text)
    except ConfigError:
        raise PydanticCustomError(
            "path", "Input should be a path of known users and variables"
        ) from None


PathText = Annotated[str, BeforeValidator(_path_text), AfterValidator(_expanded)]
"""A path of the user's, a text or a `Path`, in which `~` and `$VARIABLE` are expanded."""

NO_TEXT = re.compile("[\0\x85\u2028\u2029\ud800-\udfff]")
"""Matches NUL, line breaks that YAML folds, and surrogates."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names and values of another type.

    Rules between settings of one section are its `broken_rules`, those between sections in
    `validate.py`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of a folder of Hugging Face
        use_attribute_docstrings=True,
    )

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """For each broken rule the key within the section, and the value, the rule and the
        suggestion."""
        yield from ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Section:
        for key, said in self.broken_rules():
            raise BrokenRule(key, said)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_python(cls, value: object) -> object:
        return _plain(value)

    @field_validator("*", mode="after")
    @classmethod
    def _is_a_text_of_files(cls, value: object) -> object:
        """Texts become names of files and lines of config.yaml, which neither of these can be."""
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and NO_TEXT.search(text) is not None:
                raise PydanticCustomError(
                    "text", "Input should be text without NUL, rare line breaks and surrogates"
                )
        return value


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all sections by dotted key, such as `train.steps`."""
    return {
        f"{section}.{key}" if isinstance(values, Mapping) else section: value
        for section, values in settings.items()
        for key, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    }


class BrokenRule(ValueError):  # noqa: N818 - pydantic wraps it, and nobody catches it by name
    """Settings of a section contradict each other; `load.py` adds where they were set."""

    def __init__(self, key: str, said: str) -> None:
        super().__init__(f"{key}: {said}")
        self.key = key
        self.said = said


def divisors(number: int) -> list[int]:
    """All divisors of a number of up to ten digits, in order; some of a larger one."""
    most = min(isqrt(number), 100_000)
    small = [divisor for divisor in range(1, most + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def one_of(choices: Iterable[int], *, near: int) -> str:
    """The eight choices nearest to `near`, in words."""
    nearest = sorted(sorted(choices, key=lambda choice: abs(choice - near))[:8])
    listed = ", ".join(map(str, nearest))
    return f"one of {listed}" if len(nearest) > 1 else listed


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
