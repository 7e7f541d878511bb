"""Chats, prompts and labels: the tokens that the loss counts, next to TRL's (trl_masks.json)."""

from __future__ import annotations

import json
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.preparing import ASKS, TURN, folder_of, run, template_of, write_jsonl, write_table

from axsparse.data.chats import Chat, ChatTemplate, Encoded
from axsparse.data.documents import Reading
from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets
from axsparse.data.tokenizers import given_tokenizer
from axsparse.runtime.errors import ConfigError, DataError

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "trl_masks.json").read_text())
CHATS: list[list[dict[str, str]]] = TRL["chats"]


def prepared(source: Path, folder: Path) -> Any:
    """The training data, of which the first sample is all of it but the last token."""
    out = source.parent / "out"
    sidecar, _ = run(Request((source,), out, tokenizer=folder / "tokenizer.json"))
    return token_datasets(out, sidecar.train.tokens - 1)["train"]


def encoded_by(folder: Path, messages: Any, prompt: int | None = None) -> Encoded:
    """The tokens of a chat that the folder's template takes."""
    found = ChatTemplate(given_tokenizer(folder)).encode(Chat([*messages], prompt=prompt))
    assert isinstance(found, Encoded), found
    return found


def targets_of(encoded: Encoded) -> list[int]:
    return [*compress(encoded.ids, encoded.counts)]


@pytest.mark.parametrize("kind", ["marked", "plain"])
def test_what_counts_is_what_counts_for_trl(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)

    for chat, theirs in zip(CHATS, TRL[kind], strict=False):
        encoded = encoded_by(folder, chat)
        assert encoded.ids == theirs["ids"]
        counts = "".join(map(str, map(int, encoded.counts)))
        if kind == "marked":
            assert counts == theirs["counts"]
        else:  # TRL has masks for the last answer alone, where a template has no marks.
            last = theirs["counts"].index("1")
            assert counts[last:] == theirs["counts"][last:]
            said = [message["content"] for message in chat if message["role"] == "assistant"]
            words = bytes(id_ if id_ < 256 else 0 for id_ in targets_of(encoded))
            assert words.decode().replace("\0\n", "\n").split("\n")[:-1] == said


@pytest.mark.parametrize(("end", "ids"), [("<|im_end|>", (0, 257)), (".", (0,)), ("", (0,))])
def test_an_answer_ends_at_the_special_token_that_is_its_last_target(
    end: str, ids: tuple[int, ...], tmp_path: Path
) -> None:
    turn = TURN.replace("<|im_end|>", end)
    folder = folder_of("plain", tmp_path, chat_template=template_of(turn))
    asked, answered = (Chat(list(chat)) for chat in (CHATS[0][:1], CHATS[0][:2]))

    assert ChatTemplate(given_tokenizer(folder)).ends([asked, answered]) == ids


