"""The lines about rejected settings: where a setting was given, and pydantic's reason."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import FIELDS, SECTIONS, Config
from axsparse.config.section import BrokenRule
from axsparse.runtime.errors import ConfigError, printable


@dataclass(frozen=True)
class Setting:
    """A value that somebody gave a key, before it is checked."""

    value: Any
    origin: str
    """Where it was given: "quickstart.yaml:12", "--set" or "configure"."""
    text: Any = None
    """The scalar as it was typed, or a list of them; None unless YAML was read."""


OTHER_NAMES = """
optimizer.name: optim optimizer_type optimizer_name
optimizer.learning_rate: lr max_lr
optimizer.betas, both in one list such as [0.9, 0.95]: beta1 beta2 adam_beta1 adam_beta2
optimizer.eps: epsilon adam_epsilon adam_eps
optimizer.weight_decay: wd l2 weight_decay_rate adam_weight_decay optimizer.decay
optimizer.clip_norm: max_grad_norm gradient_clip grad_clip clip_grad gradient_clip_val
  gradient_clipping max_norm
schedule.warmup_steps: warmup lr_warmup num_warmup_steps
schedule.warmup_steps, a number of steps: warmup_ratio warmup_fraction
schedule.final_ratio, a fraction of optimizer.learning_rate: min_lr lr_min eta_min
schedule.decay: scheduler lr_scheduler lr_scheduler_type optimizer.schedule train.schedule
train.steps: max_steps num_steps total_steps iterations max_iters train_iters optimizer.steps
train.steps, a number of steps: epoch epochs max_epochs num_epochs num_train_epochs
pruning.until_step: pruning.end_step
train.log_every: logging_steps log_steps log_interval print_every logging.steps logging.interval
  logging.every
train.eval_every: eval_interval evaluation_interval
batch.global_batch_size: batch_size train_batch_size
batch.microbatch_size: per_device_train_batch_size micro_batch_size
  train_micro_batch_size_per_gpu
batch.microbatch_size, the samples of a microbatch: gradient_accumulation_steps
  accumulate_grad_batches
pruning.sparsity: amount ratio target_sparsity final_sparsity
pruning.sparsity, 1 minus the density: density
pruning.sparsity, 0 for none: pruning.enabled
model.sequence_length: max_position_embeddings n_positions n_ctx
model.hidden_size: n_embd d_model hidden_dim
model.hidden_size, a quarter of the width of MLPs: ffn_hidden_size intermediate_size n_inner
  d_ff ffn_dim
model.num_layers: n_layer n_layers num_hidden_layers model.layers
model.num_heads: n_head n_heads num_attention_heads
model.tie_embeddings: tie_word_embeddings
model.from: model_name_or_path
model.from, the model's folder: architectures model_type
data.sequence_length: block_size max_length max_seq_len max_seq_length context_length seq_len
  seqlen
pipeline.checkpoint_activations, 1 for all layers: gradient_checkpointing
  activation_checkpointing recompute
precision: dtype torch_dtype
precision, such as bf16: bf16 fp16 amp
run_dir: output_dir save_dir out_dir save_path
run_dir, whose checkpoints/ has them: checkpoint_dir ckpt_dir checkpoint_path checkpoint.dir
  checkpoint.path
optimizer.weight_decays, a list of rules such as ["*bias=0"]: no_decay no_weight_decay
  optimizer.no_decay optimizer.no_weight_decay weight_decay_exclude
checkpoint.every: save_every save_steps save_interval checkpoint.steps checkpoint.interval
watchdog.timeout, 0 for none: watchdog.enabled
layout.g_tensor: tensor_parallel tensor_parallel_size tp_size tp
layout.g_inter: pipeline_stages pipeline_parallel pipeline_parallel_size pp_size pp
layout.g_data: data_parallel data_parallel_size dp_size dp
seed: random_seed manual_seed
"""
"""A row is a key, and names that other libraries have for the setting and that look like no key of
ours; with a section where they mean it there alone. What follows the key says what its value is,
where other libraries have another unit or meaning."""
OTHER_ARGUMENTS = """
data=(TRAINING, VALIDATION): val_data validation_data valid_data eval_data val_dataset
  validation_dataset valid_dataset eval_dataset validation validation_set val_set eval_set
  eval_dataloader val_dataloader val_loader
