"""Nothing that the package reads can run code: how its sources may read files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import axsparse

PACKAGE = Path(axsparse.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.unsafe_load", "yaml.full_load"}
HARMLESS_LOADERS = ("yaml.SafeLoader", "yaml.BaseLoader", "YamlLoader")
"""They make plain values; the second one makes texts, lists and mappings only."""
PICKLING_MPI = {
    *("bcast", "allgather", "gather", "scatter", "alltoall", "isend", "irecv", "ssend", "sendrecv"),
}
"""mpi4py's methods with small letters send pickles."""


def complaints(source: str) -> Iterator[str]:
    """Calls and imports of a module that may unpickle or run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            names = []
        for name in names:
            if name.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"imports {name}"
        if isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
    if called in FORBIDDEN_CALLS:
        yield f"calls {called}"
    if called == "torch.load" and options.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
        yield "numpy.load of pickles"
    if called == "yaml.load" or "Loader" in options:
        loader = options.get("Loader", "its own choice")
        if loader not in HARMLESS_LOADERS:
            yield f"reads YAML with {loader}"
    on_comm = isinstance(node.func, ast.Attribute) and "comm" in ast.unparse(node.func.value)
    if on_comm and called.rpartition(".")[2] in PICKLING_MPI:
        yield f"sends pickles by {called}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.source",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.compose(text, Loader=yaml.Loader)",
        "eval(text)",
        "self._comm.bcast(text)",
    ],
)
def test_each_way_to_run_code_is_seen(source: str) -> None:
    assert len(list(complaints(source))) == 1


def test_no_module_unpickles_or_runs_what_it_reads() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {complaint}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for complaint in complaints(path.read_text(encoding="utf-8"))
    }

    assert not found