@pytest.mark.parametrize("kind", ["marked", "plain"])
@pytest.mark.parametrize("prompt", [None, 1])
def test_a_message_of_weight_0_is_no_target(kind: str, prompt: int | None, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    *chat, last = CHATS[1]

    whole = encoded_by(folder, [*chat, last], prompt)
    encoded = encoded_by(folder, [*chat, {**last, "weight": 0}], prompt)
    first = encoded_by(folder, [{**one, "weight": 1} for one in chat], prompt)

    assert encoded.ids == whole.ids
    assert sum(whole.counts) > sum(encoded.counts) >= sum(first.counts) > 0
    assert encoded.counts[: len(first.counts)] == first.counts
    template = ChatTemplate(given_tokenizer(folder))
    odd = template.encode(Chat([*chat, {**last, "weight": 0.5}], prompt=prompt))
    assert odd == "a weight of a message that is neither 0 nor 1"


def test_the_weight_of_a_message_of_the_prompt_changes_nothing(tmp_path: Path) -> None:
    """Also where the template says other words once further messages follow."""
    folder = folder_of("forgets", tmp_path)
    first, *others = [*CHATS[0], *CHATS[0]]
    told: list[dict[str, Any]] = [first, {**others[0], "weight": 0}, *others[1:]]

    assert encoded_by(folder, told, 3) == encoded_by(folder, [first, *others], 3)


@pytest.mark.parametrize("parts", [1, 2])
def test_marks_of_messages_of_weight_0_count_for_nothing(parts: int, tmp_path: Path) -> None:
    """Where the template says other words once further messages follow, and where it marks another
    number of parts than messages."""
    mark = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    rest = "" if parts == 1 else "{% generation %}!{% endgeneration %}"
    turn = f"{{% if m['role'] == 'assistant' %}}{mark}-{rest}{{% else %}}{TURN}{{% endif %}}"
    turn += "{{ '?' if loop.last and m['role'] == 'assistant' else '' }}"
    folder = folder_of("none", tmp_path, chat_template=template_of(turn))
    user, answer = CHATS[0]
    chat: list[dict[str, Any]] = [user, {**answer, "weight": 0}, user, answer]

    if parts == 2:
        encoded = ChatTemplate(given_tokenizer(folder)).encode(Chat(chat))
        assert str(encoded).startswith("a chat with a weight of 0 and answers that the template ma")
        return
    assert bytes(targets_of(encoded_by(folder, chat))).decode() == answer["content"]


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
def test_an_answer_of_calls_alone_is_a_target(content: Any, tmp_path: Path) -> None:
    """Also behind words that ask for reasoning, which the answer lacks."""
    turn = "<|im_start|>{{ m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    turn += "{% endif %}{% for c in m.tool_calls or [] %}{{ c['function']['name'] }}{% endfor %}"
    template = template_of(f"{turn}<|im_end|>").replace("assistant\n", "assistant\n<think>")
    folder = folder_of("none", tmp_path, chat_template=template)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [CHATS[0][0], {"role": "assistant", "content": content, "tool_calls": [call]}]

    assert targets_of(encoded_by(folder, chat)) == [ord("f"), 257]


def test_labels_are_those_of_trls_collator(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "ids.jsonl", TRL["collator"]["records"])

    data = prepared(source, folder_of("none", tmp_path))

    (inputs,), targets = data.read(np.array([0]))
    # TRL pads each row by 0 and -100, and we separate the rows by 0, which is no target here.
    assert inputs[0].tolist() == [1, 2, 3, 0, 4, 5]
    (first, second), counted = TRL["collator"]["labels"], -100
    assert targets[0].tolist() == [*first[1:], counted, *second]


def test_an_end_that_is_given_is_not_written_twice_and_stays_a_target(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 0], "labels": [-100, 2, 0]}, {"input_ids": [3], "labels": [3]}]

    data = prepared(write_jsonl(tmp_path / "ids.jsonl", rows), folder_of("none", tmp_path))

    (inputs,), targets = data.read(np.array([0]))
    assert (inputs[0].tolist(), targets[0].tolist()) == ([1, 2, 0, 3], [2, 0, 3, 0])


def test_chats_that_cannot_be_used_are_left_out_by_line(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    words = [("human", "a"), ("observation", "b"), ("gpt", "c")]
    rows: list[Any] = [
        {"messages": CHATS[0]},
        {"messages": [system, *CHATS[0]]},
        {"messages": CHATS[0][:1]},
        {"messages": [{"role": "assistant"}]},
        {"messages": []},
        {"input_ids": [5, 6], "labels": [6, 5]},
        {"input_ids": [5, 6], "labels": [5]},
        {"text": "of a text all words count"},
        {"conversations": [{"from": one, "value": text} for one, text in words]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, *CHATS[0]]},
    ]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    given = folder_of("refuses", tmp_path) / "tokenizer.json"

    sidecar, _ = run(Request((source,), tmp_path / "out", tokenizer=given))

    chat, labels = "a chat that the template", "labels that do not fit the ids"
    no = f"{chat} fails on (TemplateError: no)"
    other = f"{chat} fails on (UndefinedError: 'dict object' has no attribute 'content')"
    wordless = "a chat without words of role 'assistant' (its roles: 'user')"
    assert sidecar.train.documents == 2
    assert [text.partition("chats.jsonl, ")[2] for text in sidecar.sources.examples] == [
        *(f"line 2: {no}", f"line 3: {wordless}", f"line 4: {other}", "line 5: empty"),
        *(f"line 6: {labels} (each is the id at its place, or -100)", f"line 7: {labels}"),
        f"line 9: {chat} shortens (message 2, of role 'tool')",
        "line 10: a chat with more than texts (image)",
    ]


