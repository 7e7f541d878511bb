"""Tensor parallelism: members of a stage share its layers, with the same bits at every degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import (
    GPT,
    ONE_RANK,
    PRUNING,
    TORCH,
    Row,
    Subject,
    judge,
    merged,
    parameters,
    steps,
)
from support.exhaustive import by_default
from support.hf import SMALL_LLAMA, small_llama
from support.planner_cases import planned_bytes
from support.resuming import Ran, ran
from support.runs import (
    random_init,
    summed_loss,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model, Split
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.seeds import keyed_generator
from axsparse.training.trainer import Trainer


class Attention(nn.Module):
    """Heads by three matrices of their own, which takes the number of heads from the tensor."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        each = [
            m(x).view(b, s, -1, self.size).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*each)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        return out


class Own(nn.Module):
    def __init__(
        self,
        width: int = 32,
        size: int = 8,
        dropout: float = 0.0,
        *,
        norm: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, size)
        self.up, self.gate, self.down = (
            nn.Linear(width, 48),
            nn.Linear(width, 48),
            nn.Linear(48, width),
        )
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.PReLU() if norm else nn.Identity()
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        hidden = self.inner(self.dropout(F.silu(self.gate(x)) * self.up(x)))
        out: Tensor = x + self.down(hidden)
        return out


def own_model(**settings: Any) -> Model:
    """Blocks whose modules are cut by `Layer.tensor`, between layers that are whole."""
    head = Split("column", unit=8)
    splits: dict[str, Split | str] = {
        **{f"attention.{name}": head for name in ("query", "key", "value")},
        "attention.out": Split("row", unit=8),
        **{"up": "column", "gate": "column", "down": "row"},
    }
    settings = {"tensor": splits} | settings
    tensor = settings.pop("tensor")
    build = partial(Own, **settings)
    return Model(
        [
            Layer("first", partial(nn.Linear, 16, 64), init=random_init),
            Layer("fold", partial(nn.Unflatten, 1, (2, 32))),
            Layer("block0", build, init=random_init, tensor=tensor),
            Layer("block1", build, init=random_init, tensor=tensor),
            Layer("flat", nn.Flatten),
            Layer("out", partial(nn.Linear, 64, 5), kind="head", init=random_init),
        ],
        loss=summed_loss,
    )


FOUR_HEADS = replace(
    GPT,
    name="gpt of four heads",
    settings={"batch": {"microbatch_size": 4}, "model": {"num_heads": 4}},
)
OWN = Subject("own", lambda config: own_model(), vector_data, settings=FOUR_HEADS.settings)
SHAPES = {
    f"{layer.name}.{name}": tuple(parameter.shape)
    for layer in own_model().layers
    for name, parameter in layer.build().named_parameters()
}


class Loaded:
    """Start values for every parameter, as if from a file."""

    fingerprint = "loaded"

    def read(self, name: str) -> Tensor | None:
        shape = SHAPES.get(name)
        return None if shape is None else random_init(name, shape, keyed_generator(1, name))


LOADED = replace(OWN, name="loaded", model=lambda config: replace(own_model(), start=Loaded()))
LLAMA = Subject(
    "llama, grouped heads",
    lambda config: small_llama(),
    token_data,
    settings={"model": SMALL_LLAMA, "batch": {"microbatch_size": 4}},
)
BY_SAMPLES = {"calibration_samples": 7, "exclude": ["first.*"]}
TOLERANCE = (3e-7, 1e-6)
"""Sums over chunks in place of one product: 1.2e-7 and 1e-7 were the most seen over three steps."""


def members(number: int, **others: Any) -> dict[str, Any]:
    return merged({"layout": {"g_tensor": number}}, others)


def exact(*settings: Mapping[str, Any]) -> dict[str, Any]:
    return merged({"layout": {"tensor_exact": True}}, steps(2), *settings)


def ten_steps(method: str) -> dict[str, Any]:
    return {"pruning": PRUNING[method], "schedule": {"warmup_steps": 1}, "train": {"steps": 9}}


