"""`axsparse data prepare`: turns text files into the files of tokens that training reads."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from axsparse.cli.parser import CommandParser, integer, say, share
from axsparse.data.documents import Reading
from axsparse.data.preparation import Request, prepare
from axsparse.data.tokenizers import SEPARATOR
from axsparse.runtime.console import make_console

MEGABYTE = 1_000_000
DESCRIPTION = """\
Turn text files, JSONL, Parquet, Arrow or folders of them into memory-mapped tokens for training.

  axsparse data prepare books/ --validation-fraction 0.01 --out data/books
  axsparse data prepare train.txt --validation valid.txt --train-bpe 50257 --out data/words
  axsparse train --config gpt_wikitext103.yaml --set data.path=data/words

A killed run goes on where it was when it is started again with the same arguments.
"""
EPILOG = """\
how text is read:
  Files named *.jsonl or *.ndjson hold a record a line, *.json the same or a list of records,
  *.parquet and *.arrow a row each, all others are text; .gz or .zst after the name says that a
  file is compressed. A record has a text, the messages of a chat, input_ids (and labels, or
  masks), or a prompt and its completion, which alone is learnt.
  Documents that cannot be used (not UTF-8, empty, a huge line, malformed JSON, a missing field)
  are left out, counted and named; they end nothing. A separator follows each document.

what it writes, in --out:
  train.tokens, validation.tokens   token ids
  tokenizer.json                    if not bytes
  tokens.json                       counts, hashes and settings; written last
"""


def parser() -> CommandParser:
    texts = {"description": DESCRIPTION, "epilog": EPILOG}
    arguments = CommandParser(_prepare, prog="axsparse data prepare", **texts)
    line = "interrupted; start it again with the same arguments to go on"
    arguments.set_defaults(interrupted=line)
    add = arguments.add_argument
    add("inputs", metavar="INPUT", nargs="+", type=Path, help="files, and folders of files")
    add("--out", metavar="FOLDER", type=Path, required=True, help="where the tokens go")
    held_out = arguments.add_mutually_exclusive_group(required=True).add_argument
    text = "files and folders of the validation part; left out of training if named twice"
    held_out("--validation", metavar="INPUT", nargs="+", type=Path, default=[], help=text)
    text = "fraction of the documents for the validation part; 0 makes none"
    held_out("--validation-fraction", metavar="F", type=share, default=0.0, help=text)
    _add_tokenizer(arguments)
    _add_reading(add)
    text = (
        "threads that learn and encode, unless tokens are bytes; the tokens do not depend on "
        "their number (default %(default)s)"
    )
    cores = len(os.sched_getaffinity(0))
    add("--workers", metavar="N", type=integer(most=1024), default=cores, help=text)
    return arguments


def _add_tokenizer(arguments: CommandParser) -> None:
    either = arguments.add_mutually_exclusive_group().add_argument
    text = (
        "learn a byte-pair encoding of VOCAB tokens; without it and --tokenizer, tokens are bytes"
    )
    either("--train-bpe", metavar="VOCAB", type=int, help=text)
    text = (
        "a Hugging Face folder (that of model.from), or its tokenizer.json; settings next to the "
        "file are heeded"
    )
    either("--tokenizer", metavar="PATH", type=Path, help=text)
    text = (
        "with --tokenizer: the token after each document (default: the tokenizer's eos_token, "
        f"else {SEPARATOR})"
    )
    arguments.add_argument("--separator", metavar="TOKEN", help=text)
    text = (
        "with --train-bpe: megabytes of text to learn from, spread over the input "
        "(default %(default)s)"
    )
    usual = Request.bpe_sample_bytes // MEGABYTE
    arguments.add_argument(
        "--bpe-sample-mb", metavar="MB", type=integer(), default=usual, help=text
    )


def add_jsonl_field(add: Callable[..., object]) -> None:
    """The option that names the field of records that has the text."""
    text = (
        "key of the text, chat or ids in a record or row (default: the first of input_ids, "
        "messages, conversations, prompt with completion, text that is there)"
    )
    add("--jsonl-field", metavar="NAME", default=Reading.jsonl_field, help=text)


def _add_reading(add: Callable[..., object]) -> None:
    """The options that say how files are split into documents; `add` is `add_argument`."""
    add_jsonl_field(add)
    text = (
        "documents of a text file: none (the file is one), blank-line (blank lines separate "
        "them), lines:N (every N lines are one), regex:PATTERN (each line that matches begins "
        "one) (default %(default)s)"
    )
    add("--split-documents", metavar="HOW", default=Reading.split_documents, help=text)
    text = "megabytes of the longest line that a usable document may have (default %(default)s)"
    usual = Reading.max_line // MEGABYTE
    add("--max-line-mb", metavar="MB", type=integer(), default=usual, help=text)


def _prepare(arguments: argparse.Namespace) -> None:
    request = Request(
        inputs=tuple(arguments.inputs),
        out=arguments.out,
        validation=tuple(arguments.validation),
        validation_fraction=arguments.validation_fraction,
        train_bpe=arguments.train_bpe,
        bpe_sample_bytes=arguments.bpe_sample_mb * MEGABYTE,
        tokenizer=arguments.tokenizer,
        separator=arguments.separator,
        reading=Reading(
            split_documents=arguments.split_documents,
            jsonl_field=arguments.jsonl_field,
            max_line=arguments.max_line_mb * MEGABYTE,
        ),
    )
    prepare_and_show(request, arguments.workers)


def prepare_and_show(request: Request, workers: int) -> None:
    """Prepare tokens, and show on stdout how far it is; OutputError in the end if it cannot be
    written."""
    say("", end="")
    with contextlib.closing(make_console(sys.stdout)) as console:
        prepare(request, workers, console)
    say("", end="")