SHAPES = {
    "ChatML": ("<|im_start|>{}\n", "<|im_end|>\n", "<|im_end|>\n", "", ""),
    "DeepSeek-V3": ("<|{}|>", "", "<|end|>", "<|im_start|>", ""),
    "Gemma": ("<start_of_turn>{}\n", "<end_of_turn>\n", "<end_of_turn>\n", "", ""),
    "Llama-3": ("<|head|>{}<|/head|>\n\n", "<|eot_id|>", "<|eot_id|>", "", ""),
    "Mistral": ("[{}] ", "[/INST]", "</s>", "", ""),
    "Phi-3": ("<|{}|>\n", "<|end|>\n", "<|end|>\n", "", "<|endoftext|>"),
    "Zephyr": ("<|{}|>\n", "<|endoftext|>\n", "<|endoftext|>\n", "", ""),
}
"""Templates as they are published: before each message, after it, after an answer, what only the
words that ask for an answer say, and what ends a chat."""


def published(shape: str, begin: str, end: str) -> str:
    """The template of a shape, with these marks around the assistant's words."""
    head, after, closed, promised, last = SHAPES[shape]
    before, _, behind = head.partition("{}")
    asked = json.dumps(before + "assistant" + behind)
    other = f"{{{{ {json.dumps(before)} + m.role + {json.dumps(behind)} + m.content }}}}{after}"
    answer = f"{{{{ {asked} }}}}{begin}{{{{ m.content + {json.dumps(closed)} }}}}{end}"
    ends = f"{{% if messages[-1].role == 'assistant' %}}{begin}{last}{end}{{% else %}}{last}"
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + other + ""
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        f"{asked} + {json.dumps(promised)} }}}}{{% else %}}{ends}{{% endif %}}{{% endif %}}"
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_turns_that_no_marks_enclose_count_as_if_marks_did(shape: str, tmp_path: Path) -> None:
    folder = folder_of("none", tmp_path, chat_template=published(shape, "", ""))
    given = given_tokenizer(folder)
    marked = published(shape, "{% generation %}", "{% endgeneration %}")
    first = {"role": "assistant", "content": "<b>"}
    chats = [*CHATS, [*CHATS[0], *CHATS[0]], [CHATS[1][0], first, *CHATS[1]]]
    if shape != "DeepSeek-V3":
        chats.append([first, *CHATS[0]])

    for chat in chats:
        encoded = encoded_by(folder, chat)

        theirs = given.loaded.apply_chat_template(
            chat, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        assert encoded.ids == theirs["input_ids"]
        assert encoded.counts == [*map(bool, theirs["assistant_masks"])]


@pytest.mark.parametrize(("answer", "is_whole"), [("xy", True), ("ax", False)])
def test_an_answer_that_begins_like_what_the_template_promises_is_left_out(
    answer: str, is_whole: bool, tmp_path: Path
) -> None:
    template = published("DeepSeek-V3", "", "").replace("<|im_start|>", "ab")
    given = given_tokenizer(folder_of("none", tmp_path, chat_template=template))
    chat = [CHATS[0][0], {"role": "assistant", "content": answer}]

    encoded = ChatTemplate(given).encode(Chat(chat))

    assert isinstance(encoded, Encoded) == is_whole, encoded


@pytest.mark.parametrize("turn", [TURN, "{{ m['content'] }}<|im_end|>"])
def test_an_answer_that_is_the_first_message_is_a_target(turn: str, tmp_path: Path) -> None:
    folder = folder_of("none", tmp_path)
    asks = ASKS if turn == TURN else ""
    template = f"<|im_start|>{{% for m in messages %}}{turn}{{% endfor %}}{asks}"
    (folder / "chat_template.jinja").write_text(template)
    chat = [{"role": role, "content": role[:2]} for role in ("assistant", "user", "assistant")]

    said = targets_of(encoded_by(folder, chat))
    assert [id_ for id_ in said if id_ != ord("\n")] == 2 * [ord("a"), ord("s"), 257]


def test_documents_that_contain_the_separator_are_not_separated_by_it(tmp_path: Path) -> None:
    data = prepared(
        write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": [1, 0, 2]}]), folder_of("none", tmp_path)
    )

    assert data.tokens.tolist() == [1, 0, 2, 0]
    with pytest.raises(ConfigError, match=r"^data\.intra_document_attention: true, but .* 1 time "):
        token_datasets(tmp_path / "out", 2, separate=True)


RECORDS: dict[str, list[dict[str, Any]]] = TRL["records"]


@pytest.mark.parametrize("write", [write_jsonl, write_table], ids=["jsonl", "parquet"])
@pytest.mark.parametrize(("records", "kind"), [key.split() for key in TRL["made"]])
def test_a_record_has_the_ids_and_the_targets_that_trl_gives_it(
    records: str, kind: str, write: Any, tmp_path: Path
) -> None:
    name = "records.jsonl" if write is write_jsonl else "records.parquet"
    folder = folder_of("none" if kind == "bos" else kind, tmp_path)
    if kind == "bos":
        begin_by(folder, "<|im_start|> $A")

    data = prepared(write(tmp_path / name, RECORDS[records]), folder)

    # Chats are followed by the separator 0, which is no target; texts end with it, in TRL as well.
    after = [] if records == "texts" else [0]
    rows = TRL["made"][f"{records} {kind}"]
    ids = [id_ for row in rows for id_ in (*row["ids"], *after)]
    counts = [c == "1" for row in rows for c in (*row["counts"], *("0" for _ in after))]
    (inputs,), targets = data.read(np.array([0]))
    assert inputs[0].tolist() == ids[:-1]
    expected = [id_ if so else -100 for id_, so in zip(ids, counts, strict=True)]
    assert targets[0].tolist() == expected[1:]
    assert data.targets_per_sample is None
    assert data.count_targets(targets) == sum(counts[1:])


def test_a_completion_begins_where_its_ids_differ_from_those_of_the_prompt(tmp_path: Path) -> None:
    """As TRL says where a token reaches from the prompt into the completion."""
    library = pytest.importorskip("tokenizers", reason="pip install 'axsparse[text]'")
    words = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    own = library.Tokenizer(library.models.BPE(words, [("a", "b")]))
    own.add_special_tokens(["<|endoftext|>"])
    own.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "ba", "completion": "ba"}])

    run(Request((source,), tmp_path / "out", tokenizer=tmp_path / "tokenizer.json"))

    ids = np.fromfile(tmp_path / "out" / "train.tokens", np.uint8)
    assert ids.tolist() == [2 | 128, 3, 1, 0]


