"""The handwritten digits that come with axsparse: 1,797 images of 8×8 pixels, ten classes.

Their source and licence are stated beside the data, in `digits.txt`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from axsparse.data.dataset import ArrayDataset
from axsparse.data.order import shuffled

FILE = Path(__file__).with_name("digits.npz")
BRIGHTEST = 16
"""The largest value of a pixel; pixels are whole numbers from 0 on."""
CLASSES = 10
VALIDATION_SAMPLES = 360
"""About a fifth of the 1,797."""
SPLIT_SEED = 0
"""Seeds the shuffle that divides the samples; fixed, so that all runs have the same split."""


def digits_datasets() -> tuple[ArrayDataset, ArrayDataset]:
    """Training and validation data: inputs (b, 1, 8, 8) fp32 in [0, 1], targets (b,) int64.

    Always the same split: the first 1,437 samples of a fixed shuffle, and the last 360.
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
