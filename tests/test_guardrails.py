"""Rules of the house that no single module can keep by itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.mpirun import LONGEST_SECONDS
from support.package import PACKAGE, sources

import axsparse

FLOORS = {
    # 0: what everything may stand on
    "errors": 0,
    "grid": 0,
    "comm": 0,
    "streams": 0,
    "disk": 0,
    "seeds": 0,
    "stopping": 0,
    "waiting": 0,
    "local": 0,
    "pipeline.actions": 0,
    "pipeline.policy": 0,
    "pipeline.schedules": 0,
    "pipeline.partition": 0,
    # 1: settings, and the parts of the state
    "device": 1,
    "cuda_device": 1,
    "pipeline.header": 1,
    "pipeline.wire": 1,
    "pipeline.lane": 1,
    "config.schema": 1,
    "config.refusal": 1,
    "config.load": 1,
    "config.validate": 1,
    "models.layer": 1,
    "models.buffers": 1,
    "models.initial": 1,
    "scheduler.request": 1,
    "scheduler.template": 1,
    "scheduler.slurm": 1,
    "scheduler.lsf": 1,
    "samo.compiled": 1,
    "samo.cuda.launch": 1,
    "samo.cuda.helpers": 1,
    "samo.cuda.compress": 1,
    "samo.cuda.step": 1,
    "samo.cuda.compile": 1,
    "samo.index": 1,
    "samo.backend": 1,
    "samo.index_mask": 1,
    "samo.index_uint16": 1,
    "samo.memory": 1,
    "samo.pieces": 1,
    "samo.precision": 1,
    "samo.shards": 1,
    "samo.tensor": 1,
    "samo.state": 1,
    "samo.optimizer": 1,
    "samo.adamw": 1,
    "samo.sgd": 1,
    "samo.lamb": 1,
    "planner.simulator": 1,
    "planner.cluster": 1,
    "planner.workload": 1,
    "planner.gpt_formula": 1,
    "planner.memory": 1,
    "planner.cost": 1,
    "planner.step": 1,
    "planner.choose": 1,
    "planner.tensor_parallel": 1,
    "planner.surveyed": 2,
    "planner.configured": 2,
    "planner.timeline": 1,
    "planner.report": 1,
    "planner.drawing": 1,
    "planner.fitting": 1,
    "samo.learning_rate": 1,
    "data_parallel.ordered": 1,
    "observe.phases": 1,
    "observe.device_phases": 1,
    "observe.pulse": 1,
    "observe.memory": 1,
    "observe.trace": 1,
    # 2: models, who is kept, and what happens to the state
    "models.gpt": 2,
    "models.losses": 2,
    "models.vgg": 2,
    "models.wide_resnet": 2,
    "models.cnn": 2,
    "models.sequential": 2,
    "models.weights": 2,
    "models.safetensors": 1,
    "models.hf_gpt2": 2,
    "models.named": 2,
    "models.cost": 2,
    "models.survey": 2,
    "pruning.criteria": 2,
    "pruning.distribution": 2,
    "pruning.early_bird": 2,
    "pruning.masks": 2,
    "pruning.pattern": 2,
    "pruning.schedules": 2,
    "pruning.selection": 2,
    "pruning.targets": 2,
    "pruning.ticket": 2,
    "pruning.ticket_manifest": 2,
    "samo.construct": 2,
    "samo.offload": 2,
    "samo.dynamic": 3,
    "samo.footprint": 2,
    "samo.growth": 2,
    "samo.gradient": 2,
    "samo.loss_scale": 2,
    "samo.norm": 2,
    "samo.prune": 2,
    "samo.update": 2,
    # 3: data, records, and what runs on one rank
    "data.order": 3,
    "data.dataset": 3,
    "data.augment": 3,
    "data.batches": 3,
    "data.digits": 3,
    "data.images": 3,
    "data.prefetch": 3,
    "data.prepare": 3,
    "data.prepare_documents": 3,
    "data.prepare_files": 3,
    "data.prepare_merge": 3,
    "data.prepare_part": 3,
    "data.prepare_sources": 3,
    "data.prepare_tokenizers": 3,
    "data.prepare_workers": 3,
    "data.stdlib": 3,
    "data.token_file": 3,
    "data.tokens": 3,
    "data.workers": 3,
    "observe.banner": 3,
    "observe.console": 3,
    "observe.gather": 3,
    "observe.metrics": 3,
    "observe.out_of_memory": 3,
    "observe.heartbeat": 3,
    "observe.laggard": 3,
    "observe.recorder": 3,
    "observe.slow": 3,
    "machine": 3,
    "checkup": 3,
    "data_parallel.agreement": 3,
    "data_parallel.sharded": 3,
    "data_parallel.sync": 3,
    "data_parallel.buffers": 3,
    "pipeline.stage": 3,
    "pipeline.layer_calls": 3,
    "layouts": 3,
    "resolve": 3,
    # 4: transports, and what needs other ranks
    "data_parallel.collective_local": 4,
    "data_parallel.collective_mpi": 4,
    "data_parallel.collective_nccl": 4,
    "data_parallel.collective_staged": 4,
    "pipeline.link_local": 4,
    "pipeline.link_mpi": 4,
    "pipeline.link_device": 4,
    "pipeline.link_nccl": 4,
    "pipeline.link_staged": 4,
    "pipeline.wire_mpi": 4,
    "nccl": 4,
    "placing": 4,
    "transport_gpu": 4,
    "pipeline.engine": 4,
    "transport": 4,
    "evaluation": 4,
    "saving": 4,
    "job": 4,
    "observe.tracing": 4,
    "observe.watchdog": 4,
    "sources": 4,
    "startup": 4,
    "planning": 4,
    "pruning.ticket_writing": 4,
    "checkpoint.manifest": 4,
    "checkpoint.folder": 4,
    "checkpoint.verify": 4,
    "checkpoint.stream": 4,
    "checkpoint.background": 4,
    "checkpoint.contents": 4,
    "checkpoint.save": 4,
    "checkpoint.restore": 4,
    "checkpoint.compare": 4,
    "checkpoint.choose": 4,
    "run_dir": 4,
    "exporting": 4,
    "run_lock": 4,
    "masking.change": 4,
    "masking.choose": 4,
    "masking.live": 4,
    "masking.moving": 4,
    "masking.once": 4,
    "masking.rewind": 4,
    "masking.saving": 4,
    "masking.search": 4,
    "masking.stepwise": 4,
    "parts": 4,
    "spikes": 4,
    "stepping": 4,
    "trainer": 4,
    # 5 and 6: joining the parts, and the commands
    "reporting": 5,
    "training": 5,
    "joining": 5,
    "builder": 5,
    "measure": 5,
    "train": 6,
    "plan": 6,
    "calibrate": 6,
    "trace_command": 6,
    "data_command": 6,
    "submit": 6,
    "doctor": 6,
    "checkpoint_command": 6,
    "export": 6,
    "command": 5,
    "ticket_command": 6,
    "__main__": 6,
}
FOLDERS = {
    "checkpoint",
    "config",
    "data",
    "data_parallel",
    "models",
    "observe",
    "pipeline",
    "masking",
    "planner",
    "pruning",
    "samo",
    "samo/cuda",
    "scheduler",
}
MPI_MODULES = {
    "transport",
    "pipeline.link_mpi",
    "pipeline.wire_mpi",
    "data_parallel.collective_mpi",
}


def statements(tree: ast.AST, *, for_types_too: bool) -> Iterator[ast.AST]:
    """All nodes; those under `if TYPE_CHECKING` only if asked for."""
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "TYPE_CHECKING"
            and not for_types_too
        ):
            continue
        yield node
        yield from statements(node, for_types_too=for_types_too)


def imported(tree: ast.AST, *, for_types_too: bool = False) -> set[str]:
    """Full names of what is imported; of `from a import b` both "a" and "a.b"."""
    names = set()
    for node in statements(tree, for_types_too=for_types_too):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module stands"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(str(node.module))
    return names


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module needs when it runs."""
    names = {name.removeprefix("axsparse.") for name in imported(sources()[module])}
    return names & sources().keys()


