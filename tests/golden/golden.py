"""Golden runs: the rows of `rows.yaml` are trained, and their results are compared.

    python tests/golden/golden.py                   compare with golden.json
    python tests/golden/golden.py --update          write golden.json anew
    python tests/golden/golden.py --against REV     compare with another revision, on this machine
    python tests/golden/golden.py --rows PATTERN    only rows whose names have it (a regular
                                                    expression), and the rows that they start from
    python tests/golden/golden.py --with SETTING    with a setting that changes no value, such as
                                                    samo.weights=sparse; texts are not compared

Values (losses, gradient norms, digests of weights, checkpoint and export) and texts (resolved
configuration, screen) are compared apart: a renaming changes texts alone. Values are compared bit
for bit where torch computes as it did on a machine of golden.json, by its fingerprint, else losses
and norms within a tolerance; what rows of one run have in common (`same` in rows.yaml) is compared
bit for bit everywhere.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from support.mpirun import Finished, run_alone, run_mpirun  # noqa: E402
from support.preparing import write_megatron  # noqa: E402

GOLDEN = HERE / "golden.json"
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""By how much losses of another machine's torch may differ, relative; norms by five times that."""
SERIES = ("loss", "grad_norm", "weights", "validation")
SHARED = ("loss", "grad_norm", "weights", "validation", "export")
"""Values that rows which are the `same` have in common; how state is stored may differ."""


@dataclass(frozen=True)
class Row:
    """A run, as rows.yaml says it."""

    name: str
    ranks: int = 1
    set: Sequence[str] = ()
    same: str | None = None
    weights: str | None = None
    hf: str | None = None
    model: Mapping[str, Any] | None = None
    resume: str | None = None
    program: str | None = None

    @property
    def needs(self) -> list[str]:
        """The rows that have to be there for this one."""
        return [
            name for name in (self.same, self.weights, self.hf, self.resume) if name is not None
        ]

    @property
    def precision(self) -> str:
        """The type that it computes in."""
        return next((s.split("=")[1] for s in self.set if s.startswith("precision=")), "fp32")


@dataclass
class Table:
    """All rows, and the settings that they share."""

    base: Mapping[str, Any]
    rows: dict[str, Row]

    @staticmethod
    def read(text: str) -> Table:
        """The table of a rows.yaml."""
        said = yaml.safe_load(text)
        return Table(said["base"], {name: Row(name, **row) for name, row in said["rows"].items()})

    def with_setting(self, setting: str) -> Table:
        """The same rows, all of them with one more setting."""
        rows = {name: replace(row, set=(*row.set, setting)) for name, row in self.rows.items()}
        return Table(self.base, rows)

    def chosen(self, pattern: str) -> list[Row]:
        """The rows whose names have a pattern, and those that they need, in their order."""
        names = {name for name in self.rows if re.search(pattern, name)}
        names.add(next(iter(self.rows)))  # configurations are compared with that of the first
        for name in reversed(self.rows):
            if name in names:
                names.update(self.rows[name].needs)
        has_transformers = find_spec("transformers") is not None
        return [
            row
            for name, row in self.rows.items()
            if name in names and (row.model is None or has_transformers)
        ]


@dataclass
class Result:
    """The values and texts of a row's run."""

    values: dict[str, Any] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    screen: list[str] = field(default_factory=list)


# -- Running --------------------------------------------------------------------------------


