"""The forms in which `ax.Trainer` takes a model, data and settings."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.hf import write_llama
from support.runs import mlp, on_ranks, tiny_config, tiny_gpt, token_data, vector_data, with_layout
from torch import Tensor, nn

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets, TokenDataset
from axsparse.models.model_profile import profile
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, ConfigError, DataError, MissingInputError
from axsparse.runtime.grid import Grid
from axsparse.training.plan import plan_run
from axsparse.training.run_sources import Data, open_data, run_sources

MODEL = mlp()
DATA = vector_data()


def config_of(config: Any, **settings: Any) -> Config:
    return run_sources(MODEL, DATA, config, settings).config


def test_settings_come_over_those_of_a_file_a_dictionary_or_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("pruning: {sparsity: 0.5}\nseed: 3\n")
    dictionary = {"pruning.sparsity": 0.5, "seed": 3}
    nested = {"pruning": {"sparsity": 0.5}, "seed": 3}

    for given in (file, str(file), dictionary, nested, ax.configure(file), ax.configure(nested)):
        config = config_of(given, g_inter=2, seed=4)
        assert (config.pruning.sparsity, config.layout.g_inter, config.seed) == (0.5, 2, 4)
    assert config_of(None) == Config()


def test_a_run_has_the_name_of_its_file_or_model_and_a_setting_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")

    config = config_of(ax.configure(tmp_path / "mine.yaml"), sparsity=0)
    assert [config.where(key) for key in ("seed", "pruning.sparsity", "precision")] == [
        *("seed (mine.yaml:1)", "pruning.sparsity (Trainer)", "precision (default)")
    ]
    assert config_of(tmp_path / "mine.yaml", seed=1).name == "mine"
    assert config_of(ax.configure({})).name == MODEL.name


def test_a_peak_learning_rate_may_be_a_number_of_numpy() -> None:
    peak: Any = np.float32(0.5)

    trainer = ax.Trainer(MODEL, DATA, learning_rate=peak, quiet=True, global_batch_size=6)
    trainer.close()

    assert trainer.config.optimizer.learning_rate == 0.5


def test_settings_that_the_call_replaces_are_named_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"model.num_layers": 3, "data.sequence_length": 7, "schedule.warmup_steps": 2}
    batch: dict[str, Any] = {"global_batch_size": 6, "microbatch_size": 6, "peak_flops": 1e9}

    ax.Trainer(
        MODEL, DATA, settings, learning_rate=lambda _: 0.1, run_dir=str(tmp_path / "run"), **batch
    ).close()

    assert re.findall(
        r"no effect, replaced by the (.*) of the program: (\S+)", capfd.readouterr().out
    ) == [
        ("model", "model.num_layers"),
        ("data", "data.sequence_length"),
        ("learning rate", "schedule.warmup_steps"),
    ]


@pytest.mark.parametrize(
    "data",
    [DATA, (DATA, DATA), [DATA, DATA], ax.Datasets(DATA, DATA), lambda: ax.Datasets(DATA, DATA)],
)
def test_data_are_one_or_a_pair_or_a_function_of_them(data: Any) -> None:
    opened = run_sources(MODEL, data, None, {}).open_datasets()

    assert opened.training is DATA
    assert opened.validation is (None if data is DATA else DATA)


class Leaving(nn.Sequential):
    """A forward that leaves something on its module, which may also be a buffer."""

    def __init__(self, *modules: nn.Module, leaves: bool = True) -> None:
        super().__init__(*modules)
        self.leaves = leaves

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(x, training=self.training)
        if self.leaves:
            self.spread = x.std()
        for module in self:
            x = module(x)
        return x


@pytest.mark.parametrize("is_read", [False, True])
def test_a_loss_may_draw_and_not_read_what_a_forward_leaves(is_read: bool) -> None:
    net = Leaving(nn.Linear(16, 5), nn.BatchNorm1d(5))
    if is_read:
        net.register_buffer("spread", torch.zeros(()))

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        drawn = F.cross_entropy(F.dropout(out), targets, reduction="sum")
        return drawn + net.spread if is_read else drawn

    def number(out: Tensor, targets: Tensor) -> Any:  # which the run refuses
        return loss(out, targets).item()

    def in_place(out: Tensor, targets: Tensor) -> Tensor:
        return loss(out.mul_(2.0), targets)

    def unread(*_: object) -> Any:
        pytest.fail("nothing is read, and no loss is called")

    if is_read:
        for reading in (loss, in_place):
            with pytest.raises(ConfigError, match="reads what that leaves on the module"):
                run_sources(net, DATA, None, {}, reading)
    else:
        run_sources(net, DATA, None, {}, loss)
        run_sources(net, DATA, None, {}, number)
        run_sources(net, DATA, None, {}, in_place)
        run_sources(Leaving(nn.Linear(16, 5), leaves=False), DATA, None, {}, unread)
        calls = itertools.count()  # such as a loss that keeps state, which the run refuses
        run_sources(net, DATA, None, {}, lambda *_: torch.tensor(float(next(calls))))
        run_sources(nn.Sequential(*net, nn.Identity()), unread, None, {}, F.cross_entropy)
        assert not hasattr(net, "spread")


class Router(nn.Linear):
    """Leaves a number for the loss, or has one."""

    balance = 0.5

    def __init__(self, *, leaves: bool) -> None:
        super().__init__(16, 5)
        self.leaves = leaves

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if self.leaves:
            self.balance = float(made.detach().square().sum())
        return made


class Balanced(nn.Module):
    """A loss that reads a router's number."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.routers = {"first": [router]}

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets, reduction="sum") + self.routers["first"][0].balance


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("gives_model", [False, True])
def test_a_loss_that_reads_what_a_layer_of_a_list_leaves_is_refused(
    leaves: bool, gives_model: bool
) -> None:
    router = Router(leaves=leaves)
    net = nn.Sequential(nn.Sequential(router), nn.Identity())

    def closed(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets, reduction="sum") + router.balance

    for loss in (closed, Balanced(router), Balanced(router).forward, functools.partial(closed)):
        model = ax.from_sequential([*net], loss) if gives_model else net
        refused = pytest.raises(ConfigError, match="reads what that leaves") if leaves else None
        with refused or contextlib.nullcontext():
            run_sources(model, DATA, None, {}, None if gives_model else loss)
    assert router.balance == 0.5


