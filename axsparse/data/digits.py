"""Handwritten digits that come with axsparse: 1,797 images of 8×8 pixels, ten classes.

Source and licence stand beside the data, in `digits.txt`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from axsparse.data.dataset import ArrayDataset
from axsparse.data.order import shuffled

FILE = Path(__file__).with_name("digits.npz")
BRIGHTEST = 16
"""Pixels are whole numbers up to here."""
CLASSES = 10
VALIDATION_SAMPLES = 360
"""A fifth of the 1,797."""
SPLIT_SEED = 0
"""Of the shuffle whose last samples are validation; not the run's, so that runs compare."""


def digits_datasets() -> tuple[ArrayDataset, ArrayDataset]:
    """Training and validation: inputs (b, 1, 8, 8) fp32 in [0, 1], targets (b,) int64.

    Always the same 1,437 and 360 samples: those that a fixed shuffle puts first and last.
    """
    with np.load(FILE) as arrays:
        images, classes = arrays["images"], arrays["targets"]
    order = shuffled(np.arange(len(images)), len(images), SPLIT_SEED, epoch=0)
    inputs = torch.from_numpy(images[order]).to(torch.float32).div_(BRIGHTEST).unsqueeze(1)
    targets = torch.from_numpy(classes[order]).to(torch.int64)
    first = len(images) - VALIDATION_SAMPLES
    return (
        ArrayDataset(inputs[:first], targets[:first], name="digits train"),
        ArrayDataset(inputs[first:], targets[first:], name="digits validation"),
    )
