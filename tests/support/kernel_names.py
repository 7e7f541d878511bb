"""Every kernel that the package can ask for, as C++ names."""

from __future__ import annotations

from itertools import product

from axsparse.samo.cuda.device_index import BITS, INDICES

ENCODED = tuple(name for kind, name in INDICES.items() if kind != "full")
GRADIENTS = ("Bf16, Bf16", "Bf16, Fp32", "Fp16, Fp16", "Fp16, Fp32", "Fp32, Fp32")
"""Types of weight and gradient."""
STATES = tuple(
    f"{numbers}, {master}"
    for numbers in GRADIENTS
    for master in {
        "Bf16": ("MasterBuffer", "MasterRemainder"),
        "Fp16": ("MasterBuffer",),
        "Fp32": ("MasterIsWeight",),
    }[numbers[:4]]
)
COMPRESS = [f"compress<{index}, {types}>" for index, types in product(INDICES.values(), GRADIENTS)]
JUDGE = [f"judge<{number}>" for number in ("Bf16", "Fp16", "Fp32")] + ["fold"]
STEP = [f"step_adamw<{index}, {state}>" for index, state in product(INDICES.values(), STATES)] + [
    f"step_sgd<{index}, {state}, {momentum}>"
    for index, state, momentum in product(INDICES.values(), STATES, ("NONE", "PLAIN", "NESTEROV"))
]
HELPERS = [f"move<{index}, {bits}>" for index, bits in product(ENCODED, BITS.values())]
EVERY = COMPRESS + JUDGE + STEP + HELPERS
