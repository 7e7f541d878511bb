"""Every setting of a run: its type, its default and its meaning. Settings of models are in
`model_config.py`; no other file holds defaults.

A configuration is frozen: what is printed and saved at the start is what ran. The rule for a single
field is its type; rules between fields of one section are its `broken_rules`, and rules
between sections are in `validate.py`.
For every setting that may be `auto`, docs/reference/auto.md names the function that decides it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from axsparse.config.model_config import FAMILIES, GptConfig, ModelConfig
from axsparse.config.section import (
    Auto,
    Count,
    Fraction,
    FromList,
    Natural,
    PathText,
    Rate,
    Section,
    flat,
)

ONCE = ("magnitude", "random", "custom", "zeros", "wanda", "sparsegpt", "snip")
"""Pruning methods that draw one mask and keep it."""
NEEDY = ("custom", "zeros", "sparsegpt")
"""Methods that need a score, or weights of a certain kind, and are not suggested."""
OVER_TIME = ("interval", "until_step", "threshold")
"""Settings of `pruning` that have no effect on methods that prune once."""


class DataConfig(Section):
    """The training and validation data."""

    source: Literal["stdlib", "tokens"] = "stdlib"
    """`stdlib`: the bytes of the source files of Python's own standard library. `tokens`: token
    ids at `path`."""
    path: PathText | None = None
    """tokens: a folder that `axsparse data prepare` wrote, or the PATH of Megatron's PATH.bin and
    PATH.idx, which are read where they lie."""
    blend: Annotated[tuple[PathText, ...], FromList] = ()
    """tokens: in place of `path`, several of them, each with a weight, as in `[data/web=0.7,
    data/code=0.3]`. Of every 10,000 samples of training each source gives its share, in a shuffled
    order; each has separate epochs."""
    validation: PathText | None = None
    """tokens: the source of evaluations, a path like `path`, whose training part is taken. null:
    the validation part of `path`, or all validation parts of `blend`."""
    sequence_length: Count | Auto = "auto"
    """Tokens of one sample; `auto` takes the model's `sequence_length`."""
    intra_document_attention: bool = False
    """For models of transformers: in each document positions begin anew, and tokens attend to their
    document alone. The first token of a document is still a target, of the separator before it.
    False: positions and attention run across the ends of documents."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.source == "tokens" and self.path is None and not self.blend:
            yield (
                "path",
                "data.source tokens needs the folder that `axsparse data prepare` wrote; set "
                "data.path",
            )
        given = {"path": self.path, "blend": self.blend, "validation": self.validation}
        of_tokens = [key for key, value in given.items() if value]
        if self.source != "tokens" and of_tokens:
            key, none = of_tokens[0], "[]" if of_tokens[0] == "blend" else "null"
            yield (
                key,
                f"is for data.source tokens, not {self.source}; set data.source: tokens, or leave "
                f"it out (data.{key}: {none})",
            )
        if self.blend and self.path is not None:
            yield "blend", "given as well as data.path; leave one of them out"
        try:
            names = {path for path, weight in token_sources(self) if path and 0 < weight < inf}
        except ValueError:
            names = set()
        if len(names) < len(self.blend):
            yield (
                "blend",
                f"{list(self.blend)} is no list of different PATH=WEIGHT with weights above 0; "
                "write one as [data/web=0.7, data/code=0.3]",
            )


def token_sources(data: DataConfig) -> list[tuple[str, float]]:
    """The path and the weight of each source of tokens."""
    if not data.blend:
        return [] if data.path is None else [(data.path, 1.0)]
    parted = (entry.rpartition("=") for entry in data.blend)
    return [(path, float(weight)) for path, _, weight in parted]


class BatchConfig(Section):
    """Sequences of a step. They are cut into microbatches, which replicas share: some may take one
    more than others, and the last microbatch may be smaller."""

    global_batch_size: Count = 48
    """Sequences of one optimizer step over all replicas."""
    microbatch_size: Count = 2
    """Sequences that pass through the pipeline together."""


def num_microbatches(batch: BatchConfig, replicas: int = 1) -> int:
    """Microbatches per step on the replica that has most."""
    return -(-batch.global_batch_size // (batch.microbatch_size * replicas))


class LayoutConfig(Section):
    """How the ranks are arranged: world = g_inter × g_tensor × g_data."""

    g_inter: Count | Auto = "auto"
    """Pipeline stages; `auto` takes the fewest that fit the memory of a rank."""
    g_data: Count | Auto = "auto"
    """Replicas of the pipeline; `auto` takes ranks / (g_inter × g_tensor)."""
    g_tensor: Count = 1
    """Ranks that compute each layer of a stage together (docs/howto/tensor.md)."""
    split: Annotated[tuple[Count, ...] | Auto, FromList] = "auto"
    """Layers of each stage, first to last, embedding and head included; `auto` balances the work
    of the stages, among the splits that fit the memory of a rank."""
    memory_per_rank: Annotated[float, Field(gt=0.0)] | Auto = "auto"
    """GB (10⁹ bytes) that the process of a rank may take, everything included: of a GPU, or of a
    host. `auto`: all of a GPU, or 80 % of the memory of the host or its cgroup for each of its
    ranks. Python, torch and MPI take 0.4 GB of it on a host; a plan leaves 3 GB of a GPU to CUDA
    and NCCL."""
    cluster: PathText | None = None
    """A cluster file (`benchmarks/calibrate.py` measures one), or the name of a bundled one: its
    constants predict the time of a step. null predicts memory only."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.split == ():
            yield "split", "[] has no stages; choose the layers of each stage, or auto"


