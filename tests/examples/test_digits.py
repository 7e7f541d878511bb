"""The handwritten digits of the examples."""

from __future__ import annotations

import digits
import numpy as np
import torch
from digits import digits_datasets


def test_every_digit_is_in_training_or_in_validation() -> None:
    with np.load(digits.FILE) as arrays:
        pairs = zip(arrays["images"], arrays["targets"], strict=True)
        stored = sorted((int(number), image.tobytes()) for image, number in pairs)
    found = []
    for dataset in digits_datasets():
        (images,), classes = dataset.read(np.arange(len(dataset)))
        whole = (images * 16).to(torch.uint8).squeeze(1).numpy()
        found += [(int(c), image.tobytes()) for image, c in zip(whole, classes, strict=True)]

    assert len(stored) == 1797
    assert sorted(found) == stored


def test_the_split_is_the_same_in_every_version() -> None:
    both = digits_datasets()

    for dataset, samples in zip(both, (1437, 360), strict=True):
        (images,), classes = dataset.read(np.arange(len(dataset)))
        assert (images.shape, images.dtype) == ((samples, 1, 8, 8), torch.float32)
        assert (images.min().item(), images.max().item()) == (0.0, 1.0)
        assert torch.bincount(classes, minlength=10).min() > 0.08 * samples
    # The published accuracies were measured on these samples.
    assert [dataset.fingerprint for dataset in both] == [
        *("a6b6da69bb943ad49ce2a72a94378179", "63b95d3fffee4c402f59456052ffafff")
    ]


def test_source_and_licence_stand_beside_the_data() -> None:
    text = digits.FILE.with_suffix(".txt").read_text(encoding="utf-8")

    assert "CC BY 4.0" in text and "Alpaydin" in text and "archive.ics.uci.edu" in text
