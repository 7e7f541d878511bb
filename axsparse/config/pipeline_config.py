"""The settings of the pipeline: in which order a stage works."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from axsparse.config.section import Auto, Section


class PipelineConfig(Section):
    """In which order a stage works."""

    schedule: Literal["message-driven", "1f1b", "gpipe"] = "message-driven"
    """`message-driven`: what has arrived decides what runs next. `1f1b` (a forward and a
    backward in turn) and `gpipe` (all forwards, then all backwards; holds all activations) are
    fixed orders, for comparison: the same losses, bit by bit."""
    prefer: Literal["alternate", "backward", "forward"] = "alternate"
    """message-driven: what runs when a forward and a backward have both arrived."""
    slack: Annotated[int, Field(ge=0)] | Auto = "auto"
    """message-driven, 1f1b: microbatches in flight beyond g_inter − stage; `auto` is 1, or 0 if
    memory requires it. With `layout.cluster`, as many as are worth their memory: see
    `split_backward`."""
    split_backward: bool | Auto = "auto"
    """Compute the gradients of weights apart from the backward, while nothing that a neighbour
    waits for can run; activations are held longer. Linear and convolution layers are split.
    Changes no bit. `auto` splits large layers where stages wait for each other (two or more stages
    and microbatches, under message-driven, without `compile`) if a simulated step gains at least
    1 % of time for each 3 % of memory, and at most 85 % of what a rank may take is full then."""
    held: Annotated[float, Field(ge=1.0)] | Auto = "auto"
    """split_backward: the memory that a stage may hold of microbatches in flight and of those that
    wait for weight gradients, in units of one in flight. `auto` is what the first stage has in
    flight; with `layout.cluster`, more where the simulated step gains as much by it."""
    checkpoint_activations: Annotated[int, Field(ge=0)] = 0
    """Recompute the activations of every k-th layer in the backward pass; 0 keeps them all."""
    compile: bool = False
    """Let torch.compile fuse the operations of each layer in the first step, which takes minutes
    for a large model; needs a compiler. Changes rounding and the random numbers of dropout."""