class PipelineConfig(Section):
    """In which order a stage works."""

    schedule: Literal["message-driven", "1f1b", "gpipe"] = "message-driven"
    """`message-driven`: arrivals decide the next action. `1f1b` (a forward and a backward in turn)
    and `gpipe` (all forwards, then all backwards; holds all activations) are fixed orders, for
    comparison: the same losses, bit by bit."""
    extra_in_flight: Natural | Auto = "auto"
    """message-driven, 1f1b: microbatches in flight beyond g_inter − stage; `auto` is 1, or 0 if
    memory requires it. With `layout.cluster`, as many as are worth their memory: see
    `split_backward`."""
    split_backward: bool | Auto = "auto"
    """Compute the gradients of weights apart from the backward, while nothing that a neighbour
    waits for can run: as many microbatches of them are deferred as are in flight. Linear and
    convolution layers are split. Changes no bit. `auto` is true where there are several stages,
    under message-driven, without `compile` and without `checkpoint_activations`, whose saved memory
    the deferred inputs would take again."""
    checkpoint_activations: Natural = 0
    """Recompute the activations of every k-th layer in the backward pass; 0 keeps them all."""
    compile: bool | Literal["loss"] | Auto = "auto"
    """Let torch.compile fuse the operations of each layer, and the loss of our own decoders, in the
    first step, which takes half a minute; needs a compiler. Changes rounding and the random numbers
    of dropout. Not for models of transformers. `loss` fuses the loss alone. `auto` is, in one stage
    on a GPU, for our own decoders from a hidden size of 1,024 on, `true` where a microbatch is as
    large as was measured to be faster (tokens · hidden size² from 2.7e10 on) and `loss` below."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.split_backward is True and self.compile is True:
            yield (
                "split_backward",
                "true, but pipeline.compile fuses each layer's backward into one; choose auto, "
                "which leaves it whole, or set pipeline.compile to false",
            )


class PruningConfig(Section):
    """Which weights are kept."""

    method: Literal[
        "magnitude",
        "random",
        "custom",
        "zeros",
        "wanda",
        "sparsegpt",
        "snip",
        "early-bird",
        "gradual",
        "iterative",
    ] = "magnitude"
    """Once, at `at_step`: `magnitude` keeps the largest absolute weights, `random` a random choice,
    `custom` the entries of highest `score` of the Python API, `zeros` the nonzeros of the loaded
    weights, `wanda` the largest |weight| × norm of its input in each row, over
    `calibration_samples`; `sparsegpt` removes what changes the outputs least, and changes the kept
    weights to make up; `snip` the largest |weight × gradient| of one batch. Over time: `early-bird`
    searches dense until the mask of largest weights settles; `gradual` prunes more and more;
    `iterative` prunes, rewinds and trains again (lottery tickets)."""
    sparsity: Rate = 0.9
    """Fraction of the entries of the pruned tensors that is removed; 0 prunes nothing. zeros: the
    fraction that is zero, to the hundredth; runs are planned with it."""
    distribution: Literal["uniform", "erk", "global"] = "uniform"
    """How the sparsity is spread over tensors. `uniform`: the same everywhere, which keeps
    stages balanced; `erk` (Erdős–Rényi kernel): thin tensors keep more; `global`: one threshold
    for all scores."""
    pattern: str | None = None
    """`2:4` keeps 2 of every 4 consecutive inputs of each output, for sparse tensor cores; it
    replaces `sparsity`."""
    include: Literal["blocks", "all"] = "blocks"
    """`blocks`: weights of linear, convolution, recurrent and attention modules in the blocks;
    `all`: every matrix, embeddings and output head as well."""
    exclude: Annotated[tuple[str, ...], FromList] = ()
    """Names of parameters that stay dense, such as `block0.*` or `*.fc2.weight`."""
    initial_sparsity: Rate = 0.0
    """gradual: the sparsity of the loaded weights, to the hundredth. Their zeros are the first
    masks, so that state is never dense; tensors of `layers` have the same share of their final
    sparsity. 0 begins dense."""
    layers: Annotated[tuple[str, ...], FromList] = ()
    """Sparsities of some parameters, such as `block0.*=0.5`; if several patterns fit a name, the
    last one counts. All other parameters have `sparsity`. A pattern that fits nothing which is
    pruned anyway, such as `*.pos=0.5`, adds the matrices that it fits."""
    at_step: Natural = 0
    """Steps before the first pruning, or before the search of early-bird begins (which also waits
    for the end of the warm-up). With 0, a method that needs nothing but weights prunes while the
    model is built, and never holds dense state."""
    interval: Count = 100
    """Steps between two comparisons of masks (early-bird) or two prunings (gradual, iterative)."""
    until_step: Count | Auto = "auto"
    """Steps done at the last pruning (gradual, iterative) or at the end of the search (early-bird);
    `auto` is half of `train.steps`."""
    eval_steps: Natural = 0
    """Global batches of validation data on which the loss is taken before and after each pruning
    (all but early-bird), for `metrics.jsonl` and reports."""
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """early-bird: the mask is drawn once five times in a row less than this fraction of the kept
    entries has been replaced between two masks. The run ends if none is by `until_step`."""
    rewind_step: Natural | Literal["auto", "never"] = "auto"
    """Step whose weights the kept entries return to after each pruning; warm-up and decay of the
    learning rate then begin anew. 0: the initial weights; any other step costs 4 bytes an entry
    until then. `auto` is 0 for iterative and never for others."""
    rewarm_steps: Natural = 0
    """Steps over which the learning rate rises again after each pruning, from 0."""
    calibration_samples: Count = 128
    """wanda, sparsegpt, custom with a score that takes inputs, and `heal`: training samples that
    pass through the model before the first step."""
    heal: Literal["none", "blocks"] = "none"
    """Before the first step, for loaded weights that are pruned at once: `blocks` fits the kept
    weights, norms and biases of one layer after the other to the dense layer's outputs, and of the
    last one by the loss as well, over the calibration samples, and takes the state of one layer."""
    heal_passes: Count = 2
    """heal: how often all calibration samples are seen."""
    heal_batch: Count = 1
    """heal: microbatches of a step. Replicas share them, and their gradients are added as integers,
    so that every number of replicas heals to the same bits."""
    heal_rate: Annotated[float, Field(gt=0.0)] = 0.02
    """heal: learning rate at first, as a share of the root mean square of a tensor's kept entries;
    it falls to 0 linearly. The layer that is fitted by the loss takes 0.15 of it."""
    rate_power: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """The learning rate of a pruned tensor is divided by its final density to this power: 1 as in
    SMET (arXiv 2606.00888), 0 divides nothing. Those that `optimizer.learning_rates` names have
    theirs."""
    mask: PathText | None = None
    """A mask file, or a run that has found a mask, which is applied from the start, under any
    layout. It replaces the settings of this section that choose entries, `exclude` included."""

    # Reason: a table of rules, and those with messages of their own.
    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.pattern is not None and not any(parse_pattern(self.pattern)):
            yield (
                "pattern",
                f"{self.pattern!r} is not N:M with 0 < N < M; write 2:4 to keep two of every four",
            )
        method, at, rewind = self.method, self.at_step, self.rewind_step
        draws = prunes(self) and self.mask is None
        initial = self.initial_sparsity if draws else 0.0
        by_weights = "method zeros" if method == "zeros" else "distribution global"
        if draws and self.rate_power and (method == "zeros" or self.distribution == "global"):
            yield (
                "rate_power",
                f"{self.rate_power:g}, but under pruning.{by_weights} the weights decide how dense "
                "each tensor is, after the rates are set; choose 0, or give the masks in "
                "pruning.mask",
            )
        if initial >= self.sparsity > 0:
            yield (
                "initial_sparsity",
                f"{initial:g} is not below pruning.sparsity {self.sparsity:g}, to which gradual "
                "rises; choose less, or 0 and pruning.method zeros, which keeps the masks",
            )
        if draws and isinstance(rewind, int) and rewind > at:
            yield (
                "rewind_step",
                f"{rewind} is above pruning.at_step {at}, the first pruning; choose at most that",
            )
        for key, why, values, source in self._misfits():
            value, way = _as_yaml(getattr(self, key)), self._way(key, values, source)
            yield key, f"{value}, but {why}{way}"

    def _misfits(self) -> Iterator[tuple[str, str, Sequence[object], str]]:
        """Settings whose value does not fit another: the key, why, values that do, the other."""
        method = self.method
        draws = prunes(self) and self.mask is None
        initial = self.initial_sparsity if draws else 0.0
        early = f"pruning.method {method} draws its masks tensor by tensor before the first step"
        at_once = ("wanda", "sparsegpt", "magnitude", "random", "custom")
        by_layer = ("uniform", "erk")
        rules: Sequence[tuple[bool, str, str, Mapping[str, Sequence[object]]]] = (
            (
                self.pattern is not None and self.mask is None,
                "pattern",
                "a pattern is drawn once, and keeps as much everywhere",
                {"method": ONCE, "layers": [()], "distribution": ["uniform"]},
            ),
            (
                draws and method in ("zeros", "wanda", "sparsegpt"),
                "method",
                early,
                {"at_step": [0], "distribution": ["uniform"]},
            ),
            (draws and method == "zeros", "method", early, {"layers": [()]}),
            (
                draws and method == "gradual",
                "method",
                "pruning.method gradual continues with the weights it has",
                {"rewind_step": ["never", "auto"]},
            ),
            (
                initial > 0,
                "initial_sparsity",
                "from pruning.initial_sparsity gradual rises, each tensor from the share it has",
                {"method": ["gradual"], "distribution": by_layer},
            ),
            (
                self.heal != "none",
                "heal",
                "pruning.heal fits what is pruned at once, layer by layer, before the first step",
                {"method": at_once, "at_step": [0], "distribution": by_layer, "mask": [None]},
            ),
        )
        for applies, source, why, fitting in rules:
            for key, values in fitting.items() if applies else ():
                if getattr(self, key) not in values:
                    yield key, why, values, source

    def _way(self, key: str, values: Sequence[object], source: str) -> str:
        """The suggestion of the values that do with all other settings, if any."""
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        needs_time = any(getattr(self, leaf) != usual[leaf] for leaf in OVER_TIME)

        def works(name: str, value: object) -> bool:
            new = self.model_copy(update={name: value})
            loses = needs_time and self.method not in ONCE and new.method in ONCE
            return not loses and next(new._misfits(), None) is None

        choices = [_as_yaml(each) for each in values if each not in NEEDY and works(key, each)]
        if choices:
            return f"; choose {', '.join(choices)}"
        return f"; leave pruning.{source} out" if works(source, usual[source]) else ""


def _as_yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return "null" if value is None else str(value)


def parse_pattern(text: str) -> tuple[int, int]:
    """The two numbers of a pattern such as "2:4"; 0 and 0 for any other text."""
    numbers = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    n, m = map(int, numbers.groups()) if numbers else (0, 0)
    return (n, m) if 0 < n < m else (0, 0)


def final_sparsity(pruning: PruningConfig) -> float:
    """The sparsity that a pattern, or the settings, ask for."""
    if pruning.pattern is None:
        return pruning.sparsity
    n, m = parse_pattern(pruning.pattern)
    return 1 - n / m


def prunes(pruning: PruningConfig) -> bool:
    """Whether these settings prune anything at all."""
    return bool(pruning.sparsity > 0 or pruning.layers or pruning.pattern or pruning.mask)


class SamoConfig(Section):
    """How the training state is stored."""

    enabled: bool = True
    """False trains dense: nothing is pruned. The baseline of all comparisons."""
    index: Literal["auto", "int32", "mask"] = "auto"
    """How the positions of kept entries are stored. `int32`: 4 bytes a kept entry, read as it
    is. `mask`: 0.127 bytes an entry, kept or not. `auto`: for each tensor the one that takes
    fewer bytes, which is the mask above a density of 0.032. On CPUs a mask takes up to 3 % of a
    step more, nothing where the processor has AVX-512 VBMI2, and without numba 4 to 40 %."""
    weights: Literal["auto", "dense", "sparse"] = "dense"
    """How pruned weights are stored. `dense`: ready to compute with, 2 bytes an entry in half
    precision, kept or not. `sparse`: as their kept entries' masters alone; before a layer's forward
    and its backward they are expanded into memory that all layers use in turn. The same losses: at
    a density of 0.1 a parameter takes 1.53 bytes in place of 3.53. `auto`: dense where that fits,
    else sparse, for each number of stages that is tried."""
    gradient: Literal["auto", "half", "fp32", "exact"] = "auto"
    """How gradients are accumulated: in half-precision training `half` (2 bytes a kept entry) or
    `fp32` (4), where `auto` is half up to 8 microbatches a replica, fp32 above. `exact` (8) adds
    integers, so that a run has the same bits with any number of replicas."""
    sparse_products: bool | Literal["auto"] = "auto"
    """On CPUs that multiply bf16 (AVX-512 BF16), with numba and at most two threads a rank: compute
    the products of linear layers with mostly pruned weights from the kept entries, the gradient of
    the weight where at most a fifth is kept, the other two where 0.3 are (0.05 on CPUs with AMX).
    At a tenth they take a third of the time. Rounding is as ever, but sums are added in another
    order. `auto` and `true` are the same: in the plain linear modules of every model, yours
    included."""
    zero_stage: Literal[0, 1, 3, "auto"] = 0
    """1: each replica holds and updates only its share of master weights and moments (ZeRO stage
    1); the same losses, as many bytes sent. 3: of weights that are sparse at rest as well, which
    the replicas gather before each layer computes, 2 bytes a kept entry and microbatch each way;
    the same losses. `auto`: 1 where there are replicas to share with."""
    offload: bool = False
    """On GPUs: master weights and moments stay in the host's memory, and are on the GPU only while
    their layer is updated. The same losses; every step moves them there and back."""


class OptimizerConfig(Section):
    """How weights follow gradients."""

    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    """Optimizer; its recurrence is at the top of its file in `axsparse/samo/optim/`."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1e6)] = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    betas: Annotated[tuple[Rate, Rate], FromList] = (0.9, 0.95)
    """adamw, lamb: decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    """adamw, lamb: added to the denominator of the update."""
    momentum: Rate = 0.9
    """sgd: decay of the running sum of gradients; 0 keeps no state."""
    nesterov: bool = False
    """sgd: Nesterov's momentum, which looks one step ahead."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Weight decay, on matrices only (tensors of two or more dimensions): decoupled in adamw,
    within the scaled step in lamb, added to the gradient in sgd (1e-4 is usual there)."""
    learning_rates: Annotated[tuple[str, ...], FromList] = ()
    """Peak learning rates of some parameters, such as `head.*=0.01`; the last pattern counts."""
    weight_decays: Annotated[tuple[str, ...], FromList] = ()
    """Weight decays of some parameters, such as `embed.*=0`, vectors included."""
    clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 never clips."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            yield (
                "nesterov",
                "true with optimizer.momentum 0, which has nothing to look ahead by; set "
                "optimizer.momentum above 0, 0.9 say, or this to false",
            )


class LossScaleConfig(Section):
    """The factor of losses in fp16, which falls where they or gradients are not finite."""

    initial: Annotated[float, Field(ge=1.0, le=1e38)] = 65536.0
    """Loss scale of the first fp16 step; rounded down to a power of two."""
    growth_interval: Count = 1000
    """Good steps in a row after which the scale doubles."""


class ScheduleConfig(Section):
    """How the learning rate moves: linear warm-up, then decay."""

    warmup_steps: Natural = 0
    """Steps until the learning rate reaches its peak."""
    decay: Literal["cosine", "linear", "constant", "step"] = "cosine"
    """Shape of the descent after the warm-up; `step` falls at once, every `step_every` steps."""
    decay_steps: Count | Auto = "auto"
    """cosine, linear: step at which the descent ends, warm-up included; `auto` takes
    `train.steps`, and `warmup_steps` where they are more."""
    final_ratio: Fraction = 0.1
    """cosine, linear: learning rate after the descent, as a fraction of the peak."""
    step_every: Count = 1000
    """step: steps between two falls of the learning rate, counted from the first of the run."""
    step_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """step: the factor by which each fall multiplies the learning rate."""


class TrainConfig(Section):
    """The length of the run and its reports."""

    steps: Count = 100
    """Optimizer steps."""
    eval_every: Natural = 50
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_steps: Natural | Literal["all"] = 4
    """Global batches of validation data per evaluation, or `all`; 0 never evaluates."""
    eval_first: bool = False
    """Whether to evaluate before the first step as well."""
    log_every: Count = 10
    """Steps between lines on the screen; `metrics.jsonl` has every step."""
    compare_replicas_every: Natural = 10
    """Steps between two looks whether all replicas still have the same weights, whose hash is in
    `metrics.jsonl` then; 0 never looks."""
    check_layers: bool | Auto = "auto"
    """Whether each distinct layer is compared with plain torch before the first step, by its
    outputs and gradients for one microbatch; a difference ends the run. `auto` does so for all
    models but the package's own decoder, and not in a run that is resumed."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Torch's CPU threads in each rank; fixed, since the numerics depend on them."""
    peak_flops: Annotated[float, Field(gt=0.0)] | Auto = "auto"
    """Peak flop/s of one rank's device, for `mfu`; `auto` times a matrix product at the start."""
    teacher: PathText | None = None
    """A Hugging Face folder of a language model of the same vocabulary, from whose logits the
    trained model learns as well, such as the model before it was pruned. Every stage has some of
    its layers, frozen, in `precision`; neither checkpoints nor exports have them, and evaluations
    do not run them: their losses are the model's alone. null: no teacher."""
    distillation_weight: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The teacher's share α in the loss, (1 − α) · cross entropy + α · τ² · divergence. 1 is the
    recipe for pruned language models of Minitron (Muralidharan et al. 2024, arXiv 2407.14679):
    they are retrained by the divergence alone."""
    distillation_temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    """τ, by which the logits of both are divided before they are compared (Hinton et al. 2015,
    arXiv 1503.02531); 1 as in Minitron."""
    trace: Natural = 0
    """Steps after the first one that are recorded in `trace/`, for reports and Perfetto."""


class CheckpointConfig(Section):
    """The checkpoints that a run saves in `checkpoints/` of its run directory, to be resumed
    from."""

    every: Natural = 500
    """Steps between two checkpoints; the last step is saved as well. 0 saves only when the run is
    asked to stop (SIGUSR1, SIGTERM, SIGHUP)."""
    keep_last: Count = 3
    """Newest checkpoints that are kept; incomplete ones do not count. The newest one whose weights
    a later step has trained on stays as well."""
    keep_every: Natural = 0
    """Checkpoints at multiples of this many steps are kept for good; 0 keeps `keep_last` only."""
    keep_best: bool = False
    """Whether an evaluation of lower loss than all before saves a checkpoint, which is kept until
    another one is better. Evaluations before a change of the masks do not count after it."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.every and self.keep_every % self.every:
            near = max(round(self.keep_every / self.every), 1) * self.every
            yield (
                "keep_every",
                f"{self.keep_every} is no multiple of checkpoint.every {self.every}, and most of "
                f"its multiples have no checkpoint; choose {near}",
            )


