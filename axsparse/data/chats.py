"""Chats as token ids, by the template of a tokenizer, and which of them the assistant says.

The template is rendered by transformers, an optional dependency, in a sandbox of Jinja.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, compress, groupby
from typing import Any, NamedTuple

from axsparse.data.token_file import TOKENIZER
from axsparse.data.tokenizers import GivenTokenizer
from axsparse.runtime.errors import ConfigError, one_line

MARKS = re.compile(r"\{%-?\s*generation\b")
"""The beginning of the assistant's words in a template."""
ASSISTANT, USER = "assistant", "user"
SYSTEM = "system"
"""The role of a first message, and of a column that has its text."""
WEIGHT = "weight"
"""A key of OpenAI's messages of the assistant: those with 0 are no targets."""
ROLES = {
    "human": USER,
    **dict.fromkeys(("observation", "function"), "tool"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing"), ASSISTANT),
}
"""ShareGPT's names of roles, and OpenAI's older one, and their names in templates."""
CALL, CALLS = "function_call", "tool_calls"
"""ShareGPT's role of a message that calls functions, and OpenAI's older key of a call; and where
templates read calls."""
TOOLS, KWARGS = "tools", "chat_template_kwargs"
"""Columns next to the messages, which `apply_chat_template` gets."""
TEMPLATE = "chat_template"
"""The variable by which a record names one of several templates."""
WHY = 200
"""The length to which a reason why a file or a chat cannot be used is cut, in letters."""

ANY_CHAT = {"role": USER, "content": "Does the template end every chat alike?"}
"""A message whose text ends as a template ends every chat."""

Messages = Sequence[dict[str, Any]]


class Chat(NamedTuple):
    """The messages of a chat, and its other arguments of `apply_chat_template`."""

    messages: list[dict[str, Any]]
    tools: Any = None
    """A list of schemas, or its JSON."""
    kwargs: Any = None
    """Variables of the template, by name, or their JSON."""
    prompt: int | None = None
    """Number of messages that are the prompt, where the loss counts all that follows a prompt."""

    def arguments(self) -> dict[str, Any]:
        """The arguments next to the messages; ValueError if they are none."""
        tools, kwargs = (
            json.loads(given) if isinstance(given, str | bytes) else given
            for given in (self.tools, self.kwargs)
        )
        if not isinstance(tools, list | None) or not isinstance(kwargs, dict | None):
            raise ValueError(f"{TOOLS} are a list, {KWARGS} a mapping")
        return {TOOLS: tools, **(kwargs or {})}


def chatml(messages: Messages) -> list[dict[str, Any]]:
    """Messages with `role` and `content`, also where they have ShareGPT's `from` and `value` or
    OpenAI's older calls; ValueError for a call of a function that cannot be read."""
    found = []
    for message in messages:
        renamed = {
            {"from": "role", "value": "content"}.get(key, key): message[key] for key in message
        }
        if "from" in message or message.get("role") == "function":
            renamed["role"] = ROLES.get(str(renamed["role"]), renamed["role"])
        if message.get("from") == CALL:
            calls = _calls(renamed.get("content"))
            renamed |= {"role": ASSISTANT, "content": "", CALLS: calls}
        elif message.get(CALL):
            renamed[CALLS] = _calls(renamed.pop(CALL))
        found.append(renamed)
    return found


def _calls(text: object) -> list[dict[str, Any]]:
    """Calls, one or a list or the JSON of these, as templates read them."""
    try:
        found = json.loads(text) if isinstance(text, str | bytes) else text
    except (ValueError, RecursionError):
        found = None
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(one, dict) and "name" in one for one in calls):
        raise ValueError(f"a {CALL} that is no JSON of a name and its arguments")
    return of_functions(calls)


def of_functions(functions: Iterable[object]) -> list[dict[str, Any]]:
    """Calls or schemas of functions, as entries of `tool_calls` or of `tools`."""
    return [{"type": "function", "function": one} for one in functions]


def _renamed(call: dict[str, Any]) -> dict[str, Any]:
    """A call of another function; templates look for its name in `function`, or next to that."""
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _renamed(inner)}
    return {**call, "name": f"x{call.get('name')}"}


def common_prefix(ids: Sequence[object], others: Sequence[object]) -> int:
    """The number of leading ids, or letters, that two sequences share."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (id_, other) in pairs if id_ != other), min(len(ids), len(others)))


def _before_first(message: dict[str, Any], alone: str, text: Callable[..., str]) -> str:
    """The text before an answer that is the first message, and `alone` with it. No template renders
    a chat without messages: the words that ask for an answer come after one."""
    asking = text([message], add_generation_prompt=True)
    asking = asking[common_prefix(asking, alone) :]
    first = next(iter(_words(message)), alone)
    head, found, _ = alone.partition(asking or first)
    return head + (asking or ("" if found else "no such place"))


def _words(message: dict[str, Any]) -> list[str]:
    """The texts of a message, of its parts if it has several; an answer of calls alone has none."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [content]
    texts = (str(part.get("text", "") if isinstance(part, dict) else part) for part in parts)
    return [text.strip() for text in texts if text.strip()]


