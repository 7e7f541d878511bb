"""Rules of the package that no single module can keep by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from support.mpirun import run_fresh
from support.page_blocks import PACKAGE, PAGES, ROOT, sources

import axsparse
from axsparse.config.schema import Config
from axsparse.config.section import Section

NAMED_FILE = re.compile(r"`([\w/]+\.(?:py|yaml|sh|md|json|cuh))`")
"""A file that a page names, relative to the package or to the project."""
NAMELESS = re.compile(r"\A\s*(?:What|Whether what|All that|Those)\b|\b(?i:those|that)\s+of\b")
"""Matches docstrings that begin with a pronoun, or in which one stands for another noun."""
PRIVATE_WORDS = re.compile(
    r"agreement|besides?|column|described|explained|following|fold|hear|heard|held|house|judged?"
    r"|laggard|lifeline|masking|members?|mend|notice|noted|odd|place|question|refused?|resting"
    r"|rooms?|seam|settled?|slack|spread|standing|subject|survey|surveyed|tell|telling|ticket|told"
    r"|trade|undrawn|verdict|visit|visits|visiting|wholes?"
)
"""Words that names of the code once had for what the field has a word for."""
IN_PLACE = ("in_place", "InPlace")
"""Ends of names of operations in place, as torch says."""
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 6
REASON = "Reason:"
"""Begins the comment above a longer function, or one of more parameters."""
AT_ONCE = (
    *("pipeline.policy", "pipeline.simulator", "planner.layout_search", "config.validate"),
    *("runtime.grid", "runtime.errors", "runtime.communication"),
)
"""Modules that answer at once."""
MPI_MODULES = {"runtime.connection", "runtime.mpi.mpi_communication", "runtime.mpi.mpi_transport"}


def import_order() -> dict[str, int]:
    """The height of every package, from the one line of CONTRIBUTING.md that names them in
    order."""
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.strip().startswith("entry points > ")]
    heights = [height.split(",") for height in reversed(line.split(">"))]
    return {name.strip(): height for height, names in enumerate(heights) for name in names}


def package_of(module: str) -> str:
    """The package that a module lies in; "entry points" for a module of none."""
    first, dot, _ = module.partition(".")
    return first if dot else "entry points"


def flat_keys(section: type[Section]) -> Iterator[str]:
    """The names of all settings of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from flat_keys(field.annotation)


