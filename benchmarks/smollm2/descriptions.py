"""python -m smollm2.descriptions STUDY OUT.jsonl: descriptions of packages on PyPI, as further
English to train on.

They are those of some well-known packages and of what they require, wave after wave, which PyPI
serves as JSON. Packages that are installed here are left out, since the study's own texts have
them, and so are paragraphs of the study's texts, held out or not, and of the packages before.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from smollm2.cases import LEAST_TRAINING, SHORT

FIRST = ["accelerate", "aiohttp", "ansible", "apache-airflow", "astropy", "biopython", "black", "bokeh", "boto3", "celery", "cirq", "click", "coverage", "cython", "dagster", "dash", "dask", "datasets", "diffusers", "django", "dvc", "fastai", "fastapi", "feast", "flake8", "flax", "gensim", "geopandas", "gradio", "httpx", "hypothesis", "isort", "jax", "jupyter", "kedro", "keras", "kivy", "langchain", "lightning", "llama-index", "mdanalysis", "mkdocs", "mlflow", "mne", "mypy", "networkx", "nibabel", "nilearn", "nltk", "nox", "numba", "odoo", "openai", "openmm", "optax", "pandas", "peft", "pillow", "plotly", "plone", "poetry", "pre-commit", "prefect", "pygame", "pyinstaller", "pylint", "pymatgen", "pymc", "pyramid", "pytest", "qiskit", "rasterio", "ray", "rdkit", "rich", "ruff", "scikit-image", "scikit-learn", "scipy", "scrapy", "shapely", "spacy", "sphinx", "sqlalchemy", "statsmodels", "streamlit", "sympy", "tensorflow", "textual", "torch", "tornado", "tox", "transformers", "twisted", "typer", "wandb", "xarray"]
MOST_ASKED = 3_000
"""The wave in which so many packages have been asked for is the last one."""
ENGLISH = 0.98
"""The share of a text's characters that are ASCII, at least."""


def described(name: str) -> tuple[str, list[str]]:
    """The description of a package, and the names of what it requires; nothing of none."""
    try:
        with urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as answer:
            found = json.load(answer)["info"]
    except (URLError, TimeoutError):
        return "", []
    required = (re.match(r"[\w.-]+", each) for each in found["requires_dist"] or ())
    return found["description"] or "", [_plain(each.group()) for each in required if each]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def descriptions() -> Iterator[tuple[str, str]]:
    """Names and descriptions of packages."""
    asked, wave = set(FIRST), sorted(FIRST)
    with ThreadPoolExecutor(16) as pool:
        while wave:
            found = [*pool.map(described, wave)]
            yield from ((name, text) for name, (text, _) in zip(wave, found, strict=True))
            required = {each for _, names in found for each in names} - asked
            wave = sorted(required) if len(asked) < MOST_ASKED else []
            asked |= required


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m smollm2.descriptions", description=__doc__)
    arguments.add_argument("study", type=Path, help="the work folder of the study, with its texts")
    arguments.add_argument("out", type=Path)
    options = arguments.parse_args()
    installed = {_plain(each.metadata["Name"]) for each in distributions()}
    files = (options.study / "texts" / f"english.{kind}.jsonl" for kind in ("held_out", "train"))
    texts = (json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8"))
    seen = {part for text in texts for part in text.split("\n\n") if len(part) > SHORT}
    with options.out.open("w", encoding="utf-8") as out:
        for name, text in descriptions():
            if name in installed or sum(map(str.isascii, text)) < ENGLISH * len(text):
                continue
            parts = [p for p in text.replace("\r\n", "\n").split("\n\n") if p not in seen]
            seen |= {part for part in parts if len(part) > SHORT}
            if len("\n\n".join(parts)) >= LEAST_TRAINING:
                out.write(json.dumps({"text": "\n\n".join(parts)}) + "\n")


if __name__ == "__main__":
    main()