def _turn(
    messages: Messages,
    number: int,
    whole: str,
    text: Callable[..., str],
    shared: Callable[[str], int],
) -> tuple[int, int] | None:
    """Where the words of an answer begin and end in `whole`; None where the template changes
    them. `shared` says where the first token of `whole` begins that a text has not."""
    after = text(messages[: number + 1])
    before = (
        text(messages[:number], add_generation_prompt=True)
        if number
        else _before_first(messages[0], after, text)
    )
    begin = len(before) if after.startswith(before) else shared(before)
    end = len(after) if whole.startswith(after) else shared(after)
    # The words that ask may begin what an answer has not, such as its reasoning, and a template may
    # end every chat by words of its own. Nothing else may differ.
    asked = begin == len(before) or (
        number
        and begin >= common_prefix(before, text(messages[:number]))
        and all(words in after[begin:end] for words in _words(messages[number]))
    )
    ended = end == len(after) or text([ANY_CHAT]).endswith(after[end:])
    return (begin, end) if asked and ended and begin <= end else None


class Encoded(NamedTuple):
    """The tokens of a chat, and whether each is of the assistant's words, which the loss counts."""

    ids: list[int]
    counts: list[bool]


def _without_idle(encoded: Encoded, messages: Messages) -> Encoded | str:
    """A chat whose template marks each answer, without the targets in answers of weight 0; a text
    says why that is impossible."""
    answers = [message for message in messages if message["role"] == ASSISTANT]
    runs = [(counts, [*run]) for counts, run in groupby(encoded.counts)]
    if sum(counts for counts, _ in runs) != len(answers):
        return (
            f"a chat with a {WEIGHT} of 0 and answers that the template marks in other parts than "
            f"messages (leave {WEIGHT} out, or make the messages up to that answer the prompt)"
        )
    left = iter(answers)
    kept = (
        run if not counts or next(left).get(WEIGHT) != 0 else [False] * len(run)
        for counts, run in runs
    )
    return Encoded(encoded.ids, [*chain.from_iterable(kept)])


