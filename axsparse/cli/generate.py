"""`axsparse generate`: continues a text with the model of a run or of a folder."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from axsparse.cli.parser import (
    DATA,
    CommandParser,
    add_checkpoint,
    add_set,
    decimal,
    integer,
    is_folder,
    say,
)
from axsparse.runtime.errors import ConfigError

DESCRIPTION = """\
Continue a text with a language model. RUN is a run directory, whose newest checkpoint is taken, or
one checkpoint in it, whose data --set data.path=PATH finds if they have moved; or it is a Hugging
Face folder, such as axsparse prune writes, or one of axsparse export --to sparse. transformers
generates (pip install 'axsparse[hf]'):

  axsparse generate runs/quickstart --prompt "def "
  axsparse generate runs/my_run --prompt "Once upon" --top-k 40 --temperature 0.8 --seed 3
  axsparse generate my_pruned_folder --prompt "Once upon" --compare

The most likely token follows, unless --top-k or --temperature ask to draw. One process computes it
on the CPU in bf16, with pruned weights multiplied from their kept entries; a run is exported into a
temporary folder first.
"""


def parser() -> CommandParser:
    arguments = CommandParser(_generate, prog="axsparse generate", description=DESCRIPTION)
    add = arguments.add_argument
    add_checkpoint(add)
    add_set(add, DATA)
    add("--prompt", metavar="TEXT", required=True, help='the beginning; "": that of a document')
    add("--tokens", metavar="N", type=integer(), default=100, help="at most (default %(default)s)")
    add("--top-k", metavar="K", type=integer(), help="draw among the K most likely tokens")
    number = decimal("number from 1e-9 on, such as 0.8", lambda value: value >= 1e-9)
    text = (
        "draw; below 1 likely tokens become likelier (default 1 with --top-k; without both, the "
        "most likely tokens follow)"
    )
    add("--temperature", metavar="T", type=number, help=text)
    text = "another one draws other tokens (default 0)"
    add("--seed", metavar="S", type=integer(0, 2**63 - 1), help=text)
    add("--compare", action="store_true", help="generate with dense weights too")
    return arguments


def _generate(arguments: argparse.Namespace) -> None:
    if arguments.seed is not None and arguments.temperature is None and arguments.top_k is None:
        raise ConfigError("--seed: nothing is drawn; add --top-k 40 or --temperature 0.8")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt: is not UTF-8; give it in the encoding of UTF-8") from None
    # Imported late, so that --help does not load torch.
    from axsparse.training.export import export
    from axsparse.training.load_pruned import load_pruned, tokenizer_of

    folder: Path = arguments.run
    if is_folder(folder) and (arguments.step is not None or arguments.overrides):
        raise ConfigError(f"--step, --set: {folder} is a folder, no run; leave them out")
    with TemporaryDirectory() as place:
        ways = list[str]()
        if not is_folder(folder):
            folder = Path(place) / "model"
            done = export(
                arguments.run, "sparse", folder, step=arguments.step, data=arguments.overrides
            )
            ways += done.notes
        tokenizer = tokenizer_of(folder, arguments.run, *ways)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", UserWarning)
            model = load_pruned(folder)
        for note in noted:
            say(f"note: {note.message}")
        _one(arguments, model, tokenizer)
        if arguments.compare:
            _one(arguments, load_pruned(folder, fewest_zeros=None), tokenizer)


def _one(arguments: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    from axsparse.runtime.console import format_bytes
    from axsparse.training.load_pruned import continued

    draws = arguments.temperature is not None or arguments.top_k is not None
    done = continued(
        model,
        tokenizer,
        arguments.prompt,
        arguments.tokens,
        temperature=(arguments.temperature or 1.0) if draws else None,
        top_k=arguments.top_k,
        seed=arguments.seed or 0,
        show=lambda text: say(_printable(text), end=""),
    )
    say("")
    full = " (the model has room for no more)" if done.fills_room else ""
    say(
        f"{done.tokens} tokens{full}, {done.tokens_per_second:.1f} tokens/s, weights "
        f"{format_bytes(done.weight_bytes)} ({format_bytes(done.dense_bytes)} dense)"
    )


def _printable(text: str) -> str:
    """The text without the letters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