class Probed(nn.Module):
    """Runs its layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("form", ["sequential", "model", "module"])
def test_a_loss_that_reads_what_a_hook_keeps_of_a_layer_is_refused(
    form: str, is_read: bool
) -> None:
    kept: dict[str, Tensor] = {}
    layers = [nn.Linear(16, 8), nn.Linear(8, 5)]
    layers[0].register_forward_hook(lambda _, __, out: kept.update(out=out))

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        summed = F.cross_entropy(out, targets, reduction="sum")
        kept["loss"] = summed
        return summed + kept["out"].square().sum() if is_read else summed

    model: Any = nn.Sequential(*layers) if form == "sequential" else Probed(*layers)
    given = None if form == "model" else loss
    if form == "model":
        model = ax.from_sequential(layers, loss)
    refused = pytest.raises(ConfigError, match="leaves in an object of a hook") if is_read else None
    with refused or contextlib.nullcontext():
        run_sources(model, DATA, None, {}, given)


def test_metrics_of_the_call_join_those_of_a_model() -> None:
    def hits(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(-1) == targets).sum()

    model = ax.from_sequential([nn.Linear(16, 5)], nn.MSELoss(reduction="sum"), metrics={"a": hits})
    data, config = (vector_data(), vector_data()), tiny_config(train={"eval_steps": 1})
    given = run_sources(model, data, config, {}, metrics={"b": hits})
    assert given.model.metrics == {"a": hits, "b": hits}

    evaluation = ax.Trainer(mlp(), data, config, metrics={"b": hits}, quiet=True).evaluate()
    assert evaluation is not None
    assert 0 <= evaluation.metrics["b"] <= 1


def test_tokens_and_folders_of_hugging_face_are_settings(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")

    sources = run_sources(
        ax.hf(tmp_path / "llama"),
        ax.tokens("texts", validation="others"),
        {"data.sequence_length": 8},
        {},
    )

    data = sources.config.data
    assert (data.source, data.path, data.validation) == ("tokens", "texts", "others")
    assert sources.model.name == "hf" or "llama" in sources.model.name
    assert sources.model.start is not None
    assert sources.model.start.read("model.norm.weight") is not None


def opened(
    g_inter: int,
    factory: Callable[[int], Datasets],
    config: Config | None = None,
    *,
    g_data: int = 1,
) -> list[Data | AxsparseError]:
    """The data of `factory(rank)` on every rank, or the error it raises."""
    config = config or tiny_config()

    def body(transport: Transport) -> Data | AxsparseError:
        model = tiny_gpt(config)
        loaded = with_layout(config, Grid(g_inter, g_data)).with_origins("quick", {})
        run = plan_run(loaded, model, profile(model), transport)
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
        assert data.entry.name == "random"
        assert data.training.num_samples == 40
        assert (data.training.dataset is None) == (rank == 1)
        assert data.validation is not None
        assert data.validation.num_samples == 20
        assert (data.validation.dataset is None) == (rank == 1)
        assert len(data.training.training(0).microbatches) == 12


def changed(**values: Any) -> TokenDataset:
    plain = token_data()
    fields = {"name": plain.name, "fingerprint": "0", "vocab_size": 64, "tokens": plain.tokens}
    return TokenDataset(**{**fields, "sequence_length": 12, **values})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            Datasets(changed(fingerprint="1")),
            r"fingerprint: rank 2 on host \S+ has 1, rank 0 has 0;",
        ),
        (
            Datasets(changed(vocab_size=63)),
            r"vocab_size: rank 2 on host \S+ has 63, rank 0 has 64;",
        ),
        (
            Datasets(changed(), changed()),
            r"validation_samples: rank 2 on host \S+ has \d+, rank 0 has 0;",
        ),
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
    config = tiny_config(data={"intra_document_attention": True})

    for error in opened(2, lambda rank: Datasets(changed(separator=0), changed()), config):
        assert isinstance(error, DataError)
        assert str(error) == (
            "data.intra_document_attention: random has no ends of documents; choose false, or "
            "give a TokenDataset with the separator that ends them"
        )
    assert isinstance(opened(1, lambda rank: Datasets(changed(separator=0)), config)[0], Data)


def missing_on_rank_2(rank: int) -> Datasets:
    if rank == 2:
        raise MissingInputError("data.path: /nowhere is not there")
    return Datasets(token_data())


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (missing_on_rank_2, MissingInputError),
        (lambda rank: Datasets(changed(vocab_size=65)), ConfigError),
    ],
)
def test_data_that_cannot_be_opened_or_do_not_fit_are_refused_on_all_ranks(
    factory: Callable[[int], Datasets], kind: type[AxsparseError]
) -> None:
    first, *others = opened(3, factory)

    assert isinstance(first, kind)
    assert [str(error) for error in others] == [str(first)] * 2