def folders() -> set[str]:
    """All folders of the package that hold modules, as paths within it."""
    paths = ("/".join(name.split(".")[:-1]) for name in sources())
    return {path for path in paths if path} | {package_of(name) for name in sources()} - {
        "entry points"
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


@cache
def own_imports(module: str, *, for_types_too: bool = False) -> set[str]:
    """The modules of the package that a module imports, at its start or late."""
    found = imported(sources()[module], for_types_too=for_types_too)
    return {name.removeprefix("axsparse.") for name in found} & sources().keys()


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method of the package, by the module that it is in."""
    for module, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield module, node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller fills in."""
    own = function.args
    names = [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def reason_above(module: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a comment directly above a function says why it is as large as it is."""
    text = (PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    lines = text.splitlines()
    at = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)]) - 2
    while lines[at].lstrip().startswith("#"):
        if lines[at].lstrip().startswith(f"# {REASON}"):
            return True
        at -= 1
    return False


def test_hints_name_extras_that_can_be_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    files = [*PACKAGE.rglob("*.py"), *(ROOT / page for page in PAGES)]
    texts = [path.read_text(encoding="utf-8") for path in files]
    named = {
        name
        for text in texts
        for found in re.findall(r"(?:axsparse|'\.)\[([a-z0-9,]+)\]", text)
        for name in found.split(",")
    }

    assert {"mpich", "text"} <= named <= extras


def test_three_entry_points_and_thirteen_packages() -> None:
    entries = {name for name in sources() if "." not in name}
    packages = {package_of(name) for name in sources()} - {"entry points"}

    assert entries == {"__main__", "train"}  # beside __init__
    assert packages | {"entry points"} == set(import_order())
    assert len(packages) == 13


def test_imports_run_down_the_one_order_only() -> None:
    """Late imports and imports for types count too; packages of one height do not know each other.
    All public names are in a package, so that none imports an entry point but the entry points."""
    heights = import_order()
    climbing = [
        f"{module} imports {other}"
        for module in sources()
        for other in sorted(own_imports(module, for_types_too=True))
        if package_of(other) != package_of(module)
        and heights[package_of(other)] >= heights[package_of(module)]
    ]
    climbing += [
        f"{module} imports axsparse"
        for module, tree in sources().items()
        if module not in ("__main__", "train") and "axsparse" in imported(tree)
    ]

    assert not climbing, "\n".join(climbing)


def test_files_that_pages_name_are_there() -> None:
    gone = [
        f"{page}: {name}"
        for page in PAGES
        for name in NAMED_FILE.findall((ROOT / page).read_text(encoding="utf-8"))
        for bases in [(ROOT, PACKAGE, (ROOT / page).parent)]
        if "/" in name and not any((base / name).exists() for base in bases)
    ]

    assert not gone, "\n".join(gone)


def test_long_functions_and_many_parameters_have_a_reason() -> None:
    large = [
        f"{module}.{function.name}"
        for module, function in functions()
        if (function.end_lineno or 0) - function.lineno + 1 > MOST_FUNCTION_LINES
        or parameters(function) > MOST_PARAMETERS
        if not reason_above(module, function)
    ]

    assert not large, "\n".join(large)


def test_no_step_waits_for_a_whole_device() -> None:
    """Marks wait for themselves; a GPU is tried when it is taken, and timed before the start."""
    waiting = {
        name
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "synchronize"
    }

    assert waiting == {"runtime.gpu.device", "training.placement", "training.run_recorder"}


def test_nothing_is_timed_by_a_clock_that_may_be_set() -> None:
    """Records say when they were written, and files of /dev/shm how old they are; no more."""
    wall = re.compile(
        r"\btime\.(time|time_ns|ctime|localtime)\b|\bfrom time import .*\btime\b|datetime\.now"
    )
    files = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    readers = {path.as_posix() for path, text in files.items() if wall.search(text)}

    assert readers == {"observe/recorder.py", "runtime/shared_segments.py"}


def test_no_name_of_the_python_api_is_a_modules() -> None:
    """Importing a module puts it into the package, in the place of what has its name."""
    assert not {name.partition(".")[0] for name in sources()} & set(axsparse.__all__)


def test_folders_say_what_they_hold_and_hold_no_code_of_their_own() -> None:
    for folder in folders():
        tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, folder
    heads = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    assert heads == folders() | {"."}


def test_docstrings_name_their_object() -> None:
    """Modules, classes and functions, and the strings below attributes."""
    texts = {
        f"{module}:{node.lineno}": node.value.value
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }

    assert not [where for where, text in texts.items() if NAMELESS.search(str(text))]


def test_names_are_the_fields_words() -> None:
    """Settings, options, classes and functions."""
    names = {
        f"{module}.{node.name}": node.name
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    names |= {key: key for key in flat_keys(Config)}
    names |= {
        f"{module} {node.value}": node.value
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        if isinstance(node.value, str) and re.fullmatch(r"--[a-z-]+", node.value)
    }

    private = {
        where: word
        for where, name in names.items()
        for word in re.findall(r"[A-Z]?[a-z]+", name)
        if PRIVATE_WORDS.fullmatch(word.lower()) and not name.endswith(IN_PLACE)
    }
    assert not private


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


def test_what_answers_at_once_loads_neither_torch_nor_mpi() -> None:
    modules = ", ".join(f"axsparse.{name}" for name in AT_ONCE)

    done = run_fresh(
        "-c", f"import sys, {modules}; print({{'torch', 'mpi4py'}} & {{*sys.modules}})"
    )

    assert (done.returncode, done.stdout) == (0, "set()\n"), done
