"""1,797 handwritten digits of 8×8 pixels, ten classes; `digits.txt` states source and licence."""

from pathlib import Path

import numpy as np
import torch

import axsparse as ax

FILE = Path(__file__).with_name("digits.npz")


def digits_datasets() -> tuple[ax.ArrayDataset, ax.ArrayDataset]:
    """Training and validation data, always the same 1,437 and 360: inputs (b, 1, 8, 8) fp32 in
    [0, 1], targets (b,) int64."""
    with np.load(FILE) as arrays:
        images, classes = arrays["images"], arrays["targets"]
    inputs = torch.from_numpy(images / np.float32(16)).unsqueeze(1)
    targets = torch.from_numpy(classes).to(torch.int64)
    return (
        ax.ArrayDataset(inputs[:-360], targets[:-360], name="digits train"),
        ax.ArrayDataset(inputs[-360:], targets[-360:], name="digits validation"),
    )
