"""The lines about rejected settings: where a setting was given, and pydantic's reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import FIELDS, SECTIONS, Config
from axsparse.config.section import BrokenRule
from axsparse.runtime.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value that somebody gave a key, before it is checked."""

    value: Any
    origin: str
    """The place where a setting was given: "quickstart.yaml:12", "--set" or "configure"."""


FOREIGN_KEYS = {
    **dict.fromkeys(("lr", "max_lr"), "optimizer.learning_rate"),
    **dict.fromkeys(
        ("epochs", "max_epochs", "max_steps", "num_steps", "iterations", "max_iters"), "train.steps"
    ),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "train.steps"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "batch.global_batch_size"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        "batch.microbatch_size",
    ),
    **dict.fromkeys(("amount", "density", "ratio"), "pruning.sparsity"),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip", "grad_clip", "clip_grad", "gradient_clip_val"),
        "optimizer.clip_norm",
    ),
    "gradient_clipping": "optimizer.clip_norm",
    **dict.fromkeys(("logging_steps", "log_interval", "print_every"), "train.log_every"),
    **dict.fromkeys(("eval_interval", "evaluation_interval"), "train.eval_every"),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), "model.sequence_length"),
    **dict.fromkeys(
        ("block_size", "max_length", "max_seq_len", "max_seq_length", "context_length"),
        "data.sequence_length",
    ),
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim"), "model.hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers"), "model.num_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_attention_heads"), "model.num_heads"),
    "tie_word_embeddings": "model.tie_embeddings",
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype"), "precision"),
    **dict.fromkeys(("output_dir", "save_dir", "out_dir"), "run_dir"),
    **dict.fromkeys(("save_every", "save_steps", "save_interval"), "checkpoint.every"),
    **dict.fromkeys(
        ("tensor_parallel", "tensor_parallel_size", "tp_size", "tp"), "layout.g_tensor"
    ),
    **dict.fromkeys(
        ("pipeline_stages", "pipeline_parallel", "pipeline_parallel_size", "pp_size", "pp"),
        "layout.g_inter",
    ),
    **dict.fromkeys(("data_parallel", "data_parallel_size", "dp_size", "dp"), "layout.g_data"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "schedule.decay"),
    **dict.fromkeys(("architectures", "model_type", "model_name_or_path"), "model.from"),
}
"""Name that other libraries have for a setting, and that looks like no key of ours -> the key."""
NEEDLESS = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        "leave it out: batch.global_batch_size / (replicas × batch.microbatch_size) is it",
    ),
    **dict.fromkeys(
        ("device", "device_map", "accelerator"),
        "leave it out: each rank takes its GPU where there is one, else the CPU",
    ),
}
"""Name that other libraries have for what no setting says -> the suggestion."""
_SUGGESTIONS = {"string_type": "; write it in quotes", "bool_type": "; write true or false"}
"""Pydantic's error type -> the suggestion in YAML, where pydantic's text has none."""


_NUMBERS = {"int_type": r"\d+", "float_type": r"[-+]?\d*\.?\d+([eE][-+]?\d+)?"}
"""Pydantic's error type -> texts that are such a number in quotes."""
_COUNT = re.compile(r"(\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?(?:e\d+)?) ?([kmb]?)", re.IGNORECASE)
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]+)", re.IGNORECASE)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_IN_SECONDS = {"watchdog.timeout": 1, "checkpoint.mtbf_hours": 3600}
"""The seconds that one of a setting is, if it is a time."""
NEARNESS = 0.7
"""How alike a key has to be to one of ours, from 0 to 1, to be taken for a slip."""


def refusal(error: ValidationError, settings: Mapping[str, Setting]) -> ConfigError:
    """The error about the first wrong key, in one line, and the number of other wrong keys."""
    problems: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        problems.setdefault(_key_of(problem), []).append(problem)
    key, first = next(iter(problems.items()))
    origin = settings[key].origin if key in settings else "default"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigError(f"{key} ({origin}): {_said(key, first)}{more}")


