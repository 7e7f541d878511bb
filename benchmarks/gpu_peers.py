"""GPT-3 2.7B trained dense by plain torch on one GPU, for comparison with axsparse.

    python benchmarks/gpu_peers.py plain|fsdp2 [--microbatches 4 8] [--batch 16] [--warm 4]
        [--steps 10] [--save FILE] [--set model.num_layers=2]

    plain    fp32 weights, products in bf16 by autocast, fused AdamW: 16 bytes a parameter
    fsdp2    `fully_shard` of each block and of the model over one rank: fp32 shards, bf16 weights
             and activations, gradients of a step summed in fp32, fused AdamW

Both compile each block and the loss by `torch.compile`, as torchtitan does, and clip the norm of
the gradient. Modules, start values, data and their order are the same as in axsparse's run, so that
the losses equal its dense run's up to rounding. A microbatch size for which there is no memory is
noted as such.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from gpu_worker import HAS_GPU, peaks, repeated, settle
from torch import Tensor, nn

from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.data.batches import Batches
from axsparse.data.sources import open_datasets
from axsparse.models.layer import Model
from axsparse.models.zoo.gpt import Embedding, Head
from axsparse.models.zoo.model_registry import named_model
from axsparse.samo.optim.optimizer import learning_rate

CONFIG = "gpt3_2.7b.yaml"
DEVICE = "cuda" if HAS_GPU else "cpu"


class Gpt(nn.Module):
    """The layers of axsparse's model one after the other: tokens (B, S) to logits (B, S, V)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        with torch.device("meta"):
            embed, *blocks, head = [layer.build() for layer in model.layers]
        assert isinstance(embed, Embedding)
        assert isinstance(head, Head)
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head
        self.to_empty(device=DEVICE)
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            parameter.data.copy_(repeated(name, shape, torch.Generator()))
        if model.ties:
            self.head._parameters["weight"] = self.embed.token._parameters["weight"]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        normed, weight = self.head(hidden)
        return F.linear(normed, weight)


class Peer:
    """A model, its optimizer, and how a step is taken."""

    def __init__(self, kind: str, model: Gpt, config: Config) -> None:
        self.is_sharded = kind == "fsdp2"
        self.model = model
        for block in model.blocks:
            block.compile(dynamic=False)
        if self.is_sharded:
            _shard(model)
        own = config.optimizer
        self.clip_norm, self.peak, self.schedule = own.clip_norm, own.learning_rate, config.schedule
        decays = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": decays},
            {"params": others, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=own.learning_rate,
            betas=own.betas,
            eps=own.eps,
            weight_decay=own.weight_decay,
            fused=True,
        )
        self.loss = torch.compile(_summed_cross_entropy, dynamic=False)

    def step(self, number: int, microbatches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """The mean loss of step `number`, from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.schedule, peak=self.peak, decay_steps=10**9)
        total = sum(targets.numel() for _, targets in microbatches)
        losses = []
        for place, (tokens, targets) in enumerate(microbatches):
            if self.is_sharded:
                last = place == len(microbatches) - 1
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            with self._autocast():
                loss = self.loss(self.model(tokens), targets) / total
            loss.backward()
            losses.append(loss.detach())
        if self.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_sharded else torch.autocast(DEVICE, torch.bfloat16)


def _summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, targets.flatten(), reduction="sum")


def _shard(model: Gpt) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if HAS_GPU else "gloo"
    file = Path(tempfile.mkdtemp()) / "store"
    torch.distributed.init_process_group(
        backend, init_method=f"file://{file}", rank=0, world_size=1
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def measured(peer: Peer, read: Callable[[int], Any], warm: int, steps: int) -> dict[str, Any]:
    """Seconds and loss of each step; a step is over when the device has nothing left to do."""
    seconds, losses = [], []
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    for number in range(warm + steps):
        microbatches = read(number)
        settle()
        began = time.perf_counter()
        loss = peer.step(number, microbatches)
        settle()
        if number >= warm:
            seconds.append(time.perf_counter() - began)
        losses.append(loss)
    return {"seconds": seconds, "losses": losses, "peak": peaks()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("kind", choices=("plain", "fsdp2"))
    add("--microbatches", type=int, nargs="+", default=[4, 8], metavar="SIZE")
    add("--batch", type=int, default=16, help="samples of a step")
    add("--warm", type=int, default=4, help="steps before those that count")
    add("--steps", type=int, default=10)
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the model")
    add("--save", type=Path, help="write JSON here after each size")
    arguments = parser.parse_args(words)
    config = configure(CONFIG, [f"batch.global_batch_size={arguments.batch}", *arguments.set])
    training = open_datasets(config).training
    began = time.perf_counter()
    peer = Peer(arguments.kind, Gpt(named_model(config)), config)
    settle()
    found: dict[str, Any] = {"built": time.perf_counter() - began}
    for size in arguments.microbatches:
        batches = Batches(
            training,
            num_samples=len(training),
            global_batch_size=arguments.batch,
            microbatch_size=size,
            replica=0,
            g_data=1,
            seed=config.seed,
        )
        read = partial(_read, batches)
        try:
            found[str(size)] = measured(peer, read, arguments.warm, arguments.steps)
        except torch.OutOfMemoryError as error:
            found[str(size)] = {"out of memory": str(error).splitlines()[0][:300]}
            peer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        if arguments.save is not None:
            arguments.save.write_text(json.dumps(found), encoding="utf-8")
        print(json.dumps({size: found[str(size)]}), flush=True)
    return 0


def _read(batches: Batches, step: int) -> list[tuple[Tensor, Tensor]]:
    """The microbatches of a step on the device: tokens and targets (B, S)."""
    found = []
    for each in batches.training(step).microbatches:
        assert each.targets is not None
        found.append((each.inputs[0].long().to(DEVICE), each.targets.long().to(DEVICE)))
    return found


if __name__ == "__main__":
    sys.exit(main())