def begin_by(folder: Path, single: str) -> None:
    """Let a folder's tokenizer put its own tokens around a text."""
    library = pytest.importorskip("tokenizers", reason="pip install 'axsparse[text]'")
    own = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [("<|im_start|>", 256), ("<|endoftext|>", 0)]
    own.post_processor = library.processors.TemplateProcessing(
        single=single, special_tokens=[token for token in tokens if token[0] in single]
    )
    own.save(str(folder / "tokenizer.json"))


TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}
WITH_ALL = "{{ 'T' + (tools | length | string) if tools else '' }}{{ mood or '' }}" + template_of(
    TURN
)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_tools_and_variables_of_a_record_go_to_the_template_that_transformers_takes(
    named: bool, as_json: bool, tmp_path: Path
) -> None:
    named_ones = [
        {"name": "default", "template": template_of(TURN)},
        {"name": "tool_use", "template": WITH_ALL.replace("'T'", "'tool_use '")},
    ]
    folder = folder_of("plain", tmp_path, chat_template=named_ones if named else WITH_ALL)
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(str(folder))
    template = ChatTemplate(given_tokenizer(folder))
    beside: list[dict[str, Any]] = [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL, TOOL], "chat_template_kwargs": {"mood": "calm"}},
        {"chat_template_kwargs": {"mood": "calm"}},
        {"tools": [], "chat_template_kwargs": {"mood": "calm"}},
    ]
    if named:
        beside.append({"tools": [TOOL], "chat_template_kwargs": {"chat_template": "default"}})

    found = set()
    for columns in beside:
        given = {key: json.dumps(value) if as_json else value for key, value in columns.items()}
        chat = Chat([*CHATS[0]], given.get("tools"), given.get("chat_template_kwargs"))
        encoded = template.encode(chat)
        assert not isinstance(encoded, str)
        theirs: Any = judge.apply_chat_template(
            list(CHATS[0]),
            tools=columns.get("tools"),
            return_dict=True,
            **columns.get("chat_template_kwargs", {}),
        )
        assert encoded.ids == theirs["input_ids"]
        found.add(tuple(encoded.ids))
    # The default template knows no mood; that for tools is taken for an empty list of them too.
    assert len(found) == 4


