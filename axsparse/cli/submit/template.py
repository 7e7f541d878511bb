"""Fills the templates of job scripts in `launch/`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from axsparse.cli.submit.job_request import JobRequest

_PACKAGE = Path(__file__).resolve().parents[2]
_PLACES = (_PACKAGE / "launch", _PACKAGE.parent / "launch")
"""The folder of the templates in an installed wheel, and in a source tree."""
_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


def folder() -> Path:
    """The folder of the templates, wherever the package is installed."""
    installed, source_tree = _PLACES
    return installed if installed.is_dir() else source_tree


def fill(template: str, values: Mapping[str, str]) -> str:
    """The text of a template with each placeholder replaced by its value.

    A line that becomes empty is dropped. Placeholders within a value are not replaced.
    """
    lines = []
    for line in (folder() / template).read_text(encoding="utf-8").splitlines():
        filled = _PLACEHOLDER.sub(lambda found: values[found[1]], line)
        if filled or not line:
            lines.append(filled)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines) + "\n")


def common(request: JobRequest) -> dict[str, str]:
    """The values that the templates of both schedulers share."""
    return {
        "folder": quote(request.folder),
        "setup": "" if request.setup is None else f". {quote(request.setup)} || exit 78",
        "threads": str(request.threads),
        "ranks": str(request.ranks),
        "python": quote(request.python),
        "train": words(request.train),
    }


def copying(request: JobRequest, on_every_node: str, job: str) -> dict[str, str]:
    """The lines that copy the environment to each node, and remove it afterwards.

    `on_every_node` starts a command once a node; `job` is the shell's word for the number
    of this job. Each node reads one file: thousands of nodes that import thousands of
    small files stall a shared file system.
    """
    if request.copy_to is None:
        return {"copy_environment": "", "remove_environment": ""}
    archive = f"{quote(request.run_dir)}/environment-{job}.tar"
    unpack = 'rm -rf "$2" && mkdir -m 700 "$2" && tar -xf "$1" -C "$2"'
    inside = quote(request.python.relative_to(request.prefix))
    copy = [
        f"archive={archive} local_copy={quote(request.copy_to)}/axsparse-{job}",
        f'on_every_node() {{ {on_every_node} "$@"; }}',
        f'tar -C {quote(request.prefix)} -cf "$archive" . &&',
        f'  on_every_node sh -c \'{unpack}\' sh "$archive" "$local_copy" ||',
        '  { rm -f "$archive"; echo \'axsparse: error: --copy-environment: the environment '
        "could not be copied to every node; choose another folder, or leave the option out' "
        ">&2; exit 74; }",
        'rm -f "$archive"',
        f'python="$local_copy"/{inside}',
        "",
    ]
    return {
        "copy_environment": "\n".join(copy),
        "remove_environment": 'on_every_node rm -rf "$local_copy"',
    }


def directives(prefix: str, options: Sequence[str]) -> str:
    """Options as directives of a scheduler, a line each."""
    return "\n".join(f"{prefix} {option}" for option in options)


def in_directive(text: str) -> str:
    """A checked text as one word of a directive, whose readers know double quotes only."""
    return text if re.fullmatch(r"[\w./@:%+=-]+", text, re.ASCII) else f'"{text}"'


def quote(path: Path) -> str:
    """A path as one word for a shell."""
    return shlex.quote(str(path))


def words(command: Sequence[str]) -> str:
    """A command, quoted for a shell."""
    return shlex.join(command)