EVALUATING = {"train": {"eval_every": 1, "eval_steps": 2}}
DEEP = {"train": {"steps": 3}}
Case = tuple[tuple[int, int], int, dict[str, Any], dict[str, Any], int | None]
CASES: list[Case] = [
    ((1, 1), 2, EVALUATING, {}, None),
    ((2, 1), 2, {"model": {"dropout": 0.2}}, {"pipeline": {"split_backward": True}}, 1),
    ((1, 1), 4, {"model": {"tie_embeddings": False}}, {}, None),
    ((4, 1), 2, DEEP, {"pipeline": {"checkpoint_activations": 1}}, 2),
    ((2, 1), 4, DEEP, {}, 3),
    ((2, 1), 2, {"samo": {"enabled": False}}, {}, None),
    ((1, 2), 2, {"samo": {"gradient": "exact"}}, {"samo": {"shard_optimizer": True}}, None),
    ((2, 2), 2, {"samo": {"gradient": "exact"}}, {}, 4),
    ((1, 3), 4, {"samo": {"gradient": "exact"}}, {}, None),
    ((2, 1), 2, {"precision": "bf16", "optimizer": {"name": "sgd"}}, {}, None),
    (
        (2, 1),
        2,
        {"pruning": {"include": "all", "distribution": "global"}, "samo": {}},
        {"samo": {"index": "mask"}},
        5,
    ),
]
"""Stages and replicas, members, settings, free settings, and an order of arrival."""
SAME_BITS = [
    *(
        Row(layout, exact(settings), members(number, **free), ONE_RANK, FOUR_HEADS, order)
        for layout, number, settings, free, order in CASES
    ),
    *(
        Row((1 + number % 2, 1), exact(ten_steps(method)), members(2), ONE_RANK, FOUR_HEADS)
        for number, method in enumerate(PRUNING)
        if method not in ("set", "rigl")
    ),
]
SAME_BITS += [
    Row((1, 1), exact(DEEP), members(2), ONE_RANK, OWN),
    Row((2, 1), exact(DEEP), members(4), ONE_RANK, OWN, order=1),
]
SAME_BITS += [
    Row((2, 1), exact({"pruning": {**BY_SAMPLES, **pruning}}), members(2), ONE_RANK, LOADED)
    for pruning in (
        {"method": "wanda"},
        {"method": "sparsegpt"},
        {"method": "magnitude", "heal": "blocks"},
    )
]
SAME_BITS.append(Row((2, 1), exact(DEEP), members(2), ONE_RANK, LLAMA, order=1))
USUAL = [SAME_BITS[1]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_trainer_gives_whole_weights(is_trained: bool) -> None:
    config = tiny_config(
        **exact({"model": {"num_heads": 4}, "precision": "bf16", "batch": {"microbatch_size": 4}}),
        samo={"gradient": "exact", "shard_optimizer": True},
    )
    found: list[dict[str, Tensor] | None] = []

    def look(trainer: Trainer) -> None:
        found.append(trainer.state_dict(trained=is_trained))

    for layout in ((1, 1, 1), (2, 2, 2)):
        model = tiny_gpt(config)
        train_in_process(*layout[:2], model, config, token_data(), g_tensor=layout[2], before=look)

    one, many = (weights for weights in found if weights is not None)
    assert one.keys() == many.keys()
    assert all(torch.equal(weight, many[name]) for name, weight in one.items())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 3}, "^layout.g_tensor .*: 3 is no power of two; "),
    ({"ranks": 4}, "^layout.g_tensor .*: 4 chunks do not divide the 2 heads or features of "),
    (
        {"ranks": 4, "layout": {"tensor_exact": True}},
        "^layout.g_tensor .*: 4, but layout.tensor_exact cuts this model into 2 chunks; ",
    ),
    ({"optimizer": {"name": "lamb"}}, "this optimizer sums over whole tensors"),
    ({"pruning": {"method": "rigl"}}, "pruning.method rigl does not cut layers yet"),
    ({"pruning": {"method": "set"}}, "pruning.method set does not cut layers yet"),
    ({"pipeline": {"compile": True}}, "pipeline.compile fuses layers"),
    (
        {"hf": {"model_type": "qwen3", "head_dim": 8}},
        "^layout.g_tensor .*: model qwen3 names no modules to cut",
    ),
    ({"own": {"tensor": {}}}, "model custom names no modules to cut"),
    ({"own": {"tensor": {"nowhere": "row"}}}, "^layer block0: tensor names 'nowhere', which has"),
    ({"own": {"tensor": {"up": "diagonal"}}}, "^layer block0: tensor has 'diagonal' for 'up'; "),
    ({"own": {"tensor": {"norm": "column"}}}, "^layer block0: norm is LayerNorm, which is not cut"),
    ({"own": {"norm": True}}, "^block.*.inner.weight: its gradient differs between the members of"),
    ({"own": {"frozen": True}}, "^layer block0: up.weight is frozen, and is not cut; leave it out"),
    ({"own": {"dropout": 0.5}}, "random numbers are drawn between a column and a row split"),
]


@pytest.mark.parametrize(
    "row", parameters([replace(row, is_usual=row in USUAL) for row in SAME_BITS])
)
def test_every_degree_has_the_same_bits(row: Row) -> None:
    ranks = judge(row)

    assert len(set(ranks[0][1].losses)) > 1, "it learned something"


