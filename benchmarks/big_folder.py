"""The memory in which a run starts from a large Hugging Face folder, a stage a rank.

    python benchmarks/big_folder.py write FOLDER --gigabytes 16
    mpirun -n 2 python benchmarks/big_folder.py start FOLDER [--save FILE]

`write` makes a folder of a Llama of Llama 3 8B's width in fp32, a shard for each layer, with as
many layers as it takes. `start` builds a run of it (bf16, 98 % of the blocks pruned by magnitude)
and ends before the first step. Peaks are of memory that is the process's own (RssAnon), looked at
every 20 ms, less what it had before. A rank should not need more than its state and one tensor,
the largest one of the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

import axsparse as ax
from axsparse.config.load import made_in_python
from axsparse.runtime.files.safetensors import header_of, write_safetensors

SIZES = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 4096},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}
SPARSITY = 0.98


def write(folder: Path, gigabytes: float) -> None:
    """Write the folder; all tensors are made of the same drawn numbers, times another factor."""
    width, inner, kv = 4096, 14336, 1024
    shapes = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    layer_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    layers = round((gigabytes * 1e9 - 8 * 4096 * width) / layer_bytes)
    drawn = torch.randn(inner * width, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    outside = {
        "model.embed_tokens.weight": (4096, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (4096, width),
    }
    shards = [
        {f"model.layers.{number}.{name}": shape for name, shape in shapes.items()}
        for number in range(layers)
    ]
    folder.mkdir(parents=True)
    index = {}
    for number, shard in enumerate([outside, *shards]):
        file = f"model-{number:05}-of-{layers + 1:05}.safetensors"
        headers = {
            name: header_of(torch.empty(shape, device="meta")) for name, shape in shard.items()
        }

        def tensors(shard: Any = shard, number: int = number) -> Iterator[torch.Tensor]:
            for shape in shard.values():
                yield drawn[: int(np.prod(shape))].view(shape) * (1 + 0.01 * number)

        write_safetensors(folder / file, headers, tensors())
        index.update(dict.fromkeys(shard, file))
    settings = {"model_type": "llama", "num_hidden_layers": layers, **SIZES}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(settings))
    print(f"{folder}: {layers} layers")


class Peak:
    """The most memory of its own that this process has had while this was open, in bytes."""

    def __enter__(self) -> Peak:
        self.begin = self.most = own_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.02):
            self.most = max(self.most, own_bytes())


def own_bytes() -> int:
    """RssAnon of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def start(folder: Path, save: Path | None, job: ax.Job) -> None:
    """Build a run, and say what each rank took."""
    transport = job.transport
    words = torch.zeros(64, 9, dtype=torch.long)
    datasets = ax.Datasets(ax.ArrayDataset(words[:, :-1], words[:, 1:]), None)
    config = ax.configure(
        {
            "model": {"name": "hf", "from": str(folder)},
            "data": {"sequence_length": 8},
            "layout": {"g_inter": transport.size},
            "batch": {"global_batch_size": 4, "microbatch_size": 1},
            "precision": "bf16",
            "pruning": {"method": "magnitude", "sparsity": SPARSITY},
            "train": {"steps": 1, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e12},
        }
    )
    began = time.monotonic()
    with Peak() as peak:
        model = ax.named_model(made_in_python(config, "big_folder"))
        trainer = ax.build(job, model, lambda: datasets, config, quiet=True)
    stays, state = own_bytes() - peak.begin, trainer.state_bytes().total
    layers = trainer.parts.layers
    largest = max(p.numel() for layer in layers for p in layer.module.parameters())
    found = {
        "rank": transport.rank,
        "seconds": round(time.monotonic() - began, 1),
        "state_gb": state / 1e9,
        "tensor_gb": 4 * largest / 1e9,
        "peak_gb": (peak.most - peak.begin) / 1e9,
        "stays_gb": stays / 1e9,
    }
    print(json.dumps(found), flush=True)
    if save is not None:
        save.with_suffix(f".{transport.rank}.json").write_text(json.dumps(found) + "\n")
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("write", "start"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=16.0)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    if asked.what == "write":
        write(asked.folder, asked.gigabytes)
    else:
        ax.run(partial(start, asked.folder, asked.save))


if __name__ == "__main__":
    main()
