"""Chats and labels: which tokens the loss counts, beside what TRL counts (trl_masks.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.formats import write_jsonl, write_table
from support.preparing import run

from axsparse.data.chats import ChatTemplate
from axsparse.data.documents import FIRST, Reading
from axsparse.data.preparation import Request
from axsparse.data.run_tokenizer import byte_tokenizer
from axsparse.data.token_file import read_sidecar, token_datasets
from axsparse.runtime.errors import ConfigError, DataError, OutputError

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "trl_masks.json").read_text())
CHATS: list[list[dict[str, str]]] = TRL["chats"]
TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}"
)
FORGETS = TURN + "{{ '!' if loop.last and m['role'] == 'assistant' else '' }}"
REFUSES = "{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURN
TEMPLATES = {"plain": TURN, "marked": MARKED, "forgets": FORGETS, "refuses": REFUSES, "none": None}


def folder_of(kind: str, root: Path) -> Path:
    """A tokenizer of bytes, whose end of a text is 0, with two words more and a template."""
    pytest.importorskip("transformers", reason="no transformers: pip install 'axsparse[test]'")
    files = byte_tokenizer(0).files(512)
    tokenizer, settings = files["tokenizer.json"], files["tokenizer_config.json"]
    for number, name in enumerate(("<|im_start|>", "<|im_end|>"), 256):
        word = {**tokenizer["added_tokens"][0], "id": number, "content": name}
        tokenizer["added_tokens"].append(word)
        tokenizer["model"]["vocab"][name] = number
    if (turn := TEMPLATES[kind]) is not None:
        settings["chat_template"] = f"{{% for m in messages %}}{turn}{{% endfor %}}{ASKS}"
    folder = root / kind
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def prepared(source: Path, out: Path, kind: str) -> Any:
    """The training data, of which the first sample is all of it but the last token."""
    given = folder_of(kind, out.parent) / "tokenizer.json"
    run(Request((source,), out, tokenizer=given))
    tokens = read_sidecar(out, "").train.tokens
    return token_datasets(out, tokens - 1, validate=False)[0]


@pytest.mark.parametrize("kind", ["marked", "plain"])
def test_what_counts_is_what_counts_for_trl(kind: str, tmp_path: Path) -> None:
    template = ChatTemplate(folder_of(kind, tmp_path))

    for chat, theirs in zip(CHATS, TRL[kind], strict=False):
        encoded = template.encode(chat)
        assert encoded is not None
        assert encoded.ids == theirs["ids"]
        counts = "".join(map(str, map(int, encoded.counts)))
        if kind == "marked":
            assert counts == theirs["counts"]
        else:  # TRL has masks for the last answer alone, where a template has no marks.
            last = theirs["counts"].index("1")
            assert counts[last:] == theirs["counts"][last:]
            said = [message["content"] for message in chat if message["role"] == "assistant"]
            words = bytes(id_ if id_ < 256 else 0 for id_ in np.array(encoded.ids)[encoded.counts])
            assert words.decode().replace("\0\n", "\n").split("\n")[:-1] == said


@pytest.mark.parametrize("write", [write_jsonl, write_table], ids=["jsonl", "parquet"])
def test_the_loss_is_on_the_words_of_the_assistant_alone(write: Any, tmp_path: Path) -> None:
    name = "chats.jsonl" if write is write_jsonl else "chats.parquet"
    rows = [{"messages": chat} for chat in CHATS]

    data = prepared(write(tmp_path / name, rows), tmp_path / "out", "marked")

    (inputs,), targets = data.read(np.array([0]))
    ids = [id_ for row in TRL["marked"] for id_ in (*row["ids"], 0)]
    counts = [c == "1" for row in TRL["marked"] for c in (*row["counts"], "0")]
    assert inputs[0].tolist() == ids[:-1]
    expected = [id_ if so else -100 for id_, so in zip(ids, counts, strict=True)]
    assert targets[0].tolist() == expected[1:]
    assert data.targets_per_sample is None
    assert data.count_targets(targets) == sum(counts)


def test_labels_are_those_of_trls_collator(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "ids.jsonl", TRL["collator"]["records"])

    data = prepared(source, tmp_path / "out", "none")

    (inputs,), targets = data.read(np.array([0]))
    # TRL pads each row by 0 and -100, and we separate the rows by 0, which is no target here.
    assert inputs[0].tolist() == [1, 2, 3, 0, 4, 5]
    (first, second), counted = TRL["collator"]["labels"], -100
    assert targets[0].tolist() == [*first[1:], counted, *second]


def test_an_end_that_is_given_is_not_written_twice_and_stays_a_target(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 0], "labels": [-100, 2, 0]}, {"input_ids": [3], "labels": [3]}]

    data = prepared(write_jsonl(tmp_path / "ids.jsonl", rows), tmp_path / "out", "none")

    (inputs,), targets = data.read(np.array([0]))
    assert (inputs[0].tolist(), targets[0].tolist()) == ([1, 2, 0, 3], [2, 0, 3, 0])


def test_chats_that_cannot_be_used_are_left_out_by_line(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    rows: list[Any] = [
        {"messages": CHATS[0]},
        {"messages": [system, *CHATS[0]]},
        {"messages": CHATS[0][:1]},
        {"messages": [{"role": "assistant"}]},
        {"messages": []},
        {"input_ids": [5, 6], "labels": [6, 5]},
        {"input_ids": [5, 6], "labels": [5]},
        {"text": "of a text all words count"},
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    given = folder_of("refuses", tmp_path) / "tokenizer.json"

    sidecar, _ = run(Request((source,), tmp_path / "out", tokenizer=given))

    refused, labels = "a chat that the template refuses", "labels that do not fit the ids"
    wordless = "a chat without words of the assistant"
    assert sidecar.train.documents == 2
    assert [text.partition("chats.jsonl, ")[2] for text in sidecar.sources.examples] == [
        *(f"line 2: {refused}", f"line 3: {wordless}", f"line 4: {refused}", "line 5: empty"),
        *(f"line 6: {labels}", f"line 7: {labels}"),
    ]


def test_a_template_that_rewrites_earlier_turns_needs_marks(tmp_path: Path) -> None:
    template = ChatTemplate(folder_of("forgets", tmp_path))

    assert template.encode(CHATS[0]) is not None
    assert template.encode(CHATS[1]) is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", r"--tokenizer: \S+none has no chat template, which chats need; name the folder"),
        ("bytes", "--tokenizer: the input holds chats, whose words a template puts together; name"),
    ],
)
def test_chats_need_a_template(kind: str, message: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    given = None if kind == "bytes" else folder_of(kind, tmp_path) / "tokenizer.json"

    with pytest.raises(ConfigError, match=message):
        run(Request((source,), tmp_path / "out", tokenizer=given))


def test_a_chat_after_many_texts_is_left_out(tmp_path: Path) -> None:
    late: list[Any] = [{"messages": CHATS[0]}, {"input_ids": [1], "labels": [-100]}]
    rows = [{"text": "a"}] * FIRST + late
    write_jsonl(tmp_path / "mixed.jsonl", rows)

    sidecar, _ = run(Request((tmp_path / "mixed.jsonl",), tmp_path / "out"))

    assert sidecar.sources.left_out == {"a chat or labels, and none among the first documents": 2}
    assert (sidecar.marked, sidecar.dtype) == (False, "uint8")


def test_another_template_is_another_preparation(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    plain, marked = (folder_of(kind, tmp_path) / "tokenizer.json" for kind in ("plain", "marked"))
    run(Request((source,), tmp_path / "out", tokenizer=plain))

    _, again = run(Request((source,), tmp_path / "out", tokenizer=plain))

    assert "already prepared from these files, and unharmed" in again
    with pytest.raises(OutputError, match="holds tokens of other files or settings; choose anoth"):
        run(Request((source,), tmp_path / "out", tokenizer=marked))


def test_a_field_that_is_named_may_hold_the_chat(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", [{"talk": CHATS[0]}])
    given = folder_of("plain", tmp_path) / "tokenizer.json"
    reading = Reading(jsonl_field="talk")

    sidecar, _ = run(Request((source,), tmp_path / "out", tokenizer=given, reading=reading))

    assert sidecar.marked
    with pytest.raises(DataError, match="1 missing field"):
        run(Request((source,), tmp_path / "other", tokenizer=given))