CALLING = (
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for call in m.tool_calls or [] %}"
    "{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>' + '\n' }}"
)


@pytest.mark.parametrize("knows_calls", [True, False])
def test_calls_of_functions_as_in_sharegpt_are_those_of_a_template_or_are_named(
    knows_calls: bool, tmp_path: Path
) -> None:
    turn = CALLING if knows_calls else TURN
    folder = folder_of("plain", tmp_path, chat_template=template_of(turn))
    from transformers import AutoTokenizer

    call = {"name": "weather", "arguments": {"place": "Oslo"}}

    def chat(told: str) -> dict[str, Any]:
        said = [("human", "a"), ("function_call", told), ("observation", "rain"), ("gpt", "b")]
        return {"conversations": [{"from": one, "value": text} for one, text in said]}

    texts = [json.dumps(call), json.dumps([call, call]), "weather in Oslo", "[]", '{"no": "name"}']
    source = write_jsonl(tmp_path / "chats.jsonl", [chat(told) for told in texts])
    prepare = partial(
        run, Request((source,), tmp_path / "out", tokenizer=folder / "tokenizer.json")
    )

    if not knows_calls:
        shortens = r"line 1: a chat that the template shortens \(message 2, of role 'assistant'\)"
        with pytest.raises(DataError, match=shortens):
            prepare()
        return
    sidecar, _ = prepare()

    unread = "a function_call that is no JSON of a name and its arguments"
    assert [text.partition("chats.jsonl, ")[2] for text in sidecar.sources.examples] == [
        f"line {number}: {unread}" for number in (3, 4, 5)
    ]
    expected = []
    for calls in ([call], [call, call]):
        messages = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": one} for one in calls],
            },
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "b"},
        ]
        judge: Any = AutoTokenizer.from_pretrained(str(folder))
        expected += [*judge.apply_chat_template(messages, return_dict=True)["input_ids"], 0]
    (inputs,), _ = token_datasets(tmp_path / "out", len(expected) - 1)["train"].read(np.array([0]))
    assert inputs[0].tolist() == expected[:-1]


