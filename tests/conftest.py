"""The order of the tests, and what every file of them begins with."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from typing import Any

import pytest
from hypothesis import settings
from support.warm_python import SHARED, warm_folder

# Before torch is imported: the bits of sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell has what it starts in the background ignore Ctrl-C, and so would the programs of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

# All that is imported for tests stays: to look for garbage in it takes a tenth of the imports.
gc.disable()

# On a busy machine any example may take long, and speed is no matter of tests.
settings.register_profile("axsparse", deadline=None)
settings.load_profile("axsparse")

pytest_plugins = ["support.commands"]
LONGEST = (
    *("test_page_blocks.py", "test_held_memory.py", "test_state_equivalence.py"),
    *("test_mpirun.py", "test_programs.py", "test_equivalence.py", "test_on_device.py"),
    *("test_train.py", "test_resume.py", "test_hf_models.py", "test_run_faults.py"),
    *("test_wheel.py", "test_errors.py", "test_teacher.py"),
    *("test_public_face.py", "test_prune_folder.py"),
)
"""Files that would keep one process busy while the others have come to the end, longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="K/N",
        type=_share,
        help="of the faults and the exhaustive cases only the K-th of N shares; K may exceed N",
    )
    parser.addoption(
        "--update-errors", action="store_true", help="write the tables of tests/errors anew"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        os.environ[SHARED] = str(warm_folder())


def pytest_collection_finish() -> None:
    gc.enable()


def _share(text: str) -> tuple[int, int]:
    number, of = map(int, text.split("/"))
    return number % of, of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    if (share := config.getoption("--share")) is not None:
        number, of = share
        rare = [item for item in items if {"fault", "exhaustive"} & {*item.keywords}]
        left_out = {item for item in rare if zlib.crc32(item.nodeid.encode()) % of != number}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(autouse=True, scope="module")
def _objects_at_rest() -> None:
    """Spares later collections of garbage all objects that exist before a file's tests.

    These are thousands of tests and some large libraries: looking through them takes a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _job_of_the_tests() -> None:
    """Trainers in this process belong to a job that does not end it."""
    from support.runs import job_alone  # which imports torch

    from axsparse.runtime import job

    job._own.append(job_alone())


@pytest.fixture(scope="session")
def transformers() -> Any:
    """Hugging Face's library, the reference for models that are read and written; skips without
    it."""
    found: Any = pytest.importorskip(
        "transformers", reason="no transformers: pip install 'axsparse[test]', Python 3.11 or newer"
    )
    found.utils.logging.disable_progress_bar()
    return found
