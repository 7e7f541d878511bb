"""Layers that torch.compile fuses train as they do without."""

from __future__ import annotations

import pytest
from support.cuda_on_cpu import compiler
from support.runs import mlp, tiny_config, train_in_process, vector_data

FUSED_TOLERANCE = 1e-5
"""Of an fp32 loss: operations are fused, in another order (2e-7 seen)."""


# Half a minute of torch's compiler.
@pytest.mark.exhaustive
# Of torch itself, while it loads its compiler and looks at weights.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler")
def test_fused_layers_train_as_others_do() -> None:
    sections = {"batch": {"global_batch_size": 12, "microbatch_size": 3}, "train": {"steps": 3}}
    settings = tiny_config(**sections)
    fused = tiny_config(**sections, pipeline={"compile": True, "checkpoint_activations": 2})
    [(_, expected)] = train_in_process(1, 1, mlp(), settings, vector_data())

    [(trainer, trace)] = train_in_process(1, 1, mlp(), fused, vector_data())

    assert trace.losses == pytest.approx(expected.losses, rel=FUSED_TOLERANCE)
    assert trace.norms == pytest.approx(expected.norms, rel=FUSED_TOLERANCE)
    calls = trainer.parts.engine._stage._layers
    # A bound method is a new object whenever it is asked for.
    assert all(call._run != call._call for call in calls)