@pytest.mark.parametrize(
    "call", [{"function": {"name": "f", "arguments": {}}}, {"name": "f", "arguments": {}}]
)
def test_a_message_of_calls_alone_is_used_and_its_calls_are_missed_where_they_are_left_out(
    call: dict[str, Any], tmp_path: Path
) -> None:
    """OpenAI's messages of calls have no content, which few templates take without the calls."""
    names = "{% for c in m.tool_calls %}{{ (c.function or c).name }}{% endfor %}"
    calls: list[dict[str, Any]]
    calls = [{**CHATS[0][0]}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    def encoded(of_calls: str) -> Encoded | str:
        said = f"{{{{ '<|im_start|>assistant\n' }}}}{of_calls}{{{{ '<|im_end|>\n' }}}}"
        turn = f"{{% if m.tool_calls %}}{said}{{% else %}}{TURN}{{% endif %}}"
        folder = folder_of("plain", tmp_path, chat_template=template_of(turn))
        return ChatTemplate(given_tokenizer(folder)).encode(Chat(calls))

    assert isinstance(encoded(names), Encoded)
    assert str(encoded("{{ 'calls' }}")).startswith("a chat that the template shortens (message 2")


SCHEMA = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("as_json", [False, True])
def test_functions_and_calls_in_openais_older_form_are_tools_and_their_calls(
    as_json: bool, tmp_path: Path
) -> None:
    head = "{{ tools | tojson if tools and loop.first else '' }}"
    turn = head + CALLING.replace("m['content']", "(m['content'] or '')")
    folder = folder_of("plain", tmp_path, chat_template=template_of(turn))
    from transformers import AutoTokenizer

    call = {"name": "weather", "arguments": '{"place": "Oslo"}'}
    first, last = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    old: list[dict[str, Any]] = [
        first,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
        last,
    ]
    functions: Any = json.dumps([SCHEMA]) if as_json else [SCHEMA]
    source = write_jsonl(tmp_path / "a.jsonl", [{"functions": functions, "messages": old}])

    found = prepared(source, folder)

    new = [
        first,
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "name": "weather", "content": "rain"},
        last,
    ]
    judge: Any = AutoTokenizer.from_pretrained(str(folder))
    tools: Any = [{"type": "function", "function": SCHEMA}]
    expected = judge.apply_chat_template(new, tools=tools, return_dict=True)["input_ids"]
    assert found.read(np.array([0]))[0][0][0].tolist() == expected


@pytest.mark.parametrize("kind", ["texts", "messages", "whole chats"])
def test_a_preferred_answer_is_read_with_the_prompt_next_to_it(kind: str, tmp_path: Path) -> None:
    """As TRL trains on `chosen`; without one where the answer begins by it."""
    user, answer = CHATS[0][:2]
    given: dict[str, tuple[Any, Any]] = {
        "texts": ("What? ", "That."),
        "messages": ([user], [answer]),
        "whole chats": (user["content"], [user, answer]),
    }
    prompt, chosen = given[kind]
    same = {"messages": [user, answer]} if kind == "whole chats" else {}
    row = same or {"prompt": prompt, "completion": chosen}
    folder = folder_of("plain", tmp_path)
    texts = []
    for name, record, field in (
        ("preferred", {"prompt": prompt, "chosen": chosen, "rejected": "no"}, "chosen"),
        ("same", row, ""),
    ):
        (tmp_path / name).mkdir()
        source = write_jsonl(tmp_path / name / "a.jsonl", [record])
        request = Request(
            *((source,), tmp_path / name / "out"),
            tokenizer=folder / "tokenizer.json",
            reading=Reading(jsonl_field=field),
        )
        run(request)
        texts.append((tmp_path / name / "out" / "train.tokens").read_bytes())

    assert texts[0] == texts[1]


def test_a_field_that_is_named_may_hold_the_chat(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "chats.jsonl", [{"talk": CHATS[0]}])
    given = folder_of("plain", tmp_path) / "tokenizer.json"
    reading = Reading(jsonl_field="talk")

    sidecar, _ = run(Request((source,), tmp_path / "out", tokenizer=given, reading=reading))

    assert sidecar.marked
    with pytest.raises(DataError, match="1 missing field"):
        run(Request((source,), tmp_path / "other", tokenizer=given))
