"""Names of parameters in checkpoints of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class HfNames:
    """How transformers names the modules of a family."""

    blocks: str
    """The list of blocks, such as "layers"."""
    outside: Mapping[str, str]
    """Modules outside of blocks, by our global names."""
    inside: Mapping[str, str]
    """Modules of a block, by our names within it."""

    def of(self, name: str, prefix: str) -> str:
        """The name of a parameter, by its global name; KeyError for one that no model has."""
        if name == "head.weight":
            return "lm_head.weight"
        module, _, kind = name.rpartition(".")
        if module in self.outside:
            return f"{prefix}{self.outside[module]}.{kind}"
        block, _, part = module.partition(".")
        return f"{prefix}{self.blocks}.{block.removeprefix('block')}.{self.inside[part]}.{kind}"
