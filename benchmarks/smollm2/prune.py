"""python -m smollm2.prune OUT key=value …: prune a model with axsparse and write it, untrained."""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import axsparse as ax
from axsparse.config.load import load_config
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model


def main(job: ax.Job) -> None:
    out, *settings = sys.argv[1:]
    loaded = load_config("prune_llama.yaml", settings)
    began = time.monotonic()
    trainer = ax.build(job, named_model(loaded), partial(open_datasets, loaded), loaded, quiet=True)
    seconds = time.monotonic() - began
    ax.save_hf(trainer, out)
    print(json.dumps({"seconds": seconds, "state_bytes": trainer.state_bytes().total}), flush=True)
    trainer.close()


if __name__ == "__main__":
    ax.run(main)
