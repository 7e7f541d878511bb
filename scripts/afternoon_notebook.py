"""Makes examples/afternoon.ipynb of examples/afternoon.py: python scripts/afternoon_notebook.py

The notebook has the code of the example as it stands there, in cells, and trains in its own
process.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "afternoon.py", EXAMPLES / "afternoon.ipynb"
TITLE = """\
# An afternoon: a vision model of one's own, pruned

The model is plain PyTorch. It is trained on 8 × 8 images of digits, pruned to a tenth of its
convolutions after two epochs, and taken back into plain torch, with the accuracy that was reported.
Here one process does it all, in about a minute; the same program on 2 stages × 2 replicas is
`mpirun -n 4 python examples/afternoon.py layout.g_inter=2`.

It needs axsparse in the kernel's environment, and `examples/` as the working directory.
"""
SETTINGS = """\
## Settings

They stand in `afternoon.yaml`. What differs goes into `CHANGES`, such as `"pruning.sparsity=0.95"`;
to train again, take another `"run_dir=runs/second"`.
"""
TRAIN = """\
## Train

`main` makes the trainer, trains, and holds the accuracy in plain torch against the one that was
reported. An interrupt of the kernel saves and ends it.
"""
CURVES = """\
## Curves

The report is one page that loads nothing from elsewhere, so that it can stand here.
"""
WEIGHTS = """\
## The weights, in another session

A run directory is all that is needed: the weights of the best checkpoint, zero where pruned.
"""
CHANGED = {"SETTINGS": 'SETTINGS = Path("afternoon.yaml")\nCHANGES: list[str] = []'}
"""Replacements of statements for a notebook, which has neither a file nor arguments."""
CALLS = {"sys.argv[1:]": "CHANGES"}


def cells() -> Iterator[tuple[str, str]]:
    """The kind and the text of each cell."""
    text = SCRIPT.read_text(encoding="utf-8")
    parts = _parts(text)
    yield "markdown", TITLE
    yield "code", "\n".join(parts.pop("import"))
    yield "markdown", SETTINGS
    yield "code", CHANGED["SETTINGS"]
    yield "markdown", "## The model, its loss, and its accuracy"
    del parts["SETTINGS"]
    main = parts.pop("main")
    for lines in parts.values():
        yield "code", "\n".join(lines)
    yield "markdown", TRAIN
    yield "code", "\n".join(main)
    yield "code", "main()"
    yield "markdown", CURVES
    yield (
        "code",
        (
            "from html import escape\n\nfrom IPython.display import HTML\n\n"
            "run = Path(ax.configure(SETTINGS, CHANGES).run_dir)\n"
            'page = escape((run / "report.html").read_text())\n'
            """HTML(f'<div><iframe srcdoc="{page}" width="100%" height="700"></iframe></div>')"""
        ),
    )
    yield "markdown", WEIGHTS
    yield (
        "code",
        (
            "model = network()\n"
            'model.load_state_dict(ax.load(run, step="best"))\n'
            'print(f"accuracy {accuracy(model, digits_datasets()[1]):.4f}")'
        ),
    )


def _parts(text: str) -> dict[str, list[str]]:
    """The lines of each statement of the script by its name; its docstring and its end are left
    out."""
    lines, nodes = text.splitlines(), ast.parse(text).body
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    parts = {"import": lines[imports[0].lineno - 1 : imports[-1].end_lineno]}
    for node in nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case _:
                continue
        parts[name] = lines[node.lineno - 1 : node.end_lineno]
    for was, now in CALLS.items():
        assert sum(line.count(was) for line in parts["main"]) == 1, was
        parts["main"] = [line.replace(was, now) for line in parts["main"]]
    return parts


def notebook() -> str:
    """The text of the notebook."""
    made = []
    for number, (kind, text) in enumerate(cells()):
        cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell | {"source": text.strip().splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
