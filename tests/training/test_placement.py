"""One process and its GPU, if it has one; `tests/mpi/test_placing_mpi.py` has several."""

from __future__ import annotations

import socket

import pytest
import torch
from support.devices import LateDevice
from support.runs import tiny_config

from axsparse.config.schema import Config
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.gpu.rank_gpus import Gpu
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.samo.backend import HOST, Backend
from axsparse.training import placement as placing


def loaded(wanted: str = "auto") -> Config:
    return tiny_config(transport=wanted).with_origins("test", {})


def test_without_a_gpu_a_rank_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "visible_gpus", list)
    transport = LocalTransport()

    assert placing.bind_rank(transport, loaded()) == placing.Placement(transport, HOST)


def test_a_process_by_itself_takes_its_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(torch.device("cuda", 0), None)
    memory = placing.GpuMemory(10**11, 10**11, "a")
    gpu = LateDevice()

    def bind(number: int, uuid: str) -> tuple[Backend, LateDevice, placing.GpuMemory]:
        assert (number, uuid) == (0, "a")
        return backend, gpu, memory

    monkeypatch.setattr(placing, "visible_gpus", lambda: [Gpu("H200", "a"), Gpu("H200", "b")])
    monkeypatch.setattr(placing, "bind", bind)
    transport = LocalTransport()

    placement = placing.bind_rank(transport, loaded())

    assert (placement.transport, placement.backend, placement.gpu) == (transport, backend, gpu)
    assert placement.memory is memory
    assert len(placement.table) == 1 and placement.table[0].endswith("rank 0 → GPU 0 (H200)")


def test_the_most_memory_of_a_rank_is_that_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, gpu = LocalTransport(), torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 * (device == gpu))

    assert placing.Placement(transport, Backend(gpu, None)).peak_memory_bytes() == 7
    assert placing.Placement(transport, HOST).peak_memory_bytes() > 7


def test_a_gpu_that_cannot_be_used_is_named_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(device: torch.device) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", reject)
    monkeypatch.setattr(socket, "gethostname", lambda: "n7")

    with pytest.raises(ConfigError, match="GPU 3 of host n7 cannot be used") as caught:
        placing.bind(3, "a")
    assert "(CUDA error: uncorrectable ECC error encountered); see nvidia-smi" in str(caught.value)


def test_fp32_is_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    monkeypatch.setattr(placing, "CupyLauncher", lambda number: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.set_float32_matmul_precision("high")

    backend, gpu, memory = placing.bind(3, "a")

    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert (backend.device, gpu.device) == (torch.device("cuda", 3),) * 2
    assert memory == placing.GpuMemory(5, 9, "a")
