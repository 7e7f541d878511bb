"""Ranks with tensors on pretended devices, which meet through pinned memory and real MPI."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI
from support.cuda_on_cpu import EmulatedLauncher, compiler
from support.kernel_names import COMPRESS, HELPERS, JUDGE, STEP
from support.late_device import LateDevice
from support.on_mpi import by_first_rank, on_mpi
from support.oracle import Oracle, sgd
from support.pretend_gpu import AVAILABLE, on_host, pretend
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_here
from torch.nn.attention import SDPBackend, sdpa_kernel

from axsparse.runtime.communication import Transport
from axsparse.runtime.gpu.gpu_transport import GpuTransport
from axsparse.runtime.grid import Grid
from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.samo.backend import Backend
from axsparse.training.placement import Placement

SIZE = MPI.COMM_WORLD.size
GRIDS = [Grid(g, SIZE // g) for g in range(SIZE, 0, -1) if SIZE % g == 0]
pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this torch knows no device written in Python"),
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler to run kernels on a CPU"),
]


@pytest.fixture(scope="module")
def launch() -> Iterator[EmulatedLauncher]:
    """The first rank compiles, for all."""
    wanted = [name for name in (*COMPRESS, *JUDGE, *STEP) if "Fp32, Fp32" in name or name in JUDGE]
    names = [*(name for name in wanted if "adamw" not in name), *HELPERS]
    first = MPI.COMM_WORLD.rank == 0
    with tempfile.TemporaryDirectory() as folder:
        place = MPI.COMM_WORLD.bcast(folder if first else None)
        made = EmulatedLauncher(names, Path(place)) if first else None
        MPI.COMM_WORLD.barrier()
        yield made or EmulatedLauncher(names, Path(place))
        MPI.COMM_WORLD.barrier()


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.g_inter}x{grid.g_data}")
def test_a_gpt_on_devices_is_bitwise_the_oracle(
    grid: Grid, shard: bool, launch: EmulatedLauncher
) -> None:
    optimizer = {"name": "sgd", "momentum": 0.9, "learning_rate": 0.3}
    samo = {"shard_optimizer": shard}
    batch = {"global_batch_size": 4 * SIZE, "microbatch_size": 2}
    config = tiny_config(optimizer=optimizer, samo=samo, batch=batch, train={"steps": 2})
    data = token_data()

    def placement(transport: Transport) -> Placement:
        device = LateDevice(pretend())
        assert isinstance(transport, MpiTransport)
        between = GpuTransport(transport, device, connections=None)
        return Placement(between, Backend(pretend(), on_host(launch)), device)

    with sdpa_kernel(SDPBackend.MATH):
        oracle = Oracle(tiny_gpt(config), config, data, grid.g_data, optimizer=sgd)
        reference = by_first_rank(lambda: oracle.run(2))
        with on_mpi() as transport:
            trainer, trace = train_here(
                transport, grid, tiny_gpt(config), config, data, placement=placement
            )
            assert isinstance(trainer.parts.transport, GpuTransport)

    assert_bitwise(trace, reference)
