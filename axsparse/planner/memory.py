"""What a stage needs beside its state: activations, by what its layers leave behind."""

from __future__ import annotations

from collections.abc import Sequence

from axsparse.models.survey import LayerInfo


def activation_bytes(
    layers: Sequence[LayerInfo],
    *,
    microbatch_size: int,
    in_flight: int,
    checkpoint_activations: int,
) -> int:
    """Bytes of the activations of a stage with `in_flight` microbatches under way.

    A recomputed layer (every `checkpoint_activations`-th; 0: none) keeps its inputs for each
    of them, and needs what its backward needs for one. Layers of a model without example
    count nothing.
    """
    kept = working = 0
    for number, layer in enumerate(layers):
        if layer.activations is None:
            continue
        kept += layer.activations.inputs
        if checkpoint_activations and number % checkpoint_activations == 0:
            working = max(working, layer.activations.saved)
        else:
            kept += layer.activations.saved
    last = layers[-1].activations
    if last is not None:
        kept += last.outputs
    return microbatch_size * (in_flight * kept + working)