data=DATASET, of torch's by ax.from_torch: train_data train_dataset training_data train_set dataset
  datasets dataloader train_dataloader train_loader training_dataset
loss=FUNCTION, whose result is a sum over the microbatch: loss_fn loss_function criterion
metrics={"NAME": FUNCTION}, whose results are counts: compute_metrics
settings by their names, or config={…}: args training_args
trainer.train(on_step=FUNCTION), which is called after each step: callbacks callback
optimizer=, an instance of ax.Optimizer, or config={"optimizer.name": "adamw"}: optimizers
resume="auto" or the path of a run: resume_from_checkpoint resume_from
"""
"""A row is an argument of `ax.Trainer` or of a method, and names of it in other libraries."""
GENERAL = (
    *("name", "path", "source", "from", "new", "weights", "layers", "split", "schedule", "method"),
    *("enabled", "steps", "every", "interval", "initial", "threshold", "gradient", "decay"),
)
"""Last words of keys that mean something else in another section."""


def _by_foreign_name(table: str) -> dict[str, str]:
    return {
        name: own
        for row in re.split(r"\n(?! )", table.strip())
        for own, _, names in [row.rpartition(": ")]
        for name in names.split()
    }


FOREIGN_KEYS = _by_foreign_name(OTHER_NAMES)
FOREIGN_ARGUMENTS = _by_foreign_name(OTHER_ARGUMENTS)
OFF = ("null", "false", "'none'", "'off'", "0", "-1")
"""Values by which other libraries switch something off."""
SWITCHES_OFF = re.compile(r"[.;]\s((?:0|null)\s[a-z][^.;(]*)")
"""Matches what the description of a key says of the value that switches it off."""
EXAMPLE = re.compile(r"[`\[]([^\s`,\[]+[=:][\d.]+)")
"""Matches a text with a number in the description of a key that takes such texts alone."""
NUMBER = re.compile(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?")
"""Matches a text that is a number in quotes."""
PERCENT = re.compile(r"(\d+\.?\d*) *%")
UNIT = re.compile(r"GB|Seconds")
"""Matches the unit with which the description of a number begins."""
NEARNESS = 0.7
"""How alike a key has to be to one of ours, from 0 to 1, to be taken for a slip."""
NEARNESS_OF_CHOICES = 0.82
"""The same of one of few texts: adam is adamw, nadam is another."""


def refusal(error: ValidationError, settings: Mapping[str, Setting]) -> ConfigError:
    """The error about the first wrong key, in one line, and the number of other wrong keys."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        problems.setdefault(_key_of(problem), []).append(problem)
    key, first = next(iter(problems.items()))
    setting = settings.get(key, Setting(None, "default"))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{key} ({setting.origin}): {_said(first, setting)}{more}")


def _said(problems: list[Any], setting: Setting) -> str:
    """The value of a key and pydantic's texts about it; a union has one for each of its types."""
    if (rule := _broken_rule(problems[0])) is not None:
        return rule.said
    value, kind = problems[0]["input"], problems[0]["type"]
    if kind == "family":
        value = value["name"]
    if kind == "extra_forbidden":
        return _of_another_family(*problems[0]["loc"][1:])
    if kind == "missing":
        return f"{show(list(value))} is too short; give more entries"
    said = (problem["msg"].replace("a valid tuple", "a list") for problem in problems)
    texts = dict.fromkeys(re.sub(r"^\w+ should ", "", text) for text in said)
    suggestion = _suggestion(kind, value, _key_of(problems[0]), setting)
    if kind.startswith("less_than") and 1 in problems[0]["ctx"].values() and 10 <= value < 100:
        suggestion = f"; {value:g} % is {value / 100:g}"
    shown = show(list(value) if isinstance(value, tuple) else value)
    return f"{shown} should {' or '.join(texts)}{suggestion}"