def _said(key: str, problems: list[Any]) -> str:
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
    texts = dict.fromkeys(re.sub(r"^\w+ should ", "", problem["msg"]) for problem in problems)
    texts = dict.fromkeys(text.replace("a valid tuple", "a list") for text in texts)
    suggestion = _SUGGESTIONS.get(kind, "") if len(problems) == 1 else ""
    if kind == "tuple_type" and isinstance(value, str | Mapping):
        pairs = (
            [f"{name}={one}" for name, one in value.items()] if not isinstance(value, str) else ()
        )
        suggestion = f"; write [{', '.join(pairs or [str(value)])}]"
    if isinstance(value, str) and kind in _NUMBERS and re.fullmatch(_NUMBERS[kind], value):
        suggestion = "; write it without quotes"
    for number in (_as_share(value, kind), _as_count(value, kind), _as_time(value, key)):
        suggestion = suggestion if number is None else f"; write {number:.12g}"
    shown = show(list(value) if isinstance(value, tuple) else value)
    return f"{shown} should {' or '.join(texts)}{suggestion}"


def _as_share(value: Any, kind: str) -> float | None:
    """The number from 0 to 1 that somebody has written as a percentage; None if it is none."""
    percent = re.fullmatch(r"(\d+\.?\d*) ?%", value) if isinstance(value, str) else None
    if percent is not None and kind.startswith("float"):
        return float(percent[1]) / 100
    is_above = kind == "less_than" and isinstance(value, int | float) and 2 <= value < 100
    return value / 100 if is_above else None


def _as_count(value: Any, kind: str) -> float | None:
    """The whole number that somebody has written as 1e3, 1,000 or 1k; None if it is none."""
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    number = value if isinstance(value, float) else None
    if found is not None and not value.isdecimal():
        number = float(re.sub("[,_]", "", found[1])) * _THOUSANDS[found[2].lower()]
    is_whole = number is not None and kind.startswith("int") and number.is_integer()
    return number if is_whole else None


def _as_time(value: Any, key: str) -> float | None:
    """The number of a key's units that somebody has written as 10min; None if it is none."""
    found = _TIME.fullmatch(value) if isinstance(value, str) and key in _IN_SECONDS else None
    seconds = _SECONDS.get(found[2].lower()) if found is not None else None
    return (
        None if found is None or seconds is None else (float(found[1]) * seconds / _IN_SECONDS[key])
    )


def _of_another_family(name: str, leaf: str) -> str:
    """The message for a key that another model has, but not the named one."""
    has = {
        family: section.model_json_schema()["properties"] for family, section in FAMILIES.items()
    }
    others = " and ".join(family for family in has if leaf in has[family])
    return (
        f"unknown key for model.name {name}, which has {', '.join(has[name])}; it is for "
        f"model.name {others}: remove it, or choose another model.name"
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
    key = shorten(key)  # Comparing takes time quadratic in the length.
    section, _, leaf = key.rpartition(".")
    leaves = {known.rpartition(".")[2]: known for known in FIELDS}
    near = [names[leaf] for names in (FOREIGN_KEYS, leaves) if leaf in names]
    # Where the section is right, only the rest distinguishes its keys.
    near += [
        f"{section}.{name}"
        for name in get_close_matches(leaf, SECTIONS.get(section, ()), 1, NEARNESS)
    ]
    if section not in SECTIONS:
        near += get_close_matches(key, [*FIELDS, *([] if section else SECTIONS)], 1, NEARNESS)
        near += [leaves[name] for name in get_close_matches(leaf, leaves, 1, NEARNESS)]
    if leaf in NEEDLESS:
        suggestion = NEEDLESS[leaf]
    elif near:
        suggestion = f"did you mean {near[0]}?"
    else:
        suggestion = f"choose one of {', '.join(SECTIONS.get(section, Config.model_fields))}"
    shown = key if key.isprintable() else repr(key)
    return ConfigError(f"{shown} ({origin}): unknown key; {suggestion}")


def show(value: object) -> str:
    """A value as YAML writes it, in at most 60 characters."""
    if value is None:
        return "null"
    return shorten(str(value).lower() if isinstance(value, bool) else repr(value))


def shorten(text: str) -> str:
    """At most 60 characters of a text."""
    return text if len(text) <= 60 else f"{text[:57]}..."
