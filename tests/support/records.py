"""One step's record, as tests of lines and files take it."""

from __future__ import annotations

from axsparse.observe.metrics import StepRecord

STEP_RECORD = StepRecord(
    time=1.7e9,
    step=3,
    loss=3.5,
    learning_rate=1e-3,
    grad_norm=0.5,
    loss_scale=1.0,
    skipped=False,
    skip_reason=None,
    skipped_steps=0,
    tokens=6144,
    step_seconds=2.0,
    data_seconds=0.125,
    compute_seconds=1.0,
    compress_seconds=0.125,
    optimizer_seconds=0.125,
    p2p_seconds=0.125,
    bubble_seconds=0.25,
    collective_seconds=0.125,
    other_seconds=0.125,
    tokens_per_second=3072.0,
    model_flops_per_second=1e9,
    mfu=0.25,
    model_state_bytes=2_100_000,
    gradient_bytes_sent=1000,
    p2p_bytes_sent=2000,
    peak_memory_bytes=3_000_000,
)
