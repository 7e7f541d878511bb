"""python -m smollm2.prune OUT key=value …: prune a model with axsparse and write it, untrained."""

from __future__ import annotations

import json
import shutil
import sys
import time
from functools import partial

import axsparse as ax
from axsparse.config.load import load_config
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.process_memory import peak_memory_bytes


def main(job: ax.Job) -> None:
    out, *settings = sys.argv[1:]
    loaded = load_config("prune_llama.yaml", [*settings, f"run_dir={out}-run"])
    began = time.monotonic()
    trainer = ax.build(job, named_model(loaded), partial(open_datasets, loaded), loaded)
    seconds, cpu = time.monotonic() - began, time.process_time()
    folder = trainer.save()
    if job.transport.rank == 0:
        ax.export(folder, "hf", out)
        shutil.rmtree(f"{out}-run")
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peak_memory_bytes(),
        "state_bytes": trainer.state_bytes().total,
    }
    print(json.dumps(found), flush=True)
    trainer.close()


if __name__ == "__main__":
    ax.run(main)
