"""Opens the data sets that a configuration names."""

from __future__ import annotations

from pathlib import Path

from axsparse.config.load import LoadedConfig
from axsparse.config.model_config import ImageFamily, of_family
from axsparse.config.schema import sample_length
from axsparse.data.dataset import Datasets
from axsparse.data.digits import CLASSES, digits_datasets
from axsparse.data.images import image_folders
from axsparse.data.stdlib import stdlib_dataset
from axsparse.data.token_file import token_datasets
from axsparse.runtime.errors import ConfigError, reading


def open_datasets(loaded: LoadedConfig) -> Datasets:
    """The training and validation data of `data.source`, for the model of the configuration.

    Raises ConfigError, DataError or MissingInputError if the data cannot be opened, or has
    more classes than the model.
    """
    config = loaded.config
    data = config.data
    if data.source == "digits":
        _check_classes(loaded, CLASSES, "digits")
        return Datasets(*digits_datasets())
    if data.source == "images":
        assert data.path is not None, "check_config asks for it"
        with reading(f"{loaded.where('data.path')}: {data.path}", "name a folder of images"):
            training, validation = image_folders(
                Path(data.path),
                size=data.image_size,
                workers=data.workers,
                seed=config.seed,
                validate=config.train.eval_steps != 0,
            )
        _check_classes(loaded, len(training.classes), training.name)
        return Datasets(training, validation)
    length, separate = sample_length(config), data.separate_documents
    if data.source == "tokens":
        assert data.path is not None, "check_config asks for it"
        validate = config.train.eval_steps != 0
        return Datasets(
            *token_datasets(Path(data.path), length, validate=validate, separate=separate)
        )
    assert data.source == "stdlib", f"nobody opens {data.source}"
    return Datasets(
        stdlib_dataset("train", length, separate=separate),
        stdlib_dataset("validation", length, separate=separate),
    )


def _check_classes(loaded: LoadedConfig, classes: int, name: str) -> None:
    has = of_family(loaded.config.model, ImageFamily).num_classes
    if has < classes:
        raise ConfigError(
            f"{loaded.where('model.num_classes')}: {has} is below the {classes} classes of {name}; "
            f"choose {classes}"
        )
