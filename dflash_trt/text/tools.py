"""Functions that a chat may call: how its model is told of them, and in which form it calls them.

The form is the chat template's: what a model was trained on. A template that knows no tools is
given Hermes' form in words, in the first message; models may follow them or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import Tokenizer

from dflash_trt.text.chat import Message
from dflash_trt.text.tool_calls import HERMES, LLAMA_3, CallMarks, CallStream

ToolFamily = Literal["hermes", "llama3", "harmony"]
_MARKS: dict[ToolFamily, CallMarks] = {"hermes": HERMES, "llama3": LLAMA_3}
# Calls as XML between the same marks, of Qwen3-Coder and of GLM.
_OTHER_BODIES = ("<function=", "<arg_key>")
# Of Gemma 4, whose calls are no JSON.
_OTHER_MARKS = ("<|tool_call>",)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `parameters` is the schema of its arguments, an object.

    `strict` asks that arguments fit it wherever the model is free to call or not.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Of its arguments, an object always."""
        return {**self.parameters, "type": "object"}

    def describe(self) -> dict[str, Any]:
        """As templates take it."""
        told = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **told, "parameters": dict(self.parameters) or self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that an answer may call, at least one.

    Args:
        must: the answer is a call; of the function `only`, where it is given.
        parallel: it may be several.
    """

    tools: tuple[Tool, ...]
    must: bool = False
    only: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        return tuple(one for one in self.tools if self.only in (None, one.name))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model's calls look.

    Args:
        in_words: its chat template knows no tools.
        added: ids of the tokenizer's added tokens, which grammars call by their names.
    """

    family: ToolFamily
    in_words: bool
    added: Mapping[str, int]

    @staticmethod
    def find(template: str, tokenizer: Tokenizer, *, harmony: bool) -> ToolFormat | None:
        """None for calls in a form that is not known here."""
        added = {one.content: at for at, one in tokenizer.get_added_tokens_decoder().items()}
        knows = re.search(r"\btools\b", template) is not None
        if harmony:
            return ToolFormat("harmony", False, added) if knows else None
        if not knows:
            return ToolFormat("hermes", True, added)
        if HERMES.opening in template:
            is_json = not any(one in template for one in _OTHER_BODIES)
            return ToolFormat("hermes", False, added) if is_json else None
        if '"parameters":' in template and not any(one in template for one in _OTHER_MARKS):
            return ToolFormat("llama3", False, added)
        return None

    def open(self, use: ToolUse) -> CallStream | None:
        """What reads one answer's text; None where its channels tell calls apart."""
        marks = _MARKS.get(self.family)
        return None if marks is None else CallStream(marks, [one.name for one in use.callable])

    def hidden_marks(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of marks that are special tokens, which have no text by themselves."""
        marks = _MARKS.get(self.family)
        texts = () if marks is None else (marks.opening, marks.closing)
        added = tokenizer.get_added_tokens_decoder()
        return frozenset(at for at, one in added.items() if one.special and one.content in texts)

    def prepare(
        self, messages: Sequence[Message], use: ToolUse | None
    ) -> tuple[tuple[Message, ...], list[dict[str, Any]] | None]:
        """The messages and the tools that the template gets."""
        if not self.in_words:
            tools = None if use is None else [one.describe() for one in use.tools]
            return tuple(messages), tools
        told = [_in_words(one) for one in messages]
        if use is not None:
            told[0] = {**told[0], "content": f"{_explain(use)}\n\n{told[0]['content']}"}
        return tuple(told), None


def _explain(use: ToolUse) -> str:
    lines = [json.dumps(one.describe()["function"], ensure_ascii=False) for one in use.tools]
    listed = "\n".join(lines)
    return (
        f"These functions can be called; each line describes one:\n{listed}\n"
        f'To call one, write {HERMES.opening}\n{{"name": NAME, "arguments": {{…}}}}\n'
        f"{HERMES.closing}\nand nothing else. The result comes in the next message."
    )


def _in_words(message: Message) -> Message:
    if message["role"] == "tool":
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    if "tool_calls" not in message:
        return message
    calls = (one["function"] for one in message["tool_calls"])
    texts = [
        f"{HERMES.opening}\n{json.dumps(one, ensure_ascii=False)}\n{HERMES.closing}"
        for one in calls
    ]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {"role": message["role"], "content": content}
