"""Chats as token ids, by the template of a tokenizer, and which of them the assistant says.

The template is rendered by transformers, an optional dependency, in a sandbox of Jinja.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axsparse.runtime.errors import ConfigError

MARKS = re.compile(r"\{%-?\s*generation\b")
"""Begins, in a template, what the assistant says."""
ASSISTANT = "assistant"

Messages = Sequence[dict[str, Any]]


class Encoded(NamedTuple):
    """The tokens of a chat."""

    ids: list[int]
    counts: list[bool]
    """Whether a token belongs to what the assistant says, so that the loss counts it."""


class ChatTemplate:
    """The chat template of a Hugging Face folder, and its tokenizer."""

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
            # Nothing in the folder is executed: this class reads JSON and the template.
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        except Exception as reason:
            raise ConfigError(
                f"--tokenizer: {folder} has no tokenizer that transformers reads "
                f"({' '.join(str(reason).split())}); name a folder that save_pretrained wrote"
            ) from None
        self._tokenizer.model_max_length = sys.maxsize  # Samples are cut later: no warning here.
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ConfigError(
                f"--tokenizer: {folder} has no chat template, which chats need; name the folder of "
                "a model for chats, or put its chat_template.jinja there"
            )
        self._is_marked = MARKS.search(template) is not None
        self.digest = hashlib.blake2b(template.encode(), digest_size=16).hexdigest()

    def encode(self, messages: Messages) -> Encoded | None:
        """The tokens of a chat; None if the template refuses it, or if it has no marks and writes
        earlier messages otherwise once later ones follow."""
        try:
            return self._by_marks(messages) if self._is_marked else self._by_turns(messages)
        except Exception:  # Templates raise what they like about a chat, as do their filters.
            return None

    def _by_marks(self, messages: Messages) -> Encoded:
        """What stands between `{% generation %}` and `{% endgeneration %}` counts."""
        encoded = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Encoded(encoded["input_ids"], [*map(bool, encoded["assistant_masks"])])

    def _by_turns(self, messages: Messages) -> Encoded | None:
        """What a message of the assistant adds to the text before it, with the words that ask for
        an answer, counts."""
        whole, turns = self._text(messages), []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._text(messages[:number], add_generation_prompt=True)
                after = self._text(messages[: number + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    return None
                turns.append((len(before), len(after)))
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            any(begin < last and end > first for first, last in turns)
            for begin, end in encoded["offset_mapping"]
        ]
        return Encoded(encoded["input_ids"], counts)

    def _text(self, messages: Messages, **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
