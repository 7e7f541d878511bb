"""The base of all sections of the configuration, and the types that several settings share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A fraction that may be 0 but never 1: a sparsity, a dropout, a decay coefficient."""
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Turns the lists of YAML into the tuples of a frozen configuration."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names and values of another type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