def _suggestion(kind: str, value: object, key: str, setting: Setting) -> str:
    """The suggestion for pydantic's type of error, where pydantic's text has none."""
    field = FIELDS.get(key, {})
    off, default = SWITCHES_OFF.search(field.get("description", "")), field.get("default")
    if off is not None and show(value).lower() in OFF:
        return f"; {' '.join(off[1].split())}"
    if show(value) in ("null", "''") and default is not None:
        return f"; leave it out for {show(default)}"
    if near := nearest_choice(value, field.get("enum", [default])):
        return near
    if kind == "tuple_type" and isinstance(default, list) and default:
        return f" such as {default}"
    example = EXAMPLE.search(field.get("description", ""))
    if kind == "tuple_type" and isinstance(value, dict):
        return f"; write {instead_of_nested(key, value)}"
    if kind == "tuple_type" and type(value) in (int, float) and example is not None:
        return f' such as ["{example[1]}"]'
    by_option = setting.origin == "--set"
    if kind == "tuple_type" and isinstance(value, str):
        is_list = value.startswith("[") and value.endswith("]")
        text = value[1:-1] if is_list else value
        if not takes_texts(key) and not all(map(NUMBER.fullmatch, _entries(text))):
            return ""
        if example and "=" in example[1] and not all("=" in each for each in _entries(text)):
            return f' such as ["{example[1]}"]'
        listed = _as_list(key, text)
        in_file = "it without quotes" if is_list else listed
        return f"; write {argument(key, listed) if by_option else in_file}"
    if kind in ("int_type", "float_type") and isinstance(value, str) and NUMBER.fullmatch(value):
        return "; write it without quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if kind == "float_type" and (percent := PERCENT.fullmatch(str(value))):
        return f"; write {float(percent[1]) / 100:g}"
    if kind == "float_type" and NUMBER.fullmatch(point := str(value).replace(",", ".", 1)):
        return f"; write {point}"
    unit = UNIT.match(field.get("description", ""))
    if kind == "float_type" and isinstance(value, str) and unit is not None:
        return f"; write a number of {unit[0] if unit[0].isupper() else unit[0].lower()}"
    if kind == "string_type" and type(value) in (int, float):
        if example is not None:
            return f"; write {'entries' if isinstance(default, list) else 'it'} as in {example[1]}"
        texts = json.dumps(setting.text, ensure_ascii=False)
        return f"; write {argument(key, texts) if by_option else 'it in quotes'}"
    return "; write true or false" if kind == "bool_type" and default != "auto" else ""


def instead_of_nested(key: str, value: object) -> str:
    """The value to write in place of one that has lists or mappings within it."""
    field = FIELDS[key]
    takes_pairs = EXAMPLE.search(field.get("description", "")) and field.get("default") == []
    if takes_pairs and isinstance(value, dict) and not any(map(is_nested, value.values())):
        return json.dumps([f"{name}={each}" for name, each in value.items()], ensure_ascii=False)
    return "a scalar or a flat list"


def is_nested(value: object) -> bool:
    return isinstance(value, list | dict)


def argument(key: str, text: str) -> str:
    return f"--set {shlex.quote(f'{key}={text}')}"


def takes_texts(key: str) -> bool:
    """Whether any text can be the value of a key, or an entry of it."""
    field = FIELDS[key]
    kinds = [field.get("items", field), *field.get("anyOf", ())]
    return any(
        kind.get("type") == "string" and not {"enum", "const"} & kind.keys() for kind in kinds
    )


def quoted_argument(key: str, text: str) -> str:
    """The option that sets a key to a text, or to a list of texts, which begin with * or &."""
    if not isinstance(FIELDS[key].get("default"), list):
        return argument(key, json.dumps(text, ensure_ascii=False))
    return argument(key, _as_list(key, text[1:-1] if text.startswith("[") else text))


def _as_list(key: str, text: str) -> str:
    """A list of the entries of a text, each in quotes unless the key takes numbers."""
    texts = takes_texts(key)
    entries = (json.dumps(each, ensure_ascii=False) if texts else each for each in _entries(text))
    return f"[{', '.join(entries)}]"


