"""The commands of users, on a GPU and on the CPU: both end well and have the same losses, to
rounding.

All commands run side by side: on the CPU as many at once as there are cores for, on the GPU a few,
since processes that share one take turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu.ranks_training import ON_CPU
from support.hf import write_folder
from support.mpirun import TESTS, Finished, run_alone, run_mpirun

from axsparse.models.start_weights import open_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is to be had here")

LIMIT_SECONDS = 170
CORES_OF_A_JOB = 2
JOBS_OF_A_GPU = 3
TOLERANCE = 0.02
"""Relative, of a loss: bf16 has 8 bits of mantissa, and steps build on each other."""
PRUNED_TOLERANCE = 0.07
"""Relative, by the norm, of a pruned weight in fp32: two entries whose scores are all but equal may
change places, which is 0.05, and healing moves a weight by 0.09 to 0.15."""
STEPS = 6
SHORT = (
    *(f"train.steps={STEPS}", "train.log_every=1", "train.eval_every=3", "train.eval_steps=2"),
    *("batch.global_batch_size=8", "schedule.warmup_steps=2", "train.peak_flops=1e12"),
)
SMALL = ("model.num_layers=2", "model.hidden_size=64", "model.sequence_length=32")
ONE_STAGE = "layout.g_inter=1"
TWO_STAGES = "layout.g_inter=2"


def given(settings: Sequence[str]) -> list[str]:
    return ["--config", "quickstart.yaml", *(word for one in settings for word in ("--set", one))]


@dataclass(frozen=True)
class Training:
    """A training of the quickstart."""

    settings: tuple[str, ...] = ()
    ranks: int = 1
    stages: int = 1
    on_gpu: tuple[str, ...] = ()
    """Settings that only a GPU knows."""


TRAININGS = {
    "as it is": Training(),
    "dense": Training(("samo.enabled=false",)),
    "stages and replicas": Training(ranks=4, stages=2),
    "split backwards": Training(("pipeline.split_backward=true",), 2, 2),
    "members": Training(("layout.g_tensor=2",), 2),
    "exact gradients": Training(("samo.gradient=exact",), 2),
    "offloaded": Training(on_gpu=("samo.offload=true",)),
    "sparse products": Training(("samo.sparse_products=true", "pruning.sparsity=0.95")),
    "compiled": Training(("pipeline.compile=true",)),
    "dropout": Training(("model.dropout=0.1",)),
    "2:4": Training(("pruning.pattern=2:4", "pruning.sparsity=0.5")),
    "wanda": Training(("pruning.method=wanda", "pruning.calibration_samples=8")),
    "pruned later": Training(("pruning.at_step=3",)),
    "traced": Training(("train.trace=2",)),
}
LLAMA = (
    *("--from", "model", "--data", "texts", "--validation", "held", "--set", "precision=fp32"),
    *("--set", "batch.global_batch_size=4", "--set", "pruning.calibration_samples=8"),
    *("--set", "train.peak_flops=1e12", "--set", "schedule.warmup_steps=1"),
)
PRUNINGS = {
    "blocks": (1, ("--heal", "blocks")),
    "blocks by SparseGPT": (1, ("--heal", "blocks", "--method", "sparsegpt")),
    "blocks of two stages": (2, ("--heal", "blocks", "--set", TWO_STAGES)),
    "blocks of two replicas": (2, ("--heal", "blocks", "--set", ONE_STAGE)),
    "training": (1, ("--heal", "train", "--steps", "2")),
    "magnitude": (1, ("--heal", "none", "--method", "magnitude")),
}
BEHIND = {
    # Commands that read what the first training has left, and a word of what they say.
    "resume": (
        ("train", *given((*SHORT, *SMALL, ONE_STAGE, "train.steps=8")), "--resume", "RUN"),
        "8/8",
    ),
    "generate": (("generate", "RUN", "--prompt", "def ", "--tokens", "20"), ""),
    "evaluate": (("evaluate", "RUN"), "loss"),
    "export": (("export", "RUN", "--to", "hf", "--out", "exported"), "exported"),
    "report": (("report", "RUN", "--out", "page.html"), "page.html"),
}


@dataclass
class Devices:
    """How the same command ended on each device, where it ran."""

    gpu: Future[Finished]
    cpu: Future[Finished]
    folders: dict[str, Path]

    def both(self) -> Iterator[tuple[str, Path]]:
        """Both devices and their folders; AssertionError for a command that failed."""
        for device, job in (("gpu", self.gpu), ("cpu", self.cpu)):
            done = job.result()
            assert done.returncode == 0, f"{device}: {done}"
            yield device, self.folders[device]


class Jobs:
    """All commands that tests ask for, begun at once."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        self._folder = folder
        self._on_gpu = ThreadPoolExecutor(JOBS_OF_A_GPU)
        self._on_cpu = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_A_JOB))
        if names & BEHIND.keys():
            names = {"as it is", *names}
        self.trained = {n: self._begun(n, self._train) for n in TRAININGS if n in names}
        self.pruned = {n: self._begun(n, self._prune) for n in PRUNINGS if n in names}

    def _begun(self, name: str, job: Callable[[str, Path, dict[str, str]], Finished]) -> Devices:
        folders = {device: self._folder / device / name for device in ("gpu", "cpu")}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        gpu = self._on_gpu.submit(job, name, folders["gpu"], {})
        return Devices(gpu, self._on_cpu.submit(job, name, folders["cpu"], ON_CPU), folders)

    def end(self) -> None:
        """Begin no further one, and wait for those that run."""
        for pool in (self._on_gpu, self._on_cpu):
            pool.shutdown(cancel_futures=True)

    def _train(self, name: str, folder: Path, environment: dict[str, str]) -> Finished:
        training = TRAININGS[name]
        settings = [*SHORT, *SMALL, f"layout.g_inter={training.stages}", *training.settings]
        settings += () if environment == ON_CPU else training.on_gpu
        own = given([*settings, f"run_dir={folder / 'run'}"])
        done = run(["train", *own], training.ranks, folder, environment)
        if name != "as it is" or done.returncode != 0:
            return done
        for behind, (more, _) in BEHIND.items():
            own = [word.replace("RUN", str(folder / "run")) for word in more]
            ended = run(own, 1, folder, environment)
            (folder / f"{behind}.json").write_text(
                json.dumps([ended.returncode, ended.stdout, ended.stderr])
            )
        return done

    def _prune(self, name: str, folder: Path, environment: dict[str, str]) -> Finished:
        ranks, more = PRUNINGS[name]
        write_folder(folder / "model")
        return run(["prune", *LLAMA, "--out", "out", *more], ranks, folder, environment)


