"""NCCL between two ranks that share a GPU, which NCCL 2.30 lets try; only when asked to, since it
is an experiment of theirs."""

from __future__ import annotations

import os
import re

import pytest
import torch
from support.mpirun import TESTS, run_mpirun

ASKED = "AXSPARSE_NCCL_SHARED"
LIMIT_SECONDS = 180
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is to be had here"),
    pytest.mark.skipif(
        os.environ.get(ASKED) != "1", reason=f"an experiment of NCCL 2.30's: {ASKED}=1 asks for it"
    ),
]


def test_two_ranks_on_one_gpu_keep_the_contracts_over_nccl() -> None:
    ranks_file = TESTS / "gpu" / "ranks_sharing_gpu.py"
    options = ["-x", "-q", "-W", "default", "-p", "no:cacheprovider"]
    options += ["-o", "faulthandler_timeout=60"]

    job = run_mpirun(
        2,
        ["-m", "mpi4py", "-m", "pytest", *options, str(ranks_file)],
        env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
        timeout=LIMIT_SECONDS,
        cwd=TESTS.parent,
    )

    assert job.returncode == 0, str(job)
    passed = re.findall(r"(\d+) passed", job.stdout)
    assert len(passed) == 2 and int(passed[0]) > 0, str(job)