def loaded_by(code: str) -> list[str]:
    """Which of the heavy libraries are there after some code ran in a fresh interpreter."""
    ask = "import sys; print([name for name in ('torch', 'mpi4py') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{ask}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_SECONDS,
    )
    answer: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return answer


def test_every_module_has_a_floor() -> None:
    assert set(FLOORS) == set(sources())


def test_no_step_waits_for_a_whole_device() -> None:
    """Marks wait for themselves; a GPU is tried when it is taken, and timed before the start."""
    waiting = {
        name
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "synchronize"
    }

    assert waiting == {"cuda_device", "placing", "reporting"}


def test_no_name_of_the_python_api_is_a_modules() -> None:
    """Importing a module puts it into the package, in the place of what has its name."""
    tops = {name.partition(".")[0] for name in sources()} | FOLDERS

    assert not tops & set(axsparse.__all__)


def test_folders_say_what_they_hold_and_hold_no_code_of_their_own() -> None:
    for folder in FOLDERS:
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, folder
    heads = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    assert heads == FOLDERS | {"."}


def test_imports_go_to_lower_or_equal_floors_only() -> None:
    climbing = [
        f"{module} (floor {FLOORS[module]}) imports {other} (floor {FLOORS[other]})"
        for module in sources()
        for other in sorted(own_imports(module))
        if FLOORS[other] > FLOORS[module]
    ]

    assert not climbing, "\n".join(climbing)


def test_no_module_needs_itself_on_the_way() -> None:
    placed: set[str] = set()
    left = set(sources())
    while left:
        free = {module for module in left if own_imports(module) <= placed}
        assert free, f"imports run in a circle among {sorted(left)}"
        placed |= free
        left -= free


def test_mpi_is_imported_by_the_transports_only() -> None:
    users = {
        module
        for module, tree in sources().items()
        if any(name.split(".")[0] == "mpi4py" for name in imported(tree, for_types_too=True))
    }

    assert users == MPI_MODULES


def test_nothing_outside_samo_looks_into_an_index() -> None:
    curious = {
        module
        for module, tree in sources().items()
        if not module.startswith("samo.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("_positions", "own_index")
    }

    assert curious == set()


@pytest.mark.parametrize(
    "code",
    [
        "import axsparse",
        "import axsparse.pipeline.policy",
        "import axsparse.planner.simulator",
        "import axsparse.grid, axsparse.errors, axsparse.comm, axsparse.config.validate",
        "import runpy, sys\n"
        "sys.argv = ['train', '--help']\n"
        "try: runpy.run_module('axsparse.train', run_name='__main__')\n"
        "except SystemExit as end: assert end.code in (0, None)",
        "import runpy, sys\n"
        "sys.argv = ['axsparse', '--help']\n"
        "try: runpy.run_module('axsparse', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0",
    ],
    ids=["axsparse", "policy", "simulator", "settings", "train --help", "axsparse --help"],
)
def test_what_answers_at_once_loads_neither_torch_nor_mpi(code: str) -> None:
    assert loaded_by(code) == []
