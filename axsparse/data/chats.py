"""Chats as token ids, by the template of a tokenizer, and which of them the assistant says.

The template is rendered by transformers, an optional dependency, in a sandbox of Jinja.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axsparse.runtime.errors import ConfigError

MARKS = re.compile(r"\{%-?\s*generation\b")
"""Begins, in a template, what the assistant says."""
ASSISTANT = "assistant"
TOOLS, KWARGS = "tools", "chat_template_kwargs"
"""Columns beside the messages, which `apply_chat_template` gets."""
WHY = 200
"""Letters of why a template refuses a chat that are told."""

Messages = Sequence[dict[str, Any]]


class Chat(NamedTuple):
    """The messages of a chat, and its other arguments of `apply_chat_template`."""

    messages: list[dict[str, Any]]
    tools: Any = None
    """A list of schemas, or its JSON."""
    kwargs: Any = None
    """Variables of the template, by name, or their JSON."""

    def arguments(self) -> dict[str, Any]:
        """The arguments beside the messages; ValueError if they are none."""
        tools, kwargs = (
            json.loads(given) if isinstance(given, str | bytes) else given
            for given in (self.tools, self.kwargs)
        )
        if not isinstance(tools, list | None) or not isinstance(kwargs, dict | None):
            raise ValueError(f"{TOOLS} are a list, {KWARGS} a mapping")
        return {**(kwargs or {}), **({TOOLS: tools} if tools else {})}


class Encoded(NamedTuple):
    """The tokens of a chat."""

    ids: list[int]
    counts: list[bool]
    """Whether a token belongs to what the assistant says, so that the loss counts it."""


class ChatTemplate:
    """The chat templates of a Hugging Face folder, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without transformers, and for a folder without a template."""
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise ConfigError(
                "chats need transformers, which is not installed; pip install 'axsparse[hf]', with "
                "Python 3.11 or newer"
            ) from None
        try:
            # Nothing in the folder is executed: this class reads JSON and the templates.
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception as reason:
            raise ConfigError(
                f"--tokenizer: {folder} has no tokenizer that transformers reads "
                f"({' '.join(str(reason).split())}); name a folder that save_pretrained wrote"
            ) from None
        self._tokenizer.model_max_length = sys.maxsize  # Samples are cut later: no warning here.
        templates = self._tokenizer.chat_template
        if not templates:
            raise ConfigError(
                f"--tokenizer: {folder} has no chat template, which chats need; name the folder of "
                "a model for chats, or put its chat_template.jinja there"
            )
        told = templates if isinstance(templates, str) else json.dumps(templates, sort_keys=True)
        self.digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def encode(self, chat: Chat) -> Encoded | str:
        """The tokens of a chat; why not, if the template refuses it, or has no marks and writes
        earlier messages otherwise once later ones follow."""
        try:
            arguments = chat.arguments()
            # Of several templates that is one for tools, or the default.
            template = self._tokenizer.get_chat_template(None, arguments.get(TOOLS))
            if MARKS.search(template):
                return self._by_marks(chat.messages, arguments)
            return self._by_turns(chat.messages, arguments)
        except Exception as reason:  # Templates raise what they like about a chat, as do filters.
            return f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:WHY]

    def _by_marks(self, messages: Messages, arguments: dict[str, Any]) -> Encoded:
        """What stands between `{% generation %}` and `{% endgeneration %}` counts."""
        encoded = self._tokenizer.apply_chat_template(
            messages, **arguments, return_dict=True, return_assistant_tokens_mask=True
        )
        return Encoded(encoded["input_ids"], [*map(bool, encoded["assistant_masks"])])

    def _by_turns(self, messages: Messages, arguments: dict[str, Any]) -> Encoded | str:
        """What a message of the assistant adds to the text before it, with the words that ask for
        an answer, counts."""

        def text(messages: Messages, *, asks: bool = False) -> str:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, **arguments, tokenize=False, add_generation_prompt=asks
            )
            return rendered

        whole, turns = text(messages), []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = text(messages[:number], asks=True)
                after = text(messages[: number + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    return (
                        f"it writes message {number + 1} otherwise when others follow, or with the "
                        "words that ask for it, and marks no answers by {% generation %}"
                    )
                turns.append((len(before), len(after)))
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            any(begin < last and end > first for first, last in turns)
            for begin, end in encoded["offset_mapping"]
        ]
        return Encoded(encoded["input_ids"], counts)
