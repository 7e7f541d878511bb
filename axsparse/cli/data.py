"""`axsparse data prepare`: turns text files into the tokens that training reads."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from axsparse.cli.parser import CommandParser
from axsparse.data.prepare.documents import Reading
from axsparse.data.prepare.preparation import prepare
from axsparse.data.prepare.request import Request
from axsparse.data.prepare.tokenizers import SEPARATOR
from axsparse.runtime.console import make_console
from axsparse.runtime.errors import EXIT_CONFIG, EXIT_INTERRUPTED, AxsparseError
from axsparse.runtime.launcher import speaks

MEGABYTE = 1_000_000
USAGE = """\
usage: axsparse data prepare INPUT ... --out FOLDER ...

  prepare    turn text files into memory-mapped tokens (axsparse data prepare --help)
"""
DESCRIPTION = """\
Turn text files, folders of them, or JSONL into memory-mapped tokens for training.

  axsparse data prepare books/ --validation-fraction 0.01 --out data/books
  axsparse data prepare train.txt --validation valid.txt --train-bpe 50257 --out data/words
  axsparse train --config gpt_wikitext103.yaml --set data.path=data/words

A killed run goes on where it was when it is started again with the same arguments.
"""
EPILOG = """\
what becomes of the text:
  Files named *.jsonl or *.ndjson hold a record a line, all others are text. Documents that
  cannot be used (not UTF-8, empty, a huge line, malformed JSON, a missing field) are left
  out, counted and named; they end nothing. A separator follows each document.

what it writes, in --out:
  train.tokens, validation.tokens   token ids
  tokenizer.json                    if not bytes
  tokens.json                       counts, hashes and settings; written last

exit codes:
  0 done   65 no document can be used   66 input missing   70 a worker was killed
  74 output cannot be written   78 arguments that cannot be run   130 interrupted
"""


def parser() -> CommandParser:
    """The command line of `prepare`."""
    arguments = CommandParser(
        prog="axsparse data prepare",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = arguments.add_argument
    add("inputs", metavar="INPUT", nargs="+", type=Path, help="files, and folders of files")
    add("--out", metavar="FOLDER", type=Path, required=True, help="where the tokens go")
    held_out = arguments.add_mutually_exclusive_group(required=True)
    held_out.add_argument(
        "--validation",
        metavar="INPUT",
        nargs="+",
        type=Path,
        default=[],
        help="files and folders of the validation part; left out of training if named twice",
    )
    held_out.add_argument(
        "--validation-fraction",
        metavar="F",
        type=_fraction,
        default=0.0,
        help="fraction of the documents for the validation part; 0 makes none",
    )
    tokenizer = arguments.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--train-bpe",
        metavar="VOCAB",
        type=int,
        help="learn byte-pair encoding of so many words; without it and --tokenizer, tokens "
        "are bytes",
    )
    tokenizer.add_argument(
        "--tokenizer", metavar="FILE", type=Path, help="a tokenizer.json of Hugging Face's library"
    )
    add(
        "--separator",
        metavar="TOKEN",
        default=SEPARATOR,
        help="--tokenizer: the token after each document (default %(default)s)",
    )
    add(
        "--bpe-sample-mb",
        metavar="MB",
        type=_count,
        default=Request.bpe_sample_bytes // MEGABYTE,
        help="--train-bpe: text to learn from, spread over the input (default %(default)s)",
    )
    add(
        "--jsonl-field",
        metavar="NAME",
        default=Reading.jsonl_field,
        help="key of the text in a JSONL record (default %(default)s)",
    )
    add(
        "--split-documents",
        metavar="HOW",
        default=Reading.split_documents,
        help="documents of a text file: none (the file is one), blank-line (blank lines stand "
        "between), lines:N (N lines are one), regex:PATTERN (a line in which it is found begins "
        "one) (default %(default)s)",
    )
    add(
        "--max-line-mb",
        metavar="MB",
        type=_count,
        default=Reading.max_line // MEGABYTE,
        help="longest line of a usable document (default %(default)s)",
    )
    add(
        "--workers",
        metavar="N",
        type=_count,
        default=len(os.sched_getaffinity(0)),
        help="processes, on which the tokens do not depend (default %(default)s)",
    )
    return arguments


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no fraction of at least 0 and below 1")
    return value


def main(argv: Sequence[str]) -> NoReturn:
    """Prepare data, and end the process with its exit code; one of many ranks works."""
    if not speaks():
        sys.exit(0)
    if argv[:1] != ["prepare"]:
        if argv[:1] in ([], ["-h"], ["--help"]):
            sys.stdout.write(USAGE)
            sys.exit(0)
        print(
            f"axsparse: error: data: no command {argv[0]!r}; see axsparse data --help",
            file=sys.stderr,
        )
        sys.exit(EXIT_CONFIG)
    arguments = parser().parse_args(argv[1:])
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
    try:
        console = make_console(sys.stdout)
        with contextlib.closing(console):
            prepare(request, arguments.workers, console)
    except AxsparseError as error:
        print(f"axsparse: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(
            "axsparse: error: interrupted; start it again with the same arguments to go on",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)
