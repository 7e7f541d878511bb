"""The GPU transport on a real GPU: NCCL at size 1 here, staged links of several ranks by mpirun."""

from __future__ import annotations

import os
import re

import pytest
import torch
from support.mpirun import TESTS, run_mpirun

from axsparse.runtime.communication import wait_for
from axsparse.runtime.gpu.device import CudaDevice
from axsparse.runtime.gpu.nccl import NcclConnections, Rendezvous, nccl_backend
from axsparse.runtime.local.local_transport import LocalTransport

LIMIT_SECONDS = 180
PYTEST = (
    *("-m", "mpi4py", "-m", "pytest", "-x", "-q", "-W", "default", "-p", "no:cacheprovider"),
    *("-o", "faulthandler_timeout=60"),
)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is to be had here")
needs_nccl = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_nccl_available()),
    reason="this torch is built without NCCL",
)
needs_sharing = pytest.mark.skipif(
    os.environ.get("AXSPARSE_NCCL_SHARED") != "1",
    reason="an experiment of NCCL 2.30's: AXSPARSE_NCCL_SHARED=1 asks for it",
)
OVER_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("ranks", "env"), [(2, {}), (4, {}), pytest.param(2, OVER_NCCL, marks=needs_sharing)]
)
def test_ranks_that_share_a_gpu_keep_the_contracts(ranks: int, env: dict[str, str]) -> None:
    """By way of the hosts, or over NCCL, which lets two ranks share a GPU as an experiment."""
    ranks_file = TESTS / "gpu" / "ranks_sharing_gpu.py"

    job = run_mpirun(ranks, [*PYTEST, str(ranks_file)], env, LIMIT_SECONDS, TESTS.parent)

    assert job.returncode == 0, str(job)
    passed = re.findall(r"(\d+) passed", job.stdout)
    assert len(passed) == ranks and int(passed[0]) > 0, str(job)


def test_streams_keep_order_and_events_tell_of_it() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    stream = device.stream()
    slot = device.pinned(1 << 20)
    # A kernel's first use, and memory that is new, may wait for what runs.
    torch.full((1 << 20,), 0, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    computed = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    ready = device.compute.record()

    stream.wait(ready)
    stream.copy(slot, computed)
    copied = stream.record()

    assert slot.is_pinned()
    assert not copied.query(), "compute is still asleep, and nothing here waits for it"
    copied.synchronize()
    assert ready.query() and copied.query()
    assert (slot == 7).all()


def test_memory_of_a_stream_is_not_reused_while_compute_needs_it() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    stream = device.stream()
    with torch.cuda.stream(stream.stream):
        torch.empty(1 << 22, dtype=torch.uint8, device="cuda")  # a block in the stream's pool
    tensor = stream.empty((1 << 22,), torch.uint8)
    where = tensor.data_ptr()
    torch.cuda._sleep(100_000_000)
    tensor.fill_(1)
    del tensor

    assert stream.empty((1 << 22,), torch.uint8).data_ptr() != where
    torch.cuda.synchronize()


@needs_nccl
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]
)
def test_nccl_of_one_member_leaves_every_buffer_as_it_is(dtype: torch.dtype) -> None:
    alone = LocalTransport()
    device = CudaDevice(torch.device("cuda", 0))
    connections = NcclConnections(Rendezvous(alone, nccl_backend), device, alone.backoff)
    communicator = connections.communicator("alone", (0,))
    stream = communicator.stream
    torch.arange(100, device="cuda").to(dtype)  # its kernels' first use may wait for what runs
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    buffer = torch.arange(100, device="cuda").to(dtype)
    stream.wait(device.compute.record())

    calls = [
        communicator.all_reduce(buffer),
        communicator.broadcast(buffer),
        communicator.reduce_scatter(buffer, (0, len(buffer))),
        communicator.all_gather(buffer, (0, len(buffer))),
    ]

    assert not any(call.query() for call in calls), "compute is still asleep, no call waits for it"
    for call in calls:
        wait_for(call, alone.backoff)
    assert torch.equal(buffer.cpu(), torch.arange(100).to(dtype))
    communicator.close()


@needs_nccl
def test_nccl_sends_bytes_to_itself_in_a_group() -> None:
    rendezvous = Rendezvous(LocalTransport(), nccl_backend)
    backend = rendezvous.group("itself", (0,), 4)
    start, end = backend._group_start, backend._group_end
    sent = torch.arange(200, dtype=torch.uint8, device="cuda")
    received = torch.zeros_like(sent)

    start()
    backend.send([sent], 0, 0)
    backend.recv([received], 0, 0)
    end()
    torch.cuda.synchronize()

    assert torch.equal(received, sent)