class Runner:
    """Trains rows in a separate folder, with the package that Python finds."""

    def __init__(self, folder: Path, table: Table, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._table = table
        self._done: dict[str, Future[Result]] = {}
        write_tokens(folder / "training", 40)
        write_tokens(folder / "validation", 10)
        (folder / "exports").mkdir()

    def run(self, rows: Sequence[Row], workers: int) -> dict[str, Result]:
        """All rows, several at a time; each follows those that it needs in `rows`."""
        with ThreadPoolExecutor(workers) as pool:
            for row in rows:
                self._done[row.name] = pool.submit(self._train, row)
            return {name: result.result() for name, result in self._done.items()}

    def _train(self, row: Row) -> Result:
        for name in row.needs:
            if "failed" in self._done[name].result().values:
                return Result({"failed": f"row {name!r} failed"})
        try:
            return self._trained(row)
        except RuntimeError as reason:
            return Result({"failed": str(reason)})

    def _trained(self, row: Row) -> Result:
        base, run = f"{slug(row.name)}.yaml", f"runs/{slug(row.name)}"
        (self._folder / base).write_text(yaml.safe_dump(self._settings(row)), encoding="utf-8")
        words = ["-m", "axsparse", "train", "--config", base, "--run-dir", run]
        words += [word for setting in row.set for word in ("--set", setting)]
        if row.program is not None:
            words = [str(self._programs / row.program), base, *row.set, f"run_dir={run}"]
        if row.resume is not None:
            words += ["--resume", f"runs/{slug(row.resume)}/checkpoints/step-3"]
        done = self._start(words, row.ranks)
        result = Result(series_of(self._folder / run), config_lines(self._folder / run))
        if row.resume is not None:
            for name, values in series_of(self._folder / f"runs/{slug(row.resume)}").items():
                result.values[name] = values[: len(values) // 2] + result.values[name]
        result.screen = screen_lines(done)
        result.values["checkpoint"] = tensors_digest(self._folder / run / "checkpoints" / "step-6")
        out = self._folder / self._export(row.name, "torch")
        result.values["export"] = tensors_digest(out)
        return result

    def _settings(self, row: Row) -> dict[str, Any]:
        """The configuration file of a row."""
        settings = dict(self._table.base)
        if row.model is not None:
            settings["model"] = row.model
        if row.hf is not None:
            settings["model"] = {"from": self._export(row.hf, "hf")}
        if row.weights is not None:
            settings["model"] = {**settings["model"], "weights": self._export(row.weights, "torch")}
        return settings

    def _export(self, name: str, kind: str) -> str:
        """The path of the trained weights, as a file or a folder of transformers; made once."""
        out = f"exports/{slug(name)}.{'safetensors' if kind == 'torch' else 'folder'}"
        if not (self._folder / out).exists():
            run = f"runs/{slug(name)}"
            self._start(["-m", "axsparse", "export", run, "--to", kind, "--out", out], 1)
        return out

    def _start(self, words: Sequence[str], ranks: int) -> Finished:
        start = run_alone if ranks == 1 else lambda *a, **k: run_mpirun(ranks, *a, **k)
        done: Finished = start(words, cwd=self._folder)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}\n{done}")
        return done


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def write_tokens(stem: Path, documents: int, length: int = 250) -> None:
    """Documents of tokens below 64, in Megatron's format; the same on every machine."""
    drawn = np.frombuffer(hashlib.shake_256(stem.name.encode()).digest(documents * length), "u1")
    tokens = np.cumsum(drawn & 15) & 63  # a token is near the one before
    write_megatron(stem, tokens.reshape(documents, length).tolist(), 1)


# -- Reading what a run has left ------------------------------------------------------------


def series_of(run: Path) -> dict[str, list[Any]]:
    """Loss, norm and digest of the weights for each step, and the evaluations."""
    found: dict[str, list[Any]] = {name: [] for name in SERIES}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "grad_norm" in record:
            found["loss"].append(record["loss"])
            found["grad_norm"].append(record["grad_norm"])
            found["weights"].append(record["weights_digest"])
        elif "eval_loss" in record:
            found["validation"].append(record["eval_loss"])
    return found


def tensors_digest(path: Path) -> str:
    """A digest of all tensors of a safetensors file or a folder of them, whatever their names."""
    digests = []
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = file.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, end = (begin + offset for offset in tensor["data_offsets"])
                kind = f"{tensor['dtype']} {tensor['shape']}".encode()
                digests.append(hashlib.sha256(kind + data[first:end]).hexdigest())
    return hashlib.sha256(" ".join(sorted(digests)).encode()).hexdigest()[:16]


def config_lines(run: Path) -> list[str]:
    """The settings as they ran, as `section.key: value`."""

    def lines(key: str, value: Any) -> Iterator[str]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from lines(f"{key}.{name}" if key else name, inner)
        elif key != "run_dir":
            yield f"{key}: {', '.join(value) if isinstance(value, list) else value}"

    text = (run / "config.yaml").read_text(encoding="utf-8")
    return list(lines("", yaml.load(text, yaml.BaseLoader)))  # noqa: S506 - all values as text


VARYING = (
    (r"axsparse \d\S*", "axsparse VERSION"),
    (r"mpi \([^)]*\)", "mpi (LIBRARY)"),
    (r"~\S+ [kMG]?B", "~BYTES"),
    (r"\b\d+\.\d{4}\b", "NUMBER"),
)
"""Parts of a screen that depend on machine or version; numbers of four places are losses."""
LEFT_OUT = re.compile(
    r"step |.*: stage .*, layer .* of |warning: precision \S+ a CPU has no |compared .* with plain"
)
"""Lines of progress, which are in metrics.jsonl, and lines that depend on the CPU or its load."""


def screen_lines(done: Finished) -> list[str]:
    """The lines of all ranks, the same on every machine."""
    found = []
    for line in [*done.stdout.splitlines(), *done.stderr.splitlines()]:
        if not LEFT_OUT.match(line):
            for pattern, said in VARYING:
                line = re.sub(pattern, said, line)
            found.append(line)
    return found


def fingerprint() -> str:
    """The bits that torch computes here, as far as a few products and functions show."""
    torch.manual_seed(0)
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, inner, columns in ((24, 32, 96), (24, 128, 32), (24, 32, 64), (96, 24, 32)):
            left = torch.randn(rows, inner).to(dtype)
            right = torch.randn(columns, inner).to(dtype)
            made = torch.nn.functional.gelu(left @ right.T).float()
            made = torch.nn.functional.layer_norm(made, (columns,)).softmax(1)
            digest.update(made.numpy().tobytes() + made.square().sum().numpy().tobytes())
    version = torch.__version__.split("+")[0]
    return f"torch {version} {torch.backends.cpu.get_cpu_capability()} {digest.hexdigest()[:12]}"


# -- Comparing ------------------------------------------------------------------------------


def relative(ours: float | None, theirs: float | None) -> float:
    """The relative difference of two numbers; those that are none are the same."""
    if repr(ours) == repr(theirs):
        return 0.0
    if ours is None or theirs is None:
        return 1.0
    return abs(ours - theirs) / max(abs(ours), abs(theirs))


def bit_differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    """One line for each value that is not the same; lists name the first step that differs."""
    lines = []
    for name in names:
        one, other = ours.get(name), theirs.get(name)
        if repr(one) == repr(other):
            continue
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            at = next(n for n in range(len(one)) if repr(one[n]) != repr(other[n]))
            lines.append(f"{name} {at + 1} is {one[at]}, not {other[at]}")
        else:
            lines.append(f"{name} is {one}, not {other}")
    return lines


def near_differences(row: Row, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line for each kind of value that is beyond the tolerance."""
    lines = []
    for name, times in (("loss", 1), ("validation", 1), ("grad_norm", 5)):
        allowed = TOLERANCES[row.precision] * times
        one, other = ours.get(name, []), theirs.get(name, [])
        pairs = enumerate(zip(one, other, strict=False))
        at = next((n for n, pair in pairs if not relative(*pair) <= allowed), None)
        if len(one) != len(other):
            lines.append(f"{name} has {len(one)} values, not {len(other)}")
        elif at is not None:
            lines.append(f"{name} {at + 1} is {one[at]}, not {other[at]} ± {allowed:g} of it")
    return lines


def text_differences(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """The lines that were (-) and are now (+)."""
    diff = difflib.unified_diff(theirs, ours, n=0, lineterm="")
    return [line for line in diff if line[:3] not in ("---", "+++") and line[:2] != "@@"]


@dataclass
class Golden:
    """golden.json: texts of each row, and values by the fingerprint of torch."""

    texts: dict[str, dict[str, list[str]]]
    bits: dict[str, dict[str, dict[str, Any]]]

    @staticmethod
    def read(path: Path = GOLDEN) -> Golden:
        """The committed one, or that of another file."""
        said = json.loads(path.read_text(encoding="utf-8"))
        return Golden(said["texts"], said["bits"])

    @staticmethod
    def of(table: Table, results: Mapping[str, Result]) -> Golden:
        """These results. Of its configuration a row has only the differences from the first
        row's."""
        first = next(iter(table.rows))
        texts = {}
        for name, result in results.items():
            shared = results[first].config if name != first else []
            own = [line for line in result.config if line not in shared]
            texts[name] = {"config": own, "screen": result.screen}
        return Golden(texts, {fingerprint(): {n: r.values for n, r in results.items()}})

    def write(self, path: Path = GOLDEN) -> None:
        """Replace the committed one, or another file; a line for each series."""
        text = json.dumps({"texts": self.texts, "bits": self.bits}, indent=1, ensure_ascii=False)
        text = re.sub(
            r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text
        )
        path.write_text(text + "\n", encoding="utf-8")


def differences(table: Table, ours: Golden, theirs: Golden) -> dict[str, dict[str, list[str]]]:
    """For each row what differs, by `values` and `texts`."""
    ((here, values),) = ours.bits.items()
    exact = theirs.bits.get(here)
    other = exact or next(iter(theirs.bits.values()), {})
    found: dict[str, dict[str, list[str]]] = {}
    for name, mine in values.items():
        row = table.rows[name]
        problem = mine.get("failed") or "is not in the reference" * (name not in other)
        if problem:
            found[name] = {"values": [problem], "texts": []}
            continue
        names = list(dict.fromkeys([*mine, *other[name]]))
        lines = (
            bit_differences(mine, other[name], names)
            if exact is not None
            else near_differences(row, mine, other[name])
        )
        if row.same is not None:
            apart = bit_differences(mine, values[row.same], SHARED)
            lines += [f"{line}, as in row {row.same!r}" for line in apart]
        texts = [
            line
            for kind in ("config", "screen")
            for line in text_differences(ours.texts[name][kind], theirs.texts[name][kind])
        ]
        found[name] = {"values": lines, "texts": texts}
    return found


def report(found: Mapping[str, Mapping[str, Sequence[str]]]) -> bool:
    """Print what differs; whether anything does."""
    for kind in ("values", "texts"):
        for name, row in found.items():
            for line in row[kind]:
                print(f"{kind} · {name}: {line}")
    values, texts = (sum(bool(row[kind]) for row in found.values()) for kind in ("values", "texts"))
    print(f"{len(found)} rows: values of {values} differ, texts of {texts}")
    return bool(values or texts)


def updated(table: Table, ours: Golden, old: Golden) -> Golden:
    """The committed file with these results in the place of older ones, of any machine; rows that
    are gone leave."""
    ((here, values),) = ours.bits.items()
    stay = {
        machine: {name: row for name, row in rows.items() if name not in values}
        for machine, rows in old.bits.items()
    }
    bits = {**stay, here: {**stay.get(here, {}), **values}}
    bits = {m: {n: rows[n] for n in table.rows if n in rows} for m, rows in bits.items()}
    texts = {**old.texts, **ours.texts}
    return Golden(
        {name: texts[name] for name in table.rows if name in texts},
        {machine: rows for machine, rows in bits.items() if rows},
    )


# -- Another revision -----------------------------------------------------------------------


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A worktree of another revision, for a while."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def results_of(revision: str, pattern: str) -> Golden:
    """The results of another revision's package for its own rows, or for these if it has none."""
    with checkout(revision) as tree, tempfile.TemporaryDirectory() as folder:
        rows, out = tree / "tests" / "golden" / "rows.yaml", Path(folder) / "results.json"
        words = ["--record", str(out), "--rows", pattern]
        words += ["--table", str(rows if rows.is_file() else HERE / "rows.yaml")]
        env = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run([sys.executable, __file__, *words], env=env, check=True)
        return Golden.read(out)


# -- The command ----------------------------------------------------------------------------


def recorded(table: Table, pattern: str, programs: Path) -> Golden:
    """Run the rows; `programs` is the folder of those that are no `axsparse train`."""
    rows = table.chosen(pattern)
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        return Golden.of(
            table, Runner(Path(folder), table, programs).run(rows, os.cpu_count() or 1)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", metavar="PATTERN", default="")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--against", metavar="REV")
    parser.add_argument("--with", metavar="SETTING", dest="setting")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, default=HERE / "rows.yaml", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table.read(given.table.read_text(encoding="utf-8"))
    if given.setting is not None:
        table = table.with_setting(given.setting)
    ours = recorded(table, given.rows, given.table.resolve().parent)
    if given.record is not None:
        ours.write(given.record)
        return 0
    theirs = results_of(given.against, given.rows) if given.against else Golden.read()
    (here,) = ours.bits
    if not given.update and here not in theirs.bits:
        print(f"torch computes other bits here ({here}): losses and norms within a tolerance")
    found = differences(table, ours, theirs)
    if given.setting is not None:
        found = {name: {**row, "texts": []} for name, row in found.items()}
    differ = report(found)
    if given.update and not any("failed" in values for values in ours.bits[here].values()):
        updated(table, ours, Golden.read()).write()
        return 0
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
