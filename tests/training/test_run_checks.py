"""Comparisons of ranks before a run, and the rank that is named as mismatching."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import pytest
import torch
from support.runs import on_ranks, tiny_config, tiny_gpt

import axsparse
from axsparse.models.survey import survey
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.training.run_checks import facts_of, refuse_odd_rank


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


def test_ranks_that_agree_send_no_more_than_a_digest() -> None:
    def body(transport: Transport) -> int:
        refuse_odd_rank(transport, {"layers": "x" * 40_000})
        return transport.world.bytes_sent

    digest, count, others = 64, 8, 2

    assert max(on_ranks(3, body)) <= others * (digest + 2 * count)


def refusals(facts: Mapping[int, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The error of each rank about these facts; rank n runs on host n."""

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


def test_of_two_ranks_both_are_named_and_drawn_modules_have_a_mend_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {rank: {"start values": f"modules {rank}"} for rank in range(2)}

    assert refusals(facts, monkeypatch)[0] == (
        "start values: rank 1 on host host1 has modules 1, rank 0 has modules 0; call "
        "torch.manual_seed before you make the modules"
    )


def test_a_fact_that_a_rank_lacks_is_nothing_and_long_ones_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {0: {"layer a": "x" * 90}, 1: {"layer a": "x" * 90}, 2: dict[str, str]()}

    assert (
        f"layer a: rank 2 on host host2 has nothing, the others have {'x' * 57}...;"
        in refusals(facts, monkeypatch)[0]
    )
