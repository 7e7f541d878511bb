"""How fast data are read in each format, beside what a trainer takes.

    python benchmarks/data_formats.py [--save benchmarks/results/data_formats.json]

The bytes of Python's standard library are written as JSONL, Parquet and Arrow, prepared from each,
and written as Megatron's files and as an Arrow list of ids.

- read: tokens a second of a step's batch (8 samples of 1,024 tokens), inputs and targets, in the
  order of training, by the CPU time of one core; the kinds in turn, medians over rounds
- prepare: megabytes of text a second, tokens being bytes, so that reading decides
- trainer: tokens a second that the quickstart's model takes on one core (4.8M parameters; larger
  models take fewer)
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from figures import host_machine, rounded

import axsparse as ax
from axsparse.config.load import configure, load_config
from axsparse.data.batches import Batches
from axsparse.data.preparation import Request, prepare
from axsparse.data.sources import open_datasets
from axsparse.data.stdlib import SEPARATOR, stdlib_dataset, stdlib_tokens
from axsparse.runtime.console import Console

LENGTH, BATCH, STEPS, ROUNDS = 1024, 8, 40, 7


def documents() -> list[bytes]:
    """The files of the standard library that are UTF-8."""
    tokens, _ = stdlib_tokens("train")
    found = []
    for text in tokens.tobytes().split(bytes([SEPARATOR])):
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            found.append(text)
    return found


def write(folder: Path, texts: list[bytes]) -> dict[str, Path]:
    """Texts in three formats, and ids in two; by the name of the format."""
    decoded = [text.decode() for text in texts]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps({'text': t})}\n" for t in decoded))
    table = pa.table({"text": decoded})
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    ids = [np.frombuffer(text + b"\xff", np.uint8) for text in texts]
    listed = pa.table({"input_ids": [one.astype("<i4") for one in ids]})
    with pa.ipc.new_stream(str(folder / "ids.arrow"), listed.schema) as stream:
        stream.write_table(listed, max_chunksize=100)
    (folder / "ids.bin").write_bytes(b"".join(one.astype("<u2").tobytes() for one in ids))
    lengths = np.array([one.size for one in ids], "<i4")
    begins = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(ids), len(ids) + 1)
    numbers = np.arange(len(ids) + 1, dtype="<i8")
    arrays = (lengths, begins.astype("<i8"), numbers)
    (folder / "ids.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    texts_of = {name: folder / f"a.{name}" for name in ("jsonl", "parquet", "arrow")}
    return {**texts_of, "megatron": folder / "ids", "arrow ids": folder / "ids.arrow"}


def reader(*settings: str) -> Callable[[int], object]:
    """Reads the batch of a step."""
    options = ("data.source=tokens", f"data.sequence_length={LENGTH}", "train.eval_steps=0")
    model = (f"model.sequence_length={LENGTH}", "model.vocab_size=256")
    data: Any = open_datasets(load_config(None, [*options, *model, *settings])).training
    return Batches(
        data,
        num_samples=len(data),
        global_batch_size=BATCH,
        microbatch_size=BATCH,
        replica=0,
        g_data=1,
        seed=1,
        shares=getattr(data, "shares", ()),
    ).training


def trainer_speed() -> float:
    """Tokens a second of the quickstart's model, after a step that also compiles."""
    speeds: list[float] = []

    def main(job: ax.Job) -> None:
        options = ["layout.g_inter=1", "train.eval_steps=0", "checkpoint.every=0", "train.steps=4"]
        config = configure("quickstart.yaml", options)
        length = 128
        data = ax.Datasets(stdlib_dataset("train", length))
        trainer = ax.build(job, ax.named_model(config), lambda: data, config, quiet=True)
        trainer.step()
        for _ in range(3):
            began = time.process_time()
            trainer.step()
            tokens = config.batch.global_batch_size * length
            speeds.append(tokens / (time.process_time() - began))
        trainer.close()

    ax.run_here(main)
    return statistics.median(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    texts = documents()
    megabytes = sum(map(len, texts)) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write(folder, texts)
        speeds: dict[str, list[float]] = {}
        for _ in range(3):
            for kind in ("jsonl", "parquet", "arrow"):
                out = folder / f"{kind}-{len(speeds.get(kind, []))}"
                began = time.process_time()
                prepare(Request((paths[kind],), out), 1, Console(io.StringIO(), bar=False))
                speeds.setdefault(kind, []).append(megabytes / (time.process_time() - began))
        prepared, megatron, arrow = folder / "jsonl-0", paths["megatron"], paths["arrow ids"]
        blend = f"data.blend=[{prepared}=0.5, {megatron}=0.3, {arrow}=0.2]"
        readers = {
            "prepared": reader(f"data.path={prepared}"),
            "megatron": reader(f"data.path={megatron}"),
            "arrow ids": reader(f"data.path={arrow}"),
            "blend of the three": reader(blend),
        }
        read: dict[str, list[float]] = {kind: [] for kind in readers}
        for number in range(ROUNDS + 1):
            for kind, batch in readers.items():
                began = time.process_time()
                for step in range(number * STEPS, (number + 1) * STEPS):
                    batch(step)
                seconds = time.process_time() - began
                if number:  # The first round also maps pages.
                    read[kind].append(STEPS * BATCH * LENGTH / seconds)
    result = {
        "machine": host_machine(),
        "text_megabytes": rounded(megabytes),
        "prepare_megabytes_per_second": {
            kind: rounded(statistics.median(values)) for kind, values in speeds.items()
        },
        "read_tokens_per_second": {
            kind: rounded(statistics.median(values)) for kind, values in read.items()
        },
        "trainer_tokens_per_second": rounded(trainer_speed()),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.save is not None:
        arguments.save.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