def run(words: list[str], ranks: int, folder: Path, environment: dict[str, str]) -> Finished:
    path = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    own = {**environment, "PYTHONPATH": path}
    command = ["-m", "axsparse", *words]
    if ranks == 1:
        return run_alone(command, own, LIMIT_SECONDS, folder)
    return run_mpirun(ranks, command, own, LIMIT_SECONDS, folder)


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Jobs]:
    own = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params["name"] for item in own if hasattr(item, "callspec")}
    begun = Jobs(tmp_path_factory.mktemp("commands"), names)
    try:
        yield begun
    finally:
        begun.end()


def losses(run_dir: Path) -> list[float]:
    """The losses of steps and of evaluations, in their order."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines for key in ("loss", "eval_loss") if key in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    file = open_weights(folder / "model.safetensors")
    return {name: file.read(name).float() for name in file.shapes}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_on_the_gpu_has_the_losses_of_the_cpu(jobs: Jobs, name: str) -> None:
    found = {device: losses(folder / "run") for device, folder in jobs.trained[name].both()}

    assert len(found["gpu"]) >= STEPS
    assert found["gpu"] == pytest.approx(found["cpu"], rel=TOLERANCE)


@pytest.mark.parametrize("name", BEHIND)
def test_commands_read_what_was_trained_on_the_gpu(jobs: Jobs, name: str) -> None:
    for device, folder in jobs.trained["as it is"].both():
        code, screen, errors = json.loads((folder / f"{name}.json").read_text())
        assert code == 0, f"{device}: {errors}{screen}"
        assert BEHIND[name][1] in screen


@pytest.mark.parametrize("name", PRUNINGS)
def test_a_folder_is_pruned_and_healed_as_on_the_cpu(jobs: Jobs, name: str) -> None:
    found = {device: weights(folder / "out") for device, folder in jobs.pruned[name].both()}

    ours, expected = found["gpu"], found["cpu"]
    assert ours.keys() == expected.keys()
    for tensor, value in expected.items():
        distance = (ours[tensor] - value).norm()
        assert distance <= PRUNED_TOLERANCE * value.norm(), tensor
