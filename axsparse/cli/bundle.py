"""`axsparse bundle`: writes a folder of wheels that install without a network."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from axsparse.cli.parser import CommandParser, matching, say
from axsparse.config.load import packaged_folder
from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import MissingInputError, writing
from axsparse.runtime.provenance import CHECKOUT, __version__

DESCRIPTION = """\
Write axsparse and the packages that it needs into a folder of wheels, to be copied to where there
is no network:

  axsparse bundle wheels
  axsparse bundle wheels --python 3.11 --glibc 2.28 --extra mpich --extra cuda13

There, in an environment of that Python, add the extras that it is to have:

  pip install --no-index --find-links wheels axsparse

Versions are those that axsparse is tested with. pip downloads as it does everywhere, by way of
HTTPS_PROXY, PIP_INDEX_URL and its other settings.
"""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def parser() -> CommandParser:
    arguments = CommandParser(_bundle, prog="axsparse bundle", description=DESCRIPTION)
    add = arguments.add_argument
    version = matching(r"[0-9]{1,2}\.[0-9]{1,3}", "version; write it as in 3.11")
    glibc = matching(r"2\.[0-9]{1,3}", "version of glibc; write it as in 2.28")
    name = matching(r"[a-z0-9]{1,40}", "extra; write it as in mpich")
    add("folder", metavar="DIR", type=Path)
    text = "the Python there (default: this one)"
    add("--python", metavar="X.Y", type=version, default=HERE, help=text)
    text = "the glibc there, by ldd --version (default: this machine's; 2.28 of another Python)"
    add("--glibc", metavar="2.N", type=glibc, help=text)
    text = "the processor there, by uname -m, with --glibc (default %(default)s)"
    add("--machine", choices=("x86_64", "aarch64"), default="x86_64", help=text)
    text = "an extra of axsparse, such as mpich or cuda13; may be repeated"
    add("--extra", metavar="NAME", type=name, action="append", default=[], help=text)
    return arguments


def _bundle(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    with writing(f"{folder}:", "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
    own = str(CHECKOUT) if (CHECKOUT / "pyproject.toml").is_file() else f"axsparse=={__version__}"
    _pip("wheel", "--no-deps", f"--wheel-dir={folder}", own)
    tested = [f"--constraint={packaged_folder('launch').parent / 'constraints.txt'}"]
    if "cuda12" in arguments.extra:
        tested = []  # its torch is an older one
    there: list[str] = []
    if arguments.glibc is not None or arguments.python != HERE:
        newest = int((arguments.glibc or "2.28").partition(".")[2])
        names = [f"_2_{minor}" for minor in range(newest, 4, -1)] + ["2014", "2010", "1"]
        there = [f"--platform=manylinux{name}_{arguments.machine}" for name in names]
        there.append(f"--python-version={arguments.python}")
    wanted = f"axsparse[{','.join(arguments.extra)}]=={__version__}"
    only = ["--only-binary=:all:", f"--dest={folder}", f"--find-links={folder}"]
    _pip("download", *only, *tested, *there, wanted)
    sizes = [wheel.stat().st_size for wheel in folder.glob("*.whl")]
    say(f"{len(sizes)} wheels, {format_bytes(sum(sizes))} → {folder}; where it is copied to:")
    name = shlex.quote(folder.resolve().name)
    say(f"pip install --no-index --find-links {name} '{wanted.replace('[]', '')}'")


def _pip(*words: str) -> None:
    """Run pip; MissingInputError if it fails, after it has said why."""
    command = [sys.executable, "-m", "pip", words[0], "--quiet", *words[1:]]
    if subprocess.run(command, check=False).returncode:  # noqa: S603
        raise MissingInputError(
            f"pip {words[0]}: failed, see its words above; run this where pip reaches an index, or "
            "name one in PIP_INDEX_URL"
        )
