"""What ranks compare before a run, who reads data, and where the run writes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from support.runs import tiny_config, tiny_gpt, token_data

import axsparse.training.rank_facts
from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Datasets, TokenDataset
from axsparse.models.survey import survey
from axsparse.runtime.communication import Backoff, Collective, Transport
from axsparse.runtime.errors import (
    AxsparseError,
    ConfigError,
    DataError,
    MissingInputError,
    OutputError,
)
from axsparse.runtime.exchange import gather_texts
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.provenance import git_hash
from axsparse.training.open_data import Data, open_data
from axsparse.training.rank_facts import facts_of, refuse_odd_rank
from axsparse.training.resolution import RunInputs, resolve
from axsparse.training.run_directory import make_run_dir, save_config

T = TypeVar("T")


def on_ranks(size: int, body: Callable[[Transport], T]) -> list[T]:
    world: LocalWorld[T] = LocalWorld(size)
    return world.run(lambda rank: body(LocalTransport(world, rank)))


def loaded(
    config: Config | None = None, *, run_dir: str = "auto", name: str = "quick"
) -> LoadedConfig:
    config = (config or tiny_config()).model_copy(update={"run_dir": run_dir})
    return LoadedConfig(config, name, {} if run_dir == "auto" else {"run_dir": "--run-dir"})


# -- equal facts ----------------------------------------------------------------------------


def test_facts_hold_every_version_every_setting_and_every_layer() -> None:
    config = tiny_config()

    facts = facts_of(config, survey(tiny_gpt(config)))

    assert facts["torch"] == torch.__version__
    assert facts["axsparse"] == axsparse.__version__
    assert facts["batch.global_batch_size"] == "12"
    assert facts["precision"] == "fp32"
    assert "block1.fc1.weight" in facts["layer block1"]
    assert facts["ties"] == "{'head.weight': 'embed.token.weight'}"
    leaves = sum(
        len(value) if isinstance(value, dict) else 1 for value in config.model_dump().values()
    )
    assert facts["start values"] == "drawn from the seed"
    assert len(facts) == 5 + leaves + 4 + 2


def test_equal_ranks_pass() -> None:
    assert on_ranks(3, lambda transport: refuse_odd_rank(transport, {"seed": "1"})) == [None] * 3


def test_ranks_that_agree_send_no_more_than_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, sent = {"layers": "x" * 40_000}, []

    def watched(collective: Collective, backoff: Backoff, text: str) -> list[str]:
        sent.append(len(text))
        return gather_texts(collective, backoff, text)

    monkeypatch.setitem(vars(axsparse.training.rank_facts), "gather_texts", watched)

    on_ranks(3, lambda transport: refuse_odd_rank(transport, facts))

    assert sent == [64] * 3


def refusals(facts: Mapping[int, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each rank says of these facts; rank n runs on host n."""

    def body(transport: Transport) -> str:
        monkeypatch.setattr(socket, "gethostname", lambda: f"host{transport.rank}")
        try:
            refuse_odd_rank(transport, facts[transport.rank])
        except ConfigError as error:
            return str(error)
        return ""

    return on_ranks(len(facts), body)


def test_the_odd_rank_is_named_with_its_host_and_both_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {rank: {"torch": "2.13", "seed": "9" if rank == 2 else "1"} for rank in range(4)}

    said = refusals(facts, monkeypatch)

    assert (
        said
        == [
            "seed: rank 2 on host host2 has 9, the others have 1; start all ranks with the same "
            "command, configuration and environment"
        ]
        * 4
    )


def test_a_fact_that_a_rank_lacks_is_said_to_be_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {0: {"layer a": "x"}, 1: {"layer a": "x"}, 2: dict[str, str]()}

    assert (
        "layer a: rank 2 on host host2 has nothing, the others have x;"
        in refusals(facts, monkeypatch)[0]
    )


def test_long_values_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {rank: {"layer a": "x" * 90 + str(rank // 2)} for rank in range(3)}

    assert f"has {'x' * 57}..., the" in refusals(facts, monkeypatch)[0]


# -- data -----------------------------------------------------------------------------------


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
        inputs = RunInputs(model, survey(model), transport, Grid(g_inter, g_data))
        run = resolve(loaded(config), inputs)
        open_datasets = partial(factory, transport.rank)
        try:
            return open_data(run, loaded(config), transport, open_datasets)
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
        assert str(error).endswith("; give all hosts the same data")
        with pytest.raises(DataError, match=message):
            raise error


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


# -- the run directory ----------------------------------------------------------------------


def test_runs_are_named_after_their_configuration_and_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    # Nobody has written a metric yet: what claims a directory is the empty file.
    made = [make_run_dir(loaded()) for _ in range(3)]

    assert made == [Path("runs/quick"), Path("runs/quick-2"), Path("runs/quick-3")]
    assert all(path.is_dir() for path in made)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match=r"file is not a directory; choose another --run-dir$"):
        make_run_dir(loaded(run_dir=str(tmp_path / "file")))


def test_an_existing_empty_directory_is_used(tmp_path: Path) -> None:
    assert make_run_dir(loaded(run_dir=str(tmp_path))) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_named_directory_is_made_with_its_parents_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"

    assert make_run_dir(loaded(run_dir=str(path))) == path
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")

    with pytest.raises(
        OutputError,
        match=rf"^run_dir \(--run-dir\): {tmp_path} holds another run's metrics.jsonl, which would "
        r"be mixed up; choose another --run-dir, or go on with that run by --resume auto$",
    ):
        make_run_dir(loaded(run_dir=str(tmp_path)))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(
        OutputError,
        match=rf"^run_dir \(--run-dir\): {tmp_path}/file/x cannot be written \(Not a directory\); "
        r"choose another --run-dir$",
    ):
        make_run_dir(loaded(run_dir=str(tmp_path / "file" / "x")))


def test_the_saved_configuration_loads_back_as_it_ran(tmp_path: Path) -> None:
    config = tiny_config(run_dir=str(tmp_path), optimizer={"betas": [0.8, 0.9]})

    save_config(config, tmp_path)

    text = (tmp_path / "config.yaml").read_text()
    assert load_config(str(tmp_path / "config.yaml")).config == config
    assert f"# torch {torch.__version__}\n" in text
    assert "# git " in text


def test_a_configuration_that_cannot_be_saved_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(
        OutputError,
        match=r"gone/config.yaml: cannot be written \(No such file or directory\); choose another "
        r"--run-dir$",
    ):
        save_config(tiny_config(), tmp_path / "gone")


def test_an_installed_package_has_no_git_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.runtime.provenance.CHECKOUT", tmp_path)
    assert git_hash() is None

    (tmp_path / ".git").write_text("this is no repository")
    assert git_hash() is None
