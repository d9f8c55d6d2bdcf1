"""Chat templates, run as the untrusted code they are: sandboxed, in a process with limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.foreign import ForeignLimits, ForeignProcess

MAX_RENDERED_CHARACTERS = 4 << 20
MAX_WORKER_BYTES = 512 << 20
MAX_WORKER_SECONDS = 10

Message = Mapping[str, Any]
"""`role` and `content`, both texts; with calls of functions, or what came of one, in the form that
transformers gives to templates."""

_TAKEN = frozenset(
    "messages raise_exception strftime_now namespace range dict cycler joiner lipsum loop self "
    "super caller varargs kwargs if elif else endif for in endfor set endset macro endmacro call "
    "endcall filter endfilter block endblock is not and or true false none True False None".split()
)
"""Names that Jinja, or whoever renders, gives a meaning of their own."""


class ChatRenderer:
    """Renders conversations (messages of role and content) with a Jinja template.

    jinja2's sandbox does not keep a template from looping or allocating without end, so it runs in
    a worker with limits, which is kept until it ends. For one thread at a time.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        self.template = template
        self._special_tokens = special_tokens
        self._process = ForeignProcess("chat_worker.py")

    def knows(self, variable: str) -> bool:
        """Whether the template uses the variable, by its name; Jinja's own are none."""
        return (
            variable not in _TAKEN
            and re.search(rf"\b{re.escape(variable)}\b", self.template) is not None
        )

    def render(
        self, conversation: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation's text; `variables` are the template's, beside the usual ones.

        Raises:
            DflashError: the template fails, exceeds a limit, or refuses the conversation.
        """
        # Defined and empty, as transformers does it.
        usual = {"add_generation_prompt": True, "tools": None, "documents": None}
        job = {
            "template": self.template,
            "variables": {
                "messages": conversation,
                **usual,
                **self._special_tokens,
                **(variables or {}),
            },
            "max_characters": MAX_RENDERED_CHARACTERS,
        }
        # JSON takes up to 12 bytes for a character.
        most = 12 * MAX_RENDERED_CHARACTERS + 1024
        answer = self._process.ask(job, ForeignLimits(MAX_WORKER_SECONDS, MAX_WORKER_BYTES, most))
        if "text" not in answer:
            raise DflashError(
                one_line(answer.get("error")),
                where="chat template",
                fix="--raw sends the prompt without it",
            )
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Ends the worker."""
        self._process.close()


def as_messages(prompt: Any) -> list[Message] | None:
    """The messages of a prompt, which is a conversation or token ids; None for ids.

    Raises:
        DflashError: it is neither, or a message lacks its role or its content (usage).
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        shown = one_line(repr(prompt), 40)
        what = f"{shown} is neither a text, nor token ids, nor messages"
        raise DflashError(what, where="prompt", usage=True)
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if not any(isinstance(item, Mapping | str) for item in prompt):
        return None
    if len(messages) < len(prompt) or not all(map(_is_message, messages)):
        what = 'messages must have a "role" and a "content" each, both texts'
        raise DflashError(what, where="prompt", usage=True)
    return messages


def _is_message(item: Message) -> bool:
    return isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