@pytest.mark.parametrize(
    "row",
    parameters(
        Row(
            (stages, 1),
            steps(3),
            members(number, layout={"tensor_exact": is_exact}),
            TORCH,
            FOUR_HEADS,
            tolerance=TOLERANCE,
            is_usual=(stages, number, is_exact) == (1, 2, False),
        )
        for stages, number, is_exact in [(1, 2, False), (2, 2, False), (1, 4, False), (1, 1, True)]
    ),
)
def test_a_run_is_the_uncut_one_to_rounding(row: Row) -> None:
    judge(row)


@pytest.mark.exhaustive
def test_members_leave_equal_files_and_go_on_as_any_other_number_of_members(tmp_path: Path) -> None:
    """Checkpoints, tickets and exports do not know the degree; state is sharded on the way."""
    config = tiny_config(
        **exact({"model": {"num_heads": 4}, "checkpoint": {"every": 2, "keep_last": 3}}),
        **{"batch": {"microbatch_size": 4}, "pruning": PRUNING["magnitude later"]},
    )
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 6})})

    def run(name: str, layout: tuple[int, int, int], stop: int | None = None) -> Ran:
        tensor = {"g_tensor": layout[2], "tensor_exact": True}
        changed = config.model_copy(update={"layout": config.layout.model_copy(update=tensor)})
        return ran(layout, changed, tmp_path / name, resume="auto", stop_after=stop)

    reference = run("one", (1, 1, 1))
    run("many", (1, 1, 2), stop=2)
    run("many", (2, 1, 2), stop=4)
    last = run("many", (1, 1, 1))

    assert last.losses[6] == reference.losses[6]
    files = {
        name: {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in sorted((tmp_path / name).rglob("*.safetensors"))
        }
        for name in ("one", "many")
    }
    assert len(files["one"]) > 10 and files["one"].keys() == files["many"].keys()
    assert files["one"] == files["many"]


EVEN = {"batch": {"global_batch_size": 12, "microbatch_size": 3}}
COSTED = replace(
    OWN,
    name="own with costs",
    model=lambda config: replace(own_model(), example=lambda samples: (torch.zeros(samples, 16),)),
)
COUNTED: list[tuple[tuple[int, int], int, dict[str, Any], Subject]] = [
    ((1, 1), 2, {"samo": {"enabled": False}}, FOUR_HEADS),
    ((2, 1), 2, {"pipeline": {"split_backward": True}}, FOUR_HEADS),
    ((1, 1), 4, {"pipeline": {"checkpoint_activations": 1}}, FOUR_HEADS),
    ((2, 2), 2, {"samo": {"shard_optimizer": True, "index": "mask"}, **EVEN}, FOUR_HEADS),
    ((1, 1), 2, {"layout": {"tensor_exact": True}, "precision": "bf16"}, FOUR_HEADS),
    ((2, 1), 4, {"pruning": {"include": "all"}}, FOUR_HEADS),
    ((2, 1), 2, {}, COSTED),
    ((2, 1), 2, {"pipeline": {"checkpoint_activations": 2}}, LLAMA),
]
"""Stages and replicas, members, settings and a model."""


@pytest.mark.parametrize(
    ("layout", "number", "settings", "subject"), by_default([COUNTED[1]], COUNTED)
)
def test_state_and_messages_of_every_member_are_what_plans_count(
    layout: tuple[int, int], number: int, settings: dict[str, Any], subject: Subject
) -> None:
    """To the byte; masks decide how many entries of a tensor each member keeps."""
    config = tiny_config(**merged(subject.settings, settings, {"train": {"steps": 3}}))
    model = subject.model(config)

    def after(steps: int) -> list[Trainer]:
        train = config.train.model_copy(update={"steps": steps})
        asked = config.model_copy(update={"train": train})
        ranks = train_in_process(*layout, model, asked, subject.data(), g_tensor=number)
        return [trainer for trainer, _ in ranks]

    # The first step also compares the gradients of members.
    for before, trainer in zip(after(2), after(3), strict=True):
        state, sent = planned_bytes(trainer, model)
        parts, earlier = trainer.parts.members, before.parts.members

        assert trainer.state_bytes().total == state > 0
        assert parts is not None and earlier is not None
        assert parts.bytes_sent - earlier.bytes_sent == sent > 0


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_is_not_cut_is_refused_in_a_line(settings: dict[str, Any], message: str) -> None:
    given = dict(settings)
    own, hf, ranks = given.pop("own", None), given.pop("hf", None), given.pop("ranks", 2)
    config = tiny_config(**merged({"layout": {"g_tensor": ranks}}, given))
    model = tiny_gpt(config) if own is None else own_model(**own)
    model = model if hf is None else small_llama(**hf)
    data = token_data() if own is None else vector_data()

    with pytest.raises(ConfigError, match=message):
        train_in_process(1, 1, model, config, data, g_tensor=ranks)
