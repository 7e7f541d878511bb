"""Whatever the schedule, the same model is trained, bit by bit."""

from __future__ import annotations

import pytest
from support.exhaustive import each_once
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process

SCHEDULES = ["1f1b", "gpipe", "message-driven"]


@pytest.mark.parametrize(
    ("schedule", "layout"),
    each_once(SCHEDULES, [(2, 1), (3, 1), (4, 1), (2, 2), (1, 1)]),
    ids=str,
)
def test_no_schedule_changes_a_bit(schedule: str, layout: tuple[int, int]) -> None:
    g_inter, g_data = layout
    # Dropout and recomputation, and with four layers on three stages an uneven split.
    settings = {"model": {"dropout": 0.2}, "train": {"steps": 2}}
    pipeline = {"schedule": schedule, "slack": g_inter - 1, "checkpoint_activations": 1}
    plain = tiny_config(**settings)
    config = tiny_config(**settings, pipeline=pipeline)
    data = token_data()
    reference = train_in_process(1, g_data, tiny_gpt(plain), plain, data)[0][1]

    for _, trace in train_in_process(g_inter, g_data, tiny_gpt(config), config, data, order=3):
        assert_bitwise(trace, reference)


@pytest.mark.parametrize(("schedule", "microbatches"), each_once(SCHEDULES, [1, 2, 6]))
def test_no_schedule_needs_as_many_microbatches_as_stages(schedule: str, microbatches: int) -> None:
    batch = {"global_batch_size": 6, "microbatch_size": 6 // microbatches}
    settings = {"batch": batch, "train": {"steps": 2}}
    plain = tiny_config(**settings)
    config = tiny_config(
        **settings, layout={"split": [1, 1, 1, 1]}, pipeline={"schedule": schedule}
    )
    data = token_data()
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(plain), plain, data)

    for _, trace in train_in_process(4, 1, tiny_gpt(config), config, data):
        assert_bitwise(trace, reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_uneven_split_set_by_hand_changes_no_bit(schedule: str) -> None:
    plain = tiny_config(train={"steps": 2}, model={"num_layers": 4})
    config = tiny_config(
        train={"steps": 2},
        model={"num_layers": 4},
        layout={"split": [3, 1, 1, 1]},
        pipeline={"schedule": schedule},
    )
    data = token_data()
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(plain), plain, data)

    for _, trace in train_in_process(4, 1, tiny_gpt(config), config, data, order=5):
        assert_bitwise(trace, reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_runs_forwards_only_under_every_schedule(schedule: str) -> None:
    settings = {"train": {"steps": 2, "eval_every": 1, "eval_steps": 9}}
    plain = tiny_config(**settings)
    config = tiny_config(**settings, pipeline={"schedule": schedule})
    data, validation = token_data(), token_data(samples=23)
    [(one, _)] = train_in_process(1, 1, tiny_gpt(plain), plain, data, validation=validation)

    ranks = train_in_process(3, 1, tiny_gpt(config), config, data, validation=validation)

    assert one.last_evaluation is not None
    assert all(trainer.last_evaluation == one.last_evaluation for trainer, _ in ranks)
