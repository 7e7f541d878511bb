"""Who reads the data, and what all ranks know of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.runs import on_ranks, tiny_config, tiny_gpt, token_data

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Datasets, TokenDataset
from axsparse.models.survey import survey
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, ConfigError, DataError, MissingInputError
from axsparse.runtime.grid import Grid
from axsparse.training.resolution import RunInputs, resolve
from axsparse.training.run_data import Data, open_data


def opened(
    g_inter: int,
    factory: Callable[[int], Datasets],
    config: Config | None = None,
    *,
    g_data: int = 1,
) -> list[Data | AxsparseError]:
    """What every rank gets of `factory(rank)`, or the error it raises."""
    config = config or tiny_config()

    def body(transport: Transport) -> Data | AxsparseError:
        model = tiny_gpt(config)
        loaded = LoadedConfig(config, "quick", {})
        inputs = RunInputs(model, survey(model), transport, Grid(g_inter, g_data))
        run = resolve(loaded, inputs)
        try:
            return open_data(run, loaded, transport, partial(factory, transport.rank))
        except AxsparseError as error:
            return error

    return on_ranks(g_inter * g_data, body)


def test_stages_in_between_read_nothing_and_know_the_size_of_the_data() -> None:
    def factory(rank: int) -> Datasets:
        assert rank != 1, "a stage in between opened the data"
        return Datasets(token_data(40), token_data(20))

    ranks = opened(3, factory)

    for rank, data in enumerate(ranks):
        assert isinstance(data, Data)
        assert data.name == "random"
        assert data.training.num_samples == 40
        assert (data.training.dataset is None) == (rank == 1)
        assert data.validation is not None
        assert data.validation.num_samples == 20
        assert (data.validation.dataset is None) == (rank == 1)
        assert len(data.training.training(0).microbatches) == 12


def test_every_replica_gets_its_own_share() -> None:
    ranks = opened(1, lambda rank: Datasets(token_data()), g_data=2)

    for replica, data in enumerate(ranks):
        assert isinstance(data, Data)
        assert data.validation is None
        microbatches = data.training.training(0).microbatches
        assert [part.first_sample for part in microbatches] == list(
            range(6 * replica, 6 * replica + 6)
        )


def changed(**values: Any) -> TokenDataset:
    plain = token_data()
    fields = {"name": plain.name, "fingerprint": "0", "vocab_size": 64, "tokens": plain.tokens}
    return TokenDataset(**{**fields, "sequence_length": 12, **values})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Datasets(changed(fingerprint="1")), r"fingerprint is '1' for rank 2 on host \S+ and '0'"),
        (Datasets(changed(vocab_size=63)), r"vocab_size is 63 for rank 2 on host \S+ and 64 for"),
        (Datasets(changed(), changed()), r"for rank 2 on host \S+ and \S* ?for rank 0"),
    ],
)
def test_ranks_that_read_different_data_are_refused(other: Datasets, message: str) -> None:
    ranks = opened(3, lambda rank: other if rank == 2 else Datasets(changed()))

    for error in ranks:
        assert isinstance(error, DataError)
        assert str(error).startswith("data: ")
        assert str(error).endswith("and what is drawn the same seed (torch.manual_seed)")
        with pytest.raises(DataError, match=message):
            raise error


def test_data_without_ends_of_documents_are_refused_where_these_are_wanted() -> None:
    config = tiny_config(data={"separate_documents": True})

    for error in opened(2, lambda rank: Datasets(changed(separator=0), changed()), config):
        assert isinstance(error, DataError)
        assert str(error) == (
            "data.separate_documents: random has no ends of documents; choose false, or give a "
            "TokenDataset with the separator that ends them"
        )
    assert isinstance(opened(1, lambda rank: Datasets(changed(separator=0)), config)[0], Data)


def test_what_opening_raises_on_one_rank_all_ranks_raise() -> None:
    def factory(rank: int) -> Datasets:
        if rank == 2:
            raise MissingInputError("data.path: /nowhere is not there")
        return Datasets(token_data())

    for error in opened(3, factory):
        assert isinstance(error, MissingInputError)
        assert str(error) == "data.path: /nowhere is not there"


def test_data_that_does_not_fit_the_model_or_the_batch_is_refused_on_all_ranks() -> None:
    too_many_words = opened(3, lambda rank: Datasets(changed(vocab_size=65)))
    too_few_samples = opened(3, lambda rank: Datasets(token_data(11)))

    assert all(isinstance(error, ConfigError) for error in too_many_words)
    assert all(isinstance(error, DataError) for error in too_few_samples)


def test_data_without_a_vocabulary_fits_any_model() -> None:
    arrays = ArrayDataset(torch.zeros(12, 3), torch.from_numpy(np.arange(12)))

    (data,) = opened(1, lambda rank: Datasets(arrays))

    assert isinstance(data, Data)
    assert data.name == "arrays"
