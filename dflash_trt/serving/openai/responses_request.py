"""Bodies of OpenAI's /v1/responses, read as the chats that they ask for; nothing is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from dflash_trt.bundle.sampling_defaults import SamplingDefaults
from dflash_trt.core.strict_json import quoted
from dflash_trt.serving.openai.body import AnyText, Body, Count, read_body
from dflash_trt.serving.openai.chat_request import CompletionRequest, read_chat
from dflash_trt.serving.openai.errors import ApiError

# Read as a chat's of the same name.
_AS_IN_CHATS = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "service_tier"),
    *("user", "metadata", "safety_identifier", "prompt_cache_key"),
    # Additions that no client of OpenAI's sends by itself.
    *("seed", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "chat_template_kwargs"),
    "speculate",
)
_OF_A_STORE = ("previous_response_id", "conversation", "background", "store", "prompt")
_LOGPROBS = "message.output_text.logprobs"
# What a chat calls otherwise.
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


class _TextBody(Body):
    format: dict[str, Any] = Field(default={"type": "text"})
    verbosity: Literal["medium"] = "medium"


class _ReasoningBody(Body):
    effort: Any = None
    # What fits best, which here is the reasoning itself.
    summary: Literal["auto"] = "auto"
    generate_summary: Literal["auto"] = "auto"


class _StreamBody(Body):
    include_obfuscation: Any = None


class _ResponseBody(Body):
    """Fields that a chat has not, or under another name; what they hold is checked as a chat's."""

    input: str | list[dict[str, Any]]
    instructions: AnyText | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Any = "auto"
    text: _TextBody = _TextBody()
    reasoning: _ReasoningBody = _ReasoningBody()
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field(
        []
    )
    max_output_tokens: Count | None = None
    top_logprobs: Any = 0
    truncation: Literal["disabled"] = "disabled"
    stream_options: _StreamBody | None = None
    # They are of hosted tools and of prices.
    max_tool_calls: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A request as the chat that it is, and what its response repeats of it."""

    chat: CompletionRequest
    about: dict[str, Any]


def read_response(raw: Any, defaults: SamplingDefaults | None = None) -> ResponseRequest:
    """Reads the body of POST /v1/responses.

    Raises:
        ApiError: as a chat's, by the names that fields have here; for what would need a store.
    """
    given = raw if isinstance(raw, dict) else {}
    for name in _OF_A_STORE:
        if given.get(name):
            what = "nothing is stored here: send all items as input, with store: false"
            raise ApiError(what, param=name)
    shared = {name: given[name] for name in _AS_IN_CHATS if name in given}
    own = {name: one for name, one in given.items() if name not in (*shared, *_OF_A_STORE)}
    body = read_body(_ResponseBody, own if isinstance(raw, dict) else raw)
    messages = _Messages()
    if body.instructions:
        messages.add("instructions", role="system", content=body.instructions)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for place, item in enumerate(items):
        where = "input" if isinstance(body.input, str) else f"input[{place}]"
        messages.take(where, item)
    asked = {
        **shared,
        "messages": messages.read,
        "tools": [_nest(one, "function") for one in body.tools],
        "tool_choice": _nest(body.tool_choice, "function"),
        "response_format": _nest(body.text.format, "json_schema"),
        "reasoning_effort": body.reasoning.effort,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": _LOGPROBS in body.include or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
    }
    try:
        chat = read_chat(asked, defaults)
    except ApiError as error:
        raise rename(error, messages.places) from error
    chat = replace(chat, warnings=tuple(map(_name_here, chat.warnings)))
    return ResponseRequest(chat=chat, about=_repeat(body, chat, given))


def rename(error: ApiError, places: Mapping[str, str] = MappingProxyType({})) -> ApiError:
    """A chat's error by the names that a response's request has; `places` are of its messages."""
    param = None if error.param is None else _name_here(error.param, places)
    return ApiError(error.what, status=error.status, param=param, code=error.code)


def _name_here(text: str, places: Mapping[str, str] = MappingProxyType({})) -> str:
    """A text that begins with a chat's parameter, with the name that it has here."""
    known = {**_NAMES, **places}
    if found := [old for old in known if re.match(rf"{re.escape(old)}([.\[:]|$)", text)]:
        old = max(found, key=len)
        return known[old] + text.removeprefix(old)
    return text.replace(".function", "", 1) if text.startswith("tools[") else text


@dataclass(slots=True)
class _Messages:
    """A chat's messages, of items one after the other.

    Calls, and text after them, belong to the assistant's message before them. `places` has from
    where each message, or a part of one, has come.
    """

    read: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, where: str, role: Any, content: Any, **more: Any) -> None:
        self.read.append({"role": role, "content": content, **more})
        self.places[f"messages[{len(self.read) - 1}]"] = where

    def take(self, where: str, item: Mapping[str, Any]) -> None:
        """Goes on with an item; what it says of itself (its id, its status) is left out."""
        last: dict[str, Any] = self.read[-1] if self.read else {}
        match item.get("type") or "message":
            case "message":
                role, content = item.get("role"), item.get("content")
                if role == last.get("role") == "assistant" and "tool_calls" in last:
                    last["content"] = [*_parts(last["content"]), *_parts(content)]
                else:
                    self.add(where, role, content)
            case "function_call":
                if last.get("role") != "assistant":
                    self.add(where, "assistant", "")
                self._call(where, item)
            case "function_call_output":
                at = f"messages[{len(self.read)}]"
                self.add(where, "tool", item.get("output"), tool_call_id=item.get("call_id"))
                self.places |= {
                    f"{at}.content": f"{where}.output",
                    f"{at}.tool_call_id": f"{where}.call_id",
                }
            case "reasoning":
                pass  # a conversation goes on from answers, not from what led to them
            case "item_reference":
                what = "nothing is stored here: send the item itself (clients': store: false)"
                raise ApiError(what, param=where)
            case kind:
                what = "must be message, function_call, function_call_output or reasoning"
                raise ApiError(f"{what}, not {quoted(kind)}", param=f"{where}.type")

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        calls = self.read[-1].setdefault("tool_calls", [])
        at = f"messages[{len(self.read) - 1}].tool_calls[{len(calls)}]"
        self.places |= {at: where, f"{at}.function": where, f"{at}.id": f"{where}.call_id"}
        function = {name: item.get(name) for name in ("name", "arguments")}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _nest(flat: Any, name: str) -> Any:
    """A tool, a choice or a format as chats have it: what it is beside its type lies in `name`."""
    if not isinstance(flat, dict) or flat.get("type") != name:
        return flat
    inner = {key: one for key, one in flat.items() if key != "type"}
    return {"type": name, name: inner}


def _repeat(body: _ResponseBody, chat: CompletionRequest, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a response says of its request."""
    asked = chat.generation.sampling
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": raw.get("metadata") or {},
        "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": asked.temperature,
        "text": {"format": body.text.format, "verbosity": body.text.verbosity},
        "tool_choice": body.tool_choice,
        "tools": [{"parameters": {}, "strict": False, **one} for one in body.tools],
        "top_logprobs": chat.generation.logprobs or 0,
        "top_p": asked.top_p,
        "truncation": body.truncation,
    }
