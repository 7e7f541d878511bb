"""Training whose tensors are on a device: nothing of it forgets where they live.

The device is pretended, its kernels are the package's own, run by the emulator: so all is bitwise
what the CPU computes, but for AdamW's square root in fp32.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import devices
from support.cuda_on_cpu import EVERY, EmulatedLauncher, compiler
from support.devices import AVAILABLE, LateDevice, on_host, pretend
from support.exhaustive import by_default
from support.images import assert_equal_tensors
from support.local_world import WorldLink
from support.resuming import Layout, ran, same
from support.runs import assert_bitwise, loaded, tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from axsparse.config.schema import Config
from axsparse.data_parallel.gradient_sync import GradientSync
from axsparse.models import losses
from axsparse.pruning import healing
from axsparse.runtime.communication import Message, Transport
from axsparse.samo.backend import Backend
from axsparse.samo.optim import adamw
from axsparse.samo.state_bytes import stage_bytes
from axsparse.training.placement import Placement
from axsparse.training.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this torch knows no device written in Python"),
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler to run kernels on a CPU"),
]
SGD: dict[str, Any] = {"name": "sgd", "momentum": 0.9, "learning_rate": 0.3}
ADAMW: dict[str, Any] = {"name": "adamw"}
OFFLOAD = {"offload": True}
WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
"""Operations that make a host wait for its device, apart from copies to it."""


class Placing:
    """Places ranks on pretended devices."""

    def __init__(self, launch: EmulatedLauncher) -> None:
        self.launch = launch
        self.devices: list[LateDevice] = []

    def __call__(self, transport: Transport) -> Placement:
        self.devices.append(LateDevice(pretend()))
        backend = Backend(pretend(), on_host(self.launch))
        return Placement(transport, backend, self.devices[-1])


@pytest.fixture(autouse=True)
def same_attention() -> Iterator[None]:
    """The attention kernel of a device that torch does not know."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(autouse=True)