class ChatTemplate:
    """The chat templates of a Hugging Face folder, and its tokenizer."""

    def __init__(self, given: GivenTokenizer | None) -> None:
        """Raises ConfigError without a folder, and for one without a template."""
        if given is None:
            raise ConfigError(
                "--tokenizer: the input holds chats, whose words a template puts together; name a "
                "Hugging Face folder with a chat template"
            )
        self._folder, self._tokenizer = given.folder, given.loaded
        templates = getattr(given.loaded, "chat_template", None)
        if not templates:
            called = "" if (given.folder / TOKENIZER).is_file() else f", next to a {TOKENIZER}"
            raise ConfigError(
                f"--tokenizer: {given.folder} has no chat template, which chats need; name the "
                f"folder of a model for chats, or put its chat_template.jinja there{called}"
            )
        self._tokenizer.model_max_length = sys.maxsize  # Samples are cut later: no warning here.
        self.templates: str | dict[str, str] = templates
        """The template, or several by name."""
        told = json.dumps(templates, sort_keys=True).encode() + given.json
        self.digest = hashlib.blake2b(told, digest_size=16).hexdigest()

    def ends(self, chats: Iterable[Chat]) -> tuple[int, ...]:
        """The ids that end an answer: the folder's end of a text, and the special token that is the
        last target of the first chat that can be used, but for white space."""
        special = {id_ for id_, one in self._tokenizer.added_tokens_decoder.items() if one.special}
        found = [self._tokenizer.eos_token_id]
        for encoded in map(self.encode, chats):
            if isinstance(encoded, Encoded) and any(encoded.counts):
                targets = reversed([*compress(encoded.ids, encoded.counts)])
                words = (id_ for id_ in targets if self._tokenizer.decode([id_]).strip())
                found += {next(words, None)} & special
                break
        return tuple(dict.fromkeys(id_ for id_ in found if id_ is not None))

    def encode(self, chat: Chat) -> Encoded | str:
        """The tokens of a chat, or why it cannot be used.

        ConfigError if a template of the folder is no Jinja, or none of several is the default.
        """
        from jinja2 import TemplateSyntaxError  # of transformers' chats

        try:
            arguments = chat.arguments()
        except (ValueError, RecursionError) as reason:
            return f"{TOOLS} or {KWARGS} that cannot be read ({reason})"[:WHY]
        contents = [message.get("content") for message in chat.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        kinds = {str(part.get("type", "text")) for part in parts if isinstance(part, dict)}
        if others := sorted(kinds - {"text"}):
            return f"a chat with more than texts ({', '.join(others)[:WHY]})"
        taken = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        if settled := sorted(taken & arguments.keys() - {TOOLS, TEMPLATE, "documents", "kwargs"}):
            return (
                f"{KWARGS} that are no variables of a template ({', '.join(settled)}: the "
                "preparation sets what apply_chat_template does)"
            )
        named = arguments.get(TEMPLATE)
        asked = named if isinstance(named, str) else None
        try:
            template = self._tokenizer.get_chat_template(asked, arguments[TOOLS])
        except ValueError:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise ConfigError(
                f"--tokenizer: {self._folder} has the chat templates {names}, and no default; call "
                f"one of them default, or name one as {TEMPLATE} in {KWARGS} of each record"
            ) from None
        apply = partial(self._tokenizer.apply_chat_template, **arguments)
        weights = [message.get(WEIGHT) for message in chat.messages]
        if any(weight not in (None, 0, 1) for weight in weights):
            return f"a {WEIGHT} of a message that is neither 0 nor 1"
        try:
            encoded = self._encoded(chat, apply, template)
            if 0 not in weights or isinstance(encoded, str):
                return encoded
            if chat.prompt is None and MARKS.search(template):
                return _without_idle(encoded, chat.messages)
            idle = self._by_turns(chat.messages, partial(apply, tokenize=False), (0,), chat.prompt)
            if isinstance(idle, str):
                return idle
            pairs = zip(encoded.counts, idle.counts, strict=True)
            return Encoded(encoded.ids, [counts and not left for counts, left in pairs])
        except Exception as reason:  # Templates raise what they like about a chat, as do filters.
            if isinstance(reason, TemplateSyntaxError) and named is None:
                raise ConfigError(
                    f"--tokenizer: the chat template of {self._folder} is no Jinja (line "
                    f"{reason.lineno}: {one_line(reason)[:WHY]}); correct it"
                ) from None
            return f"a chat that the template fails on ({one_line(reason)[:WHY]})"

    def _encoded(self, chat: Chat, apply: Callable[..., Any], template: str) -> Encoded | str:
        """The chat, all words of the assistant in which are targets."""
        if lost := self._left_out(chat.messages, partial(apply, tokenize=False)):
            return lost
        if chat.prompt is not None:
            # A completion begins at the first token that differs from the prompt alone, as in
            # TRL. The words that ask for an answer belong to the prompt.
            before = apply(
                chat.messages[: chat.prompt], return_dict=True, add_generation_prompt=True
            )
            ids = apply(chat.messages, return_dict=True)["input_ids"]
            begin = common_prefix(before["input_ids"], ids)
            return Encoded(ids, [at >= begin for at in range(len(ids))])
        if MARKS.search(template):
            marked = apply(chat.messages, return_dict=True, return_assistant_tokens_mask=True)
            return Encoded(marked["input_ids"], [*map(bool, marked["assistant_masks"])])
        return self._by_turns(chat.messages, partial(apply, tokenize=False), (None, 0, 1))

    def _left_out(self, messages: Messages, text: Callable[..., str]) -> str | None:
        """Names a message that the template leaves out, as it may one of a role it does not know,
        or its calls: they change nothing."""
        whole = None
        for number, message in enumerate(messages, 1):
            content, role = message.get("content"), message.get("role")
            if calls := message.get(CALLS):
                other = {**message, CALLS: [*map(_renamed, calls)]}
            elif role in (USER, ASSISTANT) or not content or not isinstance(content, str):
                continue
            else:
                other = {**message, "content": f"x{content}"}
            whole = whole or text(messages)
            if text([*messages[: number - 1], other, *messages[number:]]) == whole:
                return f"a chat that the template shortens (message {number}, of role {role!r})"
        return None

    def _by_turns(
        self,
        messages: Messages,
        text: Callable[..., str],
        weights: Sequence[int | None],
        prompt: int | None = None,
    ) -> Encoded | str:
        """The chat with the tokens that each message of the assistant of these weights, behind a
        number of messages of a prompt, adds to the text before it, and to the words that ask for an
        answer, as targets; a text says why that is impossible."""
        whole, turns = text(messages), []
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]

        def shared(part: str) -> int:
            """Where the first token of `whole` begins that another text has not."""
            others = self._tokenizer(part, add_special_tokens=False)["input_ids"]
            same = common_prefix(others, ids)
            return places[same - 1][1] if same else 0

        for number, message in enumerate(messages):
            is_asked = message["role"] == ASSISTANT and number >= (prompt or 0)
            if not is_asked or message.get(WEIGHT) not in weights:
                continue
            why = "is another when others follow, or with the words that ask for it"
            try:
                turn = _turn(messages, number, whole, text, shared)
            except Exception as reason:  # The template renders the whole, and not a part of it.
                turn, why = None, f"fails without those after it: {one_line(reason)[:WHY]}"
            if turn is None:
                each = "answer" if number else "answer after it"  # a prompt has messages
                return (
                    f"a chat that the template rewrites (message {number + 1} {why}; make a record "
                    f"of each {each}, of the messages before it as prompt and [the answer] as "
                    "completion, or mark answers by {% generation %} in the template)"
                )
            turns.append(turn)
        counts = [any(at < end and to > begin for begin, end in turns) for at, to in places]
        return Encoded(ids, counts)