def _entries(text: str) -> list[str]:
    return [entry.strip("'\" ") for entry in text.split(",")]


def _of_another_family(name: str, leaf: str) -> str:
    """The message for a key that another model has, but not the named one."""
    others = [family for family, section in FAMILIES.items() if leaf in section.model_fields]
    return (
        f"unknown key for model.name {name}, it is for model.name {' and '.join(others)}; remove "
        "it, or choose another model.name"
    )


def _broken_rule(problem: Mapping[str, Any]) -> BrokenRule | None:
    """The rule between settings of a section that a problem of pydantic's is about, if any."""
    rule = problem.get("ctx", {}).get("error")
    return rule if isinstance(rule, BrokenRule) else None


def _key_of(problem: Mapping[str, Any]) -> str:
    """The dotted key that a problem of pydantic's is about."""
    if problem["type"] == "family":
        return "model.name"
    top, *rest = map(str, problem["loc"])
    if (rule := _broken_rule(problem)) is not None:
        return f"{top}.{rule.key}"
    if top == "model":
        del rest[:1]  # the family
    # After the key, pydantic also names list entries and types of unions.
    dotted = ".".join([top, *rest[:1]])
    return dotted if dotted in FIELDS else top


def unknown_key(key: str, origin: str) -> ConfigError:
    """The error about a key that is not in the schema, with the nearest one that is."""
    if key in SECTIONS:
        own = ", ".join(f"{key}.{leaf}" for leaf in SECTIONS[key])
        return ConfigError(f"{key} ({origin}): a section has no value; set one of {own}")
    whole = next((known for known in FIELDS if key.startswith(f"{known}.")), None)
    key = shorten(key)  # Comparing takes time quadratic in the length.
    section, _, leaf = key.rpartition(".")
    top, _, below = key.partition(".")
    leaves: dict[str, str] = {}
    for known in FIELDS:
        name = known.rpartition(".")[2]
        if not (section and name in GENERAL):
            leaves[name] = f"{leaves[name]} or {known}" if name in leaves else known
    named = ((FOREIGN_KEYS, key), (FOREIGN_KEYS, leaf), (leaves, leaf))
    near = [names[each] for names, each in named if each in names]
    # Where the section is right, only the rest distinguishes its keys.
    near += [
        f"{section}.{name}"
        for name in get_close_matches(leaf, SECTIONS.get(section, ()), 1, NEARNESS)
    ]
    if section not in SECTIONS:
        near += get_close_matches(key, [*FIELDS, *([] if section else SECTIONS)], 1, NEARNESS)
        near += [leaves[name] for name in get_close_matches(leaf, leaves, 1, NEARNESS)]
    if whole is not None:
        suggestion = f"{whole} is one setting, with all that it has; give it whole, best in a file"
    elif NUMBER.fullmatch(below if top in SECTIONS else key):  # of `{betas: 0.9, 0.95}`
        suggestion = "write a list in brackets, such as [1, 2], and 1,000 as 1000"
    elif near:
        suggestion = f"did you mean {near[0]}?"
    elif origin == "Trainer":
        suggestion = "leave it out"
    else:
        suggestion = f"choose one of {', '.join(SECTIONS.get(section, Config.model_fields))}"
    shown = key if key.isprintable() else repr(key)
    return ConfigError(f"{shown} ({origin}): unknown key; {suggestion}")


def nearest_choice(value: object, choices: Iterable[object]) -> str:
    """The suggestion of the text that a value was meant to be, if it is like one of them."""
    texts = [each for each in choices if isinstance(each, str)]
    near = get_close_matches(str(value).lower()[:60], texts, 1, NEARNESS_OF_CHOICES)
    return f"; did you mean {near[0]}?" if near else ""


def show(value: object) -> str:
    """A value as YAML writes it, in at most 60 characters."""
    if value is None:
        return "null"
    return shorten(str(value).lower() if isinstance(value, bool) else printable(repr(value)))


def shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
