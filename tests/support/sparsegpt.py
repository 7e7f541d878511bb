"""SparseGPT as it was published, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from axsparse.pruning.input_statistics import BLOCK


def published(
    weight: Tensor, inputs: list[Tensor], sparsity: float, pattern: tuple[int, int] | None
) -> tuple[Tensor, Tensor]:
    """Frantar and Alistarh 2023, algorithm 1, with the running mean and threshold of their code."""
    columns = weight.shape[1]
    hessian, samples = torch.zeros(columns, columns), 0
    for x in inputs:
        hessian *= samples / (samples + len(x))
        samples += len(x)
        scaled = (2 / samples) ** 0.5 * x.t()
        hessian += scaled @ scaled.t()
    weight = weight.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    places = torch.arange(columns)
    hessian[places, places] += 0.01 * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    inverse = torch.linalg.cholesky(inverse, upper=True)
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        w, errors = weight[:, begin:end].clone(), torch.zeros(weight.shape[0], end - begin)
        inside = inverse[begin:end, begin:end]
        if pattern is None:
            score = w**2 / inside.diagonal() ** 2
            threshold = score.flatten().sort().values[int(score.numel() * sparsity)]
            gone[:, begin:end] = score <= threshold
        for i in range(end - begin):
            if pattern is not None and i % pattern[1] == 0:
                n, m = pattern
                score = w[:, i : i + m] ** 2 / inside.diagonal()[i : i + m] ** 2
                least = score.topk(m - n, dim=1, largest=False).indices
                gone[:, begin:end].scatter_(1, i + least, True)
            kept = w[:, i].clone()
            kept[gone[:, begin + i]] = 0
            error = (w[:, i] - kept) / inside[i, i]
            w[:, i:] -= error.unsqueeze(1) @ inside[i, i:].unsqueeze(0)
            errors[:, i] = error
            weight[:, begin + i] = kept
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    return ~gone, weight
