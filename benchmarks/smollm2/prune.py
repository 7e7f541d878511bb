"""python -m smollm2.prune OUT key=value …: prune a model with axsparse and write it, untrained."""

from __future__ import annotations

import json
import shutil
import sys
import time

import axsparse as ax
from axsparse.runtime.machine import peak_memory_bytes


def main() -> None:
    out, *settings = sys.argv[1:]
    config = ax.configure("prune_llama.yaml", [*settings, f"run_dir={out}-run"])
    began = time.monotonic()
    trainer = ax.Trainer(config=config)
    seconds, cpu = time.monotonic() - began, time.process_time()
    trainer.save_hf(out)
    if trainer.rank == 0:
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
    main()