class WatchdogConfig(Section):
    """When a run counts as hung, and a rank as slow."""

    timeout: Annotated[float, Field(ge=0.0, le=1e9)] = 600.0
    """Seconds without progress on any rank after which the run is reported as hung and ends with
    70; five times as many until the first step is done. It has to be longer than the longest
    forward or backward, and than your own work between two steps. 0 never ends a run."""
    slow_ratio: Annotated[float, Field(gt=1.0)] | None = 1.5
    """A rank that computes this many times as long as the others is reported; null never warns."""


class LoggingConfig(Section):
    """Copies of the records of `metrics.jsonl`; an error there never ends a run."""

    tensorboard: bool = False
    """Whether `tensorboard/` in the run directory has them; needs `axsparse[tensorboard]`."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """A project of Weights & Biases that gets them; needs `axsparse[wandb]`. null sends nothing."""


@dataclass
class ConfigSource:
    """The origin of a configuration. It does not count in comparisons: any two are equal."""

    name: str | None = field(default=None, compare=False)
    """The stem of its file, or another name that was given to it; None if it has none."""
    settings: Mapping[str, tuple[Any, str | None]] = field(default_factory=dict, compare=False)
    """Dotted key -> its value there, and its origin: a line, or an override; None if the value
    counts as a default."""


class Config(Section):
    """All settings of a run, as `config.yaml` in its run directory records them."""

    _source: ConfigSource = PrivateAttr(default_factory=ConfigSource)
    model: ModelConfig = GptConfig()
    """Which model is trained."""
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    layout: LayoutConfig = LayoutConfig()
    pipeline: PipelineConfig = PipelineConfig()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of weights, activations and messages; master weights always have the bits of fp32.
    `auto` is bf16, and fp32 on CPUs without instructions for bf16, where that takes a multiple of
    the time of fp32."""
    pruning: PruningConfig = PruningConfig()
    samo: SamoConfig = SamoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    logging: LoggingConfig = LoggingConfig()
    transport: Literal["auto", "nccl", "mpi", "local"] = "auto"
    """How ranks communicate: `mpi` (between GPUs by way of pinned host memory), `nccl` for
    transfers between GPUs, `local` for a single process without MPI. `auto` takes NCCL if each rank
    has a separate GPU, else MPI if there is a library."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1234
    """Seed of initial weights, masks, dropout and the order of the data."""
    run_dir: PathText = "auto"
    """The run directory; `auto` is `runs/<config name>`, numbered if that exists."""

    @property
    def name(self) -> str:
        """The stem of the file that it was read from, or the name that it was given."""
        return self._source.name or "default"

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> its origin: "quickstart.yaml:12", "--set", or "configure" for values of a
        program, which copies with other values have, too. Keys that nobody set are absent."""
        origins: dict[str, str | None] = {}
        for section in self.model_fields_set:
            given = getattr(self, section)
            leaves = given.model_fields_set if isinstance(given, Section) else {""}
            origins |= {f"{section}.{leaf}".rstrip("._"): "configure" for leaf in leaves}
        values = self.by_key()
        for key, (was, origin) in self._source.settings.items():
            # A value that was changed since, by model_copy, is not the file's any more.
            if values[key] == was:
                origins[key] = origin
        return {key: origin for key, origin in origins.items() if origin is not None}

    def where(self, key: str) -> str:
        """A key and its origin, as at the beginning of an error message."""
        return f"{key} ({self.origins.get(key, 'default')})"

    def by_key(self) -> dict[str, Any]:
        """The values by dotted key."""
        return flat(self.model_dump())

    def named(self, name: str) -> Config:
        """The configuration under a name, unless it has one."""
        return self if self._source.name else self._with(ConfigSource(name, self._source.settings))

    def with_origins(self, name: str | None, origins: Mapping[str, str]) -> Config:
        """The configuration under a name; keys without an origin count as defaults."""
        values = self.by_key()
        settings = {key: (value, origins.get(key)) for key, value in values.items()}
        return self._with(ConfigSource(name, settings))

    def as_part(self) -> Config:
        """The configuration of one of several runs of a command, in which settings for the others
        need not have an effect: what `--set` gave counts as a file's."""
        origins = {key: origin.replace("--set", "prune") for key, origin in self.origins.items()}
        return self.with_origins(self._source.name, origins)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values of some settings, by their dotted keys."""
        update: dict[str, Any] = {}
        for key, value in values.items():
            section, _, leaf = key.partition(".")
            leaves = update.get(section, getattr(self, section))
            update[section] = leaves.model_copy(update={leaf: value}) if leaf else value
        return self.model_copy(update=update)

    def decided(self, update: Mapping[str, Any]) -> Config:
        """A copy with other values in place of `auto`, which keep their origins."""
        return self.model_copy(update=update).with_origins(self._source.name, self.origins)

    def _with(self, source: ConfigSource) -> Config:
        copy = self.model_copy()
        copy._source = source
        return copy


def with_absolute_paths(config: Config) -> Config:
    """A copy in which `model.from` and the training data, which an export reads, are absolute."""
    given = {"model.from_": config.model.from_, "data.path": config.data.path}
    paths = {key: str(Path(path).absolute()) for key, path in given.items() if path is not None}
    blend = tuple(str(Path(source).absolute()) for source in config.data.blend)
    return config.with_values({**paths, "data.blend": blend})


def sample_length(config: Config) -> int:
    """Tokens of one sample; `data.sequence_length: auto` takes the model's longest sequence."""
    if config.data.sequence_length != "auto":
        return config.data.sequence_length
    return config.model.sequence_length


# -- keys --------------------------------------------------------------------------------


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, schema in Config.model_json_schema()["properties"].items():
        kind = Config.model_fields[name].annotation
        for section in FAMILIES.values() if name == "model" else (kind,):
            if isinstance(section, type) and issubclass(section, Section):
                leaves = section.model_json_schema()["properties"]
                fields |= {f"{name}.{leaf}": leaf_schema for leaf, leaf_schema in leaves.items()}
            else:
                fields[name] = schema
    return fields | {"model.name": {"type": "string", "enum": list(FAMILIES)}}


FIELDS = _fields()
"""Dotted key -> JSON schema of its values, in the schema's order, with the keys of all models."""
SECTIONS: dict[str, list[str]] = {}
"""Name -> keys of every section."""
for _section, _, _leaf in (key.partition(".") for key in FIELDS if "." in key):
    SECTIONS.setdefault(_section, []).append(_leaf)
