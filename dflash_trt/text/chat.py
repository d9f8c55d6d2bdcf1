"""Chat templates, run as the untrusted code they are: sandboxed, in a process with limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.sandbox import Sandbox, SandboxLimits, SandboxLostError

MAX_RENDERED_CHARACTERS = 4 << 20
# JSON takes up to 12 bytes for a character.
LIMITS = SandboxLimits(10, 512 << 20, 12 * MAX_RENDERED_CHARACTERS + 1024)
_MOST_KEPT = 256

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

    Those with tools take the `tool_template`, where there is one; the only one may be that.
    jinja2's own sandbox does not keep one from looping or allocating without end, so it runs in a
    process with limits, which is kept until it ends. For one thread at a time.
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str],
        tool_template: str | None = None,
    ) -> None:
        self._template, self._tool_template = template, tool_template
        self._special_tokens = special_tokens
        self._lost: dict[tuple[str, ...], frozenset[int]] = {}
        """Places of messages that the template drops, by roles, names of variables and switches."""
        self._sandbox = Sandbox("template")

    def find(self, *, tools: bool) -> str:
        """The template of conversations with tools, or of others; empty without one."""
        return (self._tool_template if tools else None) or self._template or ""

    def knows(self, variable: str, *, tools: bool = False) -> bool:
        """Whether that template uses the variable, by its name; Jinja's own are none."""
        return (
            variable not in _TAKEN
            and re.search(rf"\b{re.escape(variable)}\b", self.find(tools=tools)) is not None
        )

    def render(
        self, conversation: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The conversation's text; `variables` are the template's, beside the usual ones.

        A `developer` message that the template drops or refuses becomes a `system` message.

        Raises:
            DflashError: the template fails, exceeds a limit, refuses the conversation, or drops
                a message of it.
        """
        told = [at for at, one in enumerate(conversation) if one["role"] == "developer"]
        try:
            text = self._render(conversation, variables)
            lost = self._find_lost(conversation, variables)
            told = [at for at in told if at in lost]
        except SandboxLostError:
            raise
        except DflashError:
            if not told:
                raise
        if told:
            conversation = [
                {**one, "role": "system"} if at in told else one
                for at, one in enumerate(conversation)
            ]
            return self.render(conversation, variables)
        for at in sorted(lost):
            what = f"drops message {at + 1}, of role {one_line(conversation[at]['role'], 40)!r}"
            fix = "leave that message out, or use a chat template that shows its role"
            raise DflashError(what, where="chat template", fix=fix)
        return text

    def _find_lost(
        self, conversation: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> frozenset[int]:
        """Places of the messages whose content the template does not show.

        A message that calls functions may lose its words: some templates show the calls alone.
        """
        shown = [at for at, one in enumerate(conversation) if not one.get("tool_calls")]
        calls = ["" if at in shown else "calls" for at in range(len(conversation))]
        roles = (one["role"] for one in conversation)
        # Switches decide what is shown; of other values, which may be anybody's, the names do.
        named = sorted(
            f"{name}={value}" if isinstance(value, bool) else name
            for name, value in (variables or {}).items()
        )
        key = (self._choose(variables), *map(":".join, zip(roles, calls, strict=True)), *named)
        if key not in self._lost:
            marks = {at: f"dflash{at}mark" for at in shown}
            marked = [
                {**one, "content": marks[at]} if at in marks else one
                for at, one in enumerate(conversation)
            ]
            if len(self._lost) >= _MOST_KEPT:
                self._lost.clear()
            try:
                text = self._render(marked, variables)
            except SandboxLostError:
                raise
            except DflashError:  # it looks into contents; what it made of the real ones stands
                text = "".join(marks.values())
            text = text.lower()  # a template may write contents in capitals
            self._lost[key] = frozenset(at for at, mark in marks.items() if mark not in text)
        return frozenset(at for at in self._lost[key] if conversation[at]["content"].strip())

    def _choose(self, variables: Mapping[str, Any] | None) -> str:
        template = self.find(tools=(variables or {}).get("tools") is not None)
        if template:
            return template
        what = "the tokenizer has a template of chats with tools, and none of others"
        raise DflashError(what, where="chat template", fix="offer tools")

    def _render(self, conversation: Sequence[Message], variables: Mapping[str, Any] | None) -> str:
        # Defined and empty, as transformers does it.
        usual = {"add_generation_prompt": True, "tools": None, "documents": None}
        given = {"messages": conversation, **usual, **self._special_tokens, **(variables or {})}
        job = {
            "template": self._choose(variables),
            "variables": given,
            "max_characters": MAX_RENDERED_CHARACTERS,
        }
        answer = self._sandbox.ask(job, LIMITS)
        if "text" not in answer:
            fix = "`generate --raw` sends the prompt without it"
            raise DflashError(one_line(answer.get("error")), where="chat template", fix=fix)
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """Ends the worker."""
        self._sandbox.close()


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