def device_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds square roots, and the pretended one takes torch's on this CPU."""

    def rounded(values: Tensor) -> Tensor:
        return torch.from_numpy(np.sqrt(values.cpu().numpy())).to(values.device)

    monkeypatch.setattr(adamw, "rounded_root", rounded)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    unused = re.compile("Fp16|NONE|NESTEROV|expand")
    wanted = [name for name in EVERY if not unused.search(name)]
    return EmulatedLauncher(wanted, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_device(launch: EmulatedLauncher) -> Placing:
    launch.launched.clear()
    return Placing(launch)


def small(**sections: Any) -> Config:
    """Four microbatches a step, since an emulated kernel takes a while."""
    return tiny_config(batch={"global_batch_size": 4, "microbatch_size": 1}, **sections)


def test_a_gpu_has_sent_all_before_it_joins_other_stages_in_a_sum(
    on_device: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stage of a tie may not come to the sum without what is sent here."""
    held: dict[int, int] = defaultdict(int)
    send, arrivals, finish = WorldLink.send, WorldLink.arrivals, GradientSync.finish

    def slow_send(link: WorldLink, message: Message) -> None:
        send(link, message)
        held[id(link)] += 3

    def looked(link: WorldLink) -> list[Message]:
        held[id(link)] = max(0, held[id(link)] - 1)
        return arrivals(link)

    def watch(trainer: Trainer) -> None:
        def finished() -> None:
            assert trainer.link.unsent == 0
            finish(trainer.sync)

        monkeypatch.setattr(trainer.sync, "finish", finished)

    monkeypatch.setattr(WorldLink, "send", slow_send)
    monkeypatch.setattr(WorldLink, "arrivals", looked)
    monkeypatch.setattr(WorldLink, "unsent", property(lambda link: held[id(link)]))
    config = small(optimizer=SGD, train={"steps": 2})

    train_in_process(
        2, 1, tiny_gpt(config), config, token_data(), before=watch, placement=on_device
    )


def test_the_host_asks_its_device_once_a_step(
    on_device: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever needs a number of the device waits for all that was enqueued before."""
    for name in ("CHUNK_LOGITS", "GPU_CHUNK_LOGITS"):
        monkeypatch.setattr(losses, name, 16)  # as for a large vocabulary
    asked: list[str] = []
    run = devices._run

    def watched(operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
        name = operation.name().partition(".")[0]
        given = any(isinstance(one, devices.PretendTensor) for one in arguments)
        leaves = name == "aten::_to_copy" and str(named.get("device")) == "cpu"
        if given and (name in WAITS or leaves):
            asked.append(name)
        return run(operation, arguments, named)

    def watch(trainer: Trainer) -> None:
        step = trainer._step.train_step

        def counted(*arguments: Any) -> Any:
            asked.clear()
            monkeypatch.setattr(devices, "_run", watched)
            verdict = step(*arguments)
            monkeypatch.setattr(devices, "_run", run)
            steps.append(list(asked))
            return verdict

        monkeypatch.setattr(trainer._step, "train_step", counted)

    steps: list[list[str]] = []
    config = small(optimizer=SGD, train={"steps": 3})
    train_in_process(
        1, 1, tiny_gpt(config), config, token_data(), before=watch, placement=on_device
    )

    # The first step looks at what layers and the loss do.
    assert steps[1:] == [["aten::_to_copy"]] * 2


def row(name: str, layout: Layout, **sections: Any) -> Any:
    """A run of the table below."""
    marks = () if name == "sharded and offloaded" else pytest.mark.exhaustive
    return pytest.param(layout, {"train": {"steps": 2}, **sections}, id=name, marks=marks)


GRADUAL = {"method": "gradual", "at_step": 1, "interval": 1, "until_step": 4}
LAMB = {"name": "lamb", "eps": 1e-6}
FIVE = {"steps": 5}
RUNS = [
    row("bf16", (1, 1), precision="bf16", samo={"gradient": "half"}),
    row(
        "bf16, fp32 gradients", (1, 1), precision="bf16", optimizer=ADAMW, samo={"gradient": "fp32"}
    ),
    row("a rule without a kernel", (2, 1), optimizer=LAMB, train={"steps": 3}),
    row("sharded and offloaded", (2, 2), samo={"zero_stage": 1, **OFFLOAD}),
    row("offloaded, bf16", (2, 1), precision="bf16", samo=OFFLOAD, train={"steps": 3}),
    row("offloaded, masks that change", (1, 1), samo=OFFLOAD, pruning=GRADUAL, train=FIVE),
    row(
        "dropout and evaluation",
        (2, 1),
        model={"dropout": 0.2},
        # torch's recomputation ends the process on a device that is written in Python.
        pipeline={"checkpoint_activations": 0},
        train={"steps": 2, "eval_steps": 2},
    ),
    row("exact sums", (2, 2), samo={"gradient": "exact"}, train={"steps": 3}),
]


@pytest.mark.parametrize(("layout", "sections"), RUNS)
def test_a_run_on_devices_is_bitwise_that_on_cpus(
    layout: Layout, sections: dict[str, Any], on_device: Placing
) -> None:
    config = small(**{"optimizer": SGD, **sections})
    on_cpus = config.with_values({"samo.offload": False})
    data = token_data()
    validation = token_data(24) if "eval_steps" in sections["train"] else None
    run = partial(train_in_process, *layout, validation=validation)

    ranks = run(tiny_gpt(config), config, data, placement=on_device)
    references = run(tiny_gpt(config), on_cpus, data)

    for (ours, trace), (reference, expected) in zip(ranks, references, strict=True):
        assert_bitwise(trace, expected)
        assert ours.last_evaluation == reference.last_evaluation
        for layer in ours.layers:
            held = [layer.state.gradient, *layer.state.frozen]
            held += [tensor.parameter for tensor in layer.state.tensors]
            held += [] if config.samo.offload else [*layer.state.optimizer_state.moments_K.values()]
            assert {tensor.device for tensor in held} == {torch.device("pretend", 0)}
    has_kernel = config.optimizer.name != "lamb"
    assert any(name.startswith("step_") for name in on_device.launch.launched) == has_kernel


def test_bytes_of_state_on_the_host_are_as_the_formula_has_them(on_device: Placing) -> None:
    config = small(precision="bf16", samo=OFFLOAD, train={"steps": 1})

    ranks = train_in_process(2, 1, tiny_gpt(config), config, token_data(), placement=on_device)

    for trainer, _ in ranks:
        layers = [layer.spec.name for layer in trainer.layers]
        pruned = {t.name: t.kept for layer in trainer.layers for t in layer.state.owned}
        expected = stage_bytes(
            [info for info in trainer.profile.layers if info.name in layers],
            trainer.profile.ties,
            pruned,
            trainer.plan.state_format,
        )
        assert trainer.state_bytes() == expected
        assert expected.offloaded > 0 and expected.master == expected.optimizer == 0
    pinned = sum(device.pinned_bytes for device in on_device.devices)
    assert pinned == sum(trainer.state_bytes().offloaded for trainer, _ in ranks)


@pytest.mark.exhaustive
def test_a_run_goes_on_on_the_cpu_and_back(on_device: Placing, tmp_path: Path) -> None:
    config = small(optimizer=SGD, checkpoint={"every": 2}, train={"steps": 6})
    whole = ran((1, 1), config, tmp_path / "whole")
    there = ran((2, 1), config, tmp_path / "run", stop_after=2, placement=on_device)
    here = ran((1, 1), config, tmp_path / "run", resume="auto", stop_after=4)
    back = ran((2, 1), config, tmp_path / "run", resume="auto", placement=on_device)

    assert there.losses | here.losses == {step: whole.losses[step] for step in range(1, 5)}
    same(back, whole)


@pytest.mark.parametrize(
    ("layout", "method"),
    by_default([], itertools.product([(1, 1), (2, 2)], ["magnitude", "wanda", "sparsegpt"])),
)
def test_layers_are_pruned_and_healed_on_devices_as_on_cpus(
    layout: Layout, method: str, on_device: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fused one has other roundings, and no device that is written in Python has it.
    plain = partial(torch.optim.Adam, foreach=False)
    monkeypatch.setattr(healing, "Adam", lambda masters, betas, **_: plain(masters, betas=betas))
    config = small(
        optimizer=SGD,
        train={"steps": 1},
        pruning={"method": method, "sparsity": 0.6, "calibration_samples": 6}
        | {"heal": "blocks", "heal_passes": 2, "heal_batch": 2},
    )
    model = loaded(tiny_gpt(config))

    def started(placement: Placing | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def note(trainer: Trainer) -> None:
            for layer in trainer.layers:
                for tensor in layer.state.owned:
                    found[tensor.name] = layer.state.dense_master(tensor.name).cpu().clone()

        train_in_process(*layout, model, config, token_data(), before=note, placement=placement)
        return found

    assert_equal_tensors(started(on_device), started(None))
