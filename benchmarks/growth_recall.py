"""How well RigL's candidates find the strongest gradients of a step, by their number.

    python benchmarks/growth_recall.py [--save benchmarks/results/growth_recall.json]

A small GPT, 90 % pruned at random, learns the bytes of Python's own library in fp32. At the start
and later, one step's dense gradients are kept microbatch by microbatch. What candidates would
grow, with so many of them a kept entry, is held against the largest entries of the whole sum:

- recall: the fraction of the largest that candidates find;
- mass: the gradient at what they find, over that at the largest;
- other data: the recall of the largest entries of the *next* step's whole sum, at the same
  weights up to one update: what the choice owes to its data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import Tensor

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.zoo.gpt import gpt
from axsparse.pruning.methods.regrowth import moved_entries
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.index.base import Index
from axsparse.samo.selection import Candidates, no_candidates, strongest
from axsparse.samo.tensor_state import TensorState
from axsparse.training.build import build
from axsparse.training.trainer import Trainer

TOKENS, SPARSITY = 128, 0.9
STEPS = (0, 50, 300)
"""Steps done when candidates are looked at."""
MICROBATCHES = (8, 32)
FRACTIONS = (0.3, 0.1)
PER_KEPT = (0.3, 0.5, 1.0, 2.0)
REPLICAS = (1, 4)


def library_bytes() -> TokenDataset:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    tokens = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    return TokenDataset("library", "0", 256, tokens, TOKENS)


def make_trainer(data: TokenDataset, microbatches: int) -> Trainer:
    config = Config.model_validate(
        {
            "model": {
                "num_layers": 3,
                "hidden_size": 128,
                "num_heads": 4,
                "sequence_length": TOKENS,
                "vocab_size": 256,
            },
            "batch": {"global_batch_size": microbatches, "microbatch_size": 1},
            "precision": "fp32",
            "pruning": {"method": "random", "sparsity": SPARSITY},
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"decay": "constant", "warmup_steps": 5},
            "train": {"steps": 10_000, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
            "seed": 1,
        }
    )
    return build(
        Job(LocalTransport(LocalWorld(1), 0)),
        gpt(of_family(config.model, GptConfig), TOKENS),
        lambda: Datasets(data, None),
        config,
        quiet=True,
    )


def pruned(trainer: Trainer) -> Iterator[TensorState]:
    for layer in trainer.parts.layers:
        for tensor in layer.state.owned:
            if tensor.kept < tensor.parameter.numel():
                yield tensor


def gradients_of_step(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Dense, by tensor and microbatch, of one more step."""
    seen: dict[str, list[Tensor]] = {}

    def see(name: str, gradient: Tensor) -> None:
        seen.setdefault(name, []).append(gradient.detach().clone().view(-1))

    tensors = list(pruned(trainer))
    handles = [tensor.parameter.register_hook(partial(see, tensor.name)) for tensor in tensors]
    trainer.step()
    for handle in handles:
        handle.remove()
    return seen


def chosen(
    gradients: Sequence[Tensor], index: Index, listed: int, moved: int, replicas: int
) -> Candidates:
    """What grows, with lists of this length."""
    numel, each = gradients[0].numel(), len(gradients) // replicas
    lists = []
    for replica in range(replicas):
        own = no_candidates(numel, listed)
        for gradient in gradients[replica * each : (replica + 1) * each]:
            own = strongest(gradient.clone(), (own,), index, listed)
        lists.append(own)
    return strongest(torch.zeros(numel), lists, index, moved)


def look(trainer: Trainer, fraction: float) -> dict[str, dict[str, float]]:
    """Recall and mass, the means over pruned tensors, by candidates a kept entry and replicas."""
    now, later = gradients_of_step(trainer), gradients_of_step(trainer)
    found: dict[str, dict[str, list[float]]] = {}
    for tensor in pruned(trainer):
        numel = tensor.parameter.numel()
        moved = moved_entries(tensor.kept, numel, fraction)
        total, next_total = (sum(of[tensor.name], torch.zeros(numel)) for of in (now, later))
        exact = strongest(total.clone(), (), tensor.index, moved)

        def note(
            name: str, choice: Candidates, total: Tensor = total, exact: Candidates = exact
        ) -> None:
            hit = torch.isin(choice.positions, exact.positions).double().mean()
            mass = total[choice.positions.long()].abs().sum() / exact.sums.abs().sum()
            kinds = found.setdefault(name, {"recall": [], "mass": []})
            kinds["recall"].append(float(hit))
            kinds["mass"].append(float(mass))

        note("other data", strongest(next_total.clone(), (), tensor.index, moved))
        for replicas in REPLICAS:
            for ratio in PER_KEPT:
                if ratio >= fraction:
                    listed = min(round(ratio * tensor.kept), numel - tensor.kept)
                    choice = chosen(now[tensor.name], tensor.index, listed, moved, replicas)
                    note(f"{ratio} a kept entry, {replicas} replica(s)", choice)
    return {
        name: {kind: round(statistics.fmean(values), 3) for kind, values in kinds.items()}
        for name, kinds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for microbatches in MICROBATCHES:
        trainer = make_trainer(library_bytes(), microbatches)
        for steps in STEPS:
            while trainer.steps_done < steps:
                trainer.step()
            for fraction in FRACTIONS:
                place = {"microbatches": microbatches, "steps_done": steps, "fraction": fraction}
                rows.append({**place, "found": look(trainer, fraction)})
                print(json.dumps(rows[-1]), flush=True)
        trainer.close()
    if arguments.save:
        result = {
            "what": f"GPT, 3 layers of width 128, fp32, sparsity {SPARSITY}, "
            f"microbatches of {TOKENS} bytes",
            "torch": torch.__version__,
            "rows": rows,
        }
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
