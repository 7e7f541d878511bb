"""Text that is prepared, and the same documents in every format that data come in."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axsparse.data.documents import Reading
from axsparse.data.preparation import Request, prepare
from axsparse.data.token_file import DtypeName, Sidecar, digest_of, sample_digest, stored
from axsparse.data.tokenizers import byte_tokenizer
from axsparse.runtime.console import Console

LINE = "The cat sat on the mat, and the dog did not.\n"


def run(request: Request) -> tuple[Sidecar, str]:
    """The sidecar, and what the screen says."""
    screen = io.StringIO()
    return prepare(request, 1, Console(screen, bar=False)), screen.getvalue()


def outputs(folder: Path) -> dict[str, bytes]:
    """Everything that lies in a finished folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def make_library(folder: Path) -> Path:
    """Text files, a large one among them, JSONL, and files that cannot be used."""
    (folder / "more").mkdir(parents=True)
    (folder / "large.txt").write_text("".join(f"= {n} =\n{LINE * (n % 5)}" for n in range(60)))
    for number in range(20):
        (folder / "more" / f"{number}.txt").write_text(LINE * number)
    records = [json.dumps({"text": f"{number} {LINE}"}) for number in range(80)]
    (folder / "records.jsonl").write_text("\n".join(records))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "lost.txt").symlink_to("/nowhere")
    return folder


def requested(library: Path, out: Path, **values: Any) -> Request:
    return Request(
        **{
            "inputs": (library,),
            "out": out,
            "validation_fraction": 0.1,
            "reading": Reading("regex:^= .* =$"),
            **values,
        }
    )


def write_tokens(
    folder: Path, tokens: int = 400, dtype: DtypeName = "uint16", vocab: int = 300
) -> Path:
    """A folder as `prepare` writes it; token n is n modulo the vocabulary."""
    folder.mkdir(exist_ok=True)
    splits: dict[str, Any] = {}
    for split, count in (("train", tokens), ("validation", tokens // 4)):
        path = folder / f"{split}.tokens"
        (np.arange(count) % vocab).astype(stored(dtype)).tofile(path)
        digests = {"digest": digest_of(path), "sample_digest": sample_digest(path)}
        splits[split] = {"documents": 1, "tokens": count, **digests}
    sidecar = {
        **{"format": "axsparse tokens", "version": 1, "axsparse": "0", "request": ""},
        **{"tokenizer": {"kind": "bytes"}, "vocab_size": vocab, "separator": 0, "dtype": dtype},
        "largest_id": min(tokens, vocab) - 1,
        **{"sources": {"files": 1, "bytes": 1, "left_out": {}, "examples": []}, "settings": {}},
        **splits,
    }
    (folder / "tokens.json").write_text(json.dumps(sidecar))
    return folder


SEPARATOR = 255
"""The token after each document where tokens are bytes."""


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def write_table(path: Path, records: Any, batch: int = 3, kind: str = "stream") -> Path:
    """Records, or a table, as Parquet by the ending, else as Arrow: the stream that `datasets`
    writes, or a file with a table of contents."""
    pyarrow = pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'axsparse[test]'")
    from pyarrow import parquet

    is_table = isinstance(records, pyarrow.Table)
    table = records if is_table else pyarrow.Table.from_pylist(list(records))
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=batch)
        return path
    with getattr(pyarrow.ipc, f"new_{kind}")(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=batch)
    return path


def write_megatron(stem: Path, documents: Sequence[Sequence[int]], code: int = 8) -> Path:
    """`stem`.bin and `stem`.idx; each document is a sequence. `code` is the type of ids."""
    dtype = {1: "u1", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    parts = [np.array(document, dtype) for document in documents]
    Path(f"{stem}.bin").write_bytes(b"".join(part.tobytes() for part in parts))
    lengths = np.array([part.size for part in parts], "<i4")
    ends = np.cumsum([part.nbytes for part in parts], dtype="<i8")
    begins = ends - lengths * np.dtype(dtype).itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(parts), len(parts) + 1)
    numbers = np.arange(len(parts) + 1, dtype="<i8")
    arrays = (lengths, begins.astype("<i8"), numbers)
    Path(f"{stem}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return stem


# -- chats ----------------------------------------------------------------------------------

TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}"
)
FORGETS = TURN + "{{ '!' if loop.last and m['role'] == 'assistant' else '' }}"
REFUSES = (
    "{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    f"{{% if m['role'] != 'tool' %}}{TURN}{{% endif %}}"
)
TEMPLATES = {"plain": TURN, "marked": MARKED, "forgets": FORGETS, "refuses": REFUSES, "none": None}


def template_of(turn: str) -> str:
    """The template of all messages, each of which has this turn."""
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{ASKS}"


def folder_of(kind: str, root: Path, **changed: Any) -> Path:
    """A tokenizer of bytes, whose end of a text is 0, with two words more and a template, and with
    some settings changed."""
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    files = byte_tokenizer(0).files(512)
    tokenizer, settings = files["tokenizer.json"], files["tokenizer_config.json"]
    for number, name in enumerate(("<|im_start|>", "<|im_end|>"), 256):
        word = {**tokenizer["added_tokens"][0], "id": number, "content": name}
        tokenizer["added_tokens"].append(word)
        tokenizer["model"]["vocab"][name] = number
    if (turn := TEMPLATES[kind]) is not None:
        settings["chat_template"] = template_of(turn)
    settings |= changed
    folder = root / kind
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
