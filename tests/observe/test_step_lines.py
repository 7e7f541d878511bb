"""The lines of a step and of an evaluation, in full."""

from __future__ import annotations

from dataclasses import replace

from support.records import STEP_RECORD

from axsparse.observe.step_lines import eval_line, step_line


def test_a_step_reads_as_one_line() -> None:
    record = replace(
        STEP_RECORD,
        step=10,
        loss=3.9117,
        grad_norm=0.8351,
        step_seconds=1.0,
        bubble_seconds=0.1799,
        tokens_per_second=3_120,
    )

    assert step_line(record, steps=30, eta=12.4, unit="samples") == (
        "step 10/30  loss 3.912  grad norm 0.84  bubble 18 %  3.1k samples/s  eta 00:12"
    )


def test_an_evaluation_reads_as_one_line() -> None:
    line = eval_line(10, 30, 1.23456, {"perplexity": 3.43689, "top1": 0.98765})

    assert line == "step 10/30  validation loss 1.2346  perplexity 3.437  top1 98.77 %"


def test_an_evaluation_of_a_part_says_so() -> None:
    line = eval_line(10, 30, 1.0, {}, "256 of 360 samples")

    assert line == "step 10/30  validation loss 1.0000  (256 of 360 samples)"
