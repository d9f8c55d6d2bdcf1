"""Replies of OpenAI's /v1/responses: what a chat's chunks say, as items and their events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash_trt.decoding import RequestResult
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.errors import as_api_error
from dflash_trt.serving.openai.large import WHOLE, Written, is_large, write_json
from dflash_trt.serving.openai.reply import ReplyWriter

Event = tuple[str, dict[str, Any]]
# Of a kind of items: what ids begin with, what its events are called, and what it begins as.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("msg", "output_text", {"role": "assistant", "content": []}),
    "reasoning": ("rs", "reasoning_text", {"summary": [], "content": []}),
    "function_call": ("fc", "function_call_arguments", {"arguments": ""}),
}


class ResponseWriter(ReplyWriter):
    """A response, whole or as its events; `about` is what it repeats of its request.

    An item ends where one of another kind, or another call, begins.
    """

    def __init__(self, about: Mapping[str, Any], *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._response: dict[str, Any] = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress",
            "model": self._head["model"],
            **about,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        self._output: list[dict[str, Any]] = self._response["output"]
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._untold: list[Any] = []
        self._number = 0

    def choice(self, index: int, result: RequestResult) -> Iterator[bytes]:
        """Yields the response to a request that does not stream."""
        delta = TextDelta(
            text=result.text or "",
            token_ids=result.token_ids,
            logprobs=result.logprobs or (),
            result=result,
        )
        for _ in self._advance(delta):
            pass
        yield from write_json(self._response, WHOLE)

    def whole(self, choices: Sequence[Written]) -> Iterator[bytes]:
        """Yields it, which is its only choice's."""
        yield from choices[0].pieces

    def opening(self) -> bytes:
        """What a stream begins with."""
        kinds = ("created", "in_progress")
        told = ((f"response.{one}", {"response": self._response}) for one in kinds)
        return b"".join(self._write(told))

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """Yields the events of a delta; none while there is nothing to show yet."""
        self._is_large = is_large(delta)
        yield from self._write(self._advance(delta))

    def fail(self, error: DflashError) -> bytes:
        """What a stream ends with after an error."""
        told = as_api_error(error)
        code = "server_error" if told.status >= 500 else "invalid_prompt"  # of OpenAI's list
        self._response |= {"status": "failed", "error": {"code": code, "message": told.message}}
        return b"".join(self._write([("response.failed", {"response": self._response})]))

    def _write(self, events: Iterable[Event]) -> Iterator[bytes]:
        for kind, fields in events:
            body = {"type": kind, "sequence_number": self._number, **fields}
            yield b"event: " + kind.encode() + b"\n"
            yield from self._to_event(body)
            self._number += 1

    def _advance(self, delta: TextDelta) -> Iterator[Event]:
        reason = None
        for chunk in self._choices[0].continue_by(delta):
            reason, said = chunk["finish_reason"], chunk["delta"]
            self._untold += (chunk["logprobs"] or {}).get("content", ())
            for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
                if name in said:
                    yield from self._say(kind, said[name])
            for call in said.get("tool_calls", ()):
                function = call["function"]
                if "id" in call:
                    named = {"call_id": call["id"], "name": function["name"]}
                    yield from self._open("function_call", **named)
                yield from self._say("function_call", function["arguments"])
        if delta.result is None:
            return
        is_cut = reason == "length"
        kinds = {one["type"] for one in (*self._output, self._item) if one}
        if not is_cut and kinds <= {"reasoning"}:  # what has ended has an answer, be it empty
            yield from self._open("message")
        if self._item.get("type") == "message":
            self._logprobs += self._untold
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        self._take(0, delta.result.statistics)
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _rename_usage(self._describe_usage()),
            **self._warnings,
        }
        yield f"response.{status}", {"response": self._response}

    def _open(self, kind: str, **named: str) -> Iterator[Event]:
        """Begins an item, after the end of the one before."""
        yield from self._close()
        prefix, _, begun = _KINDS[kind]
        self._texts, self._logprobs = [], []
        self._item = {"type": kind, "id": _new_id(prefix), "status": "in_progress", **begun}
        self._item |= named
        yield "response.output_item.added", {**self._place(), "item": self._item}
        if kind != "function_call":
            yield "response.content_part.added", {**self._place_text(), "part": self._part("")}

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        """Text that an item goes on with, or begins with."""
        if self._item.get("type") != kind:
            yield from self._open(kind)
        told, self._untold = self._untold, []
        if text:
            self._texts.append(text)
            self._logprobs += told
            shown = {"logprobs": told} if kind == "message" else {}
            yield (
                f"response.{_KINDS[kind][1]}.delta",
                {**self._place_text(), "delta": text, **shown},
            )

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the item, if there is one."""
        if not (item := self._item):
            return
        text, is_call = "".join(self._texts), item["type"] == "function_call"
        said = {"arguments": text, "name": item["name"]} if is_call else {"text": text}
        shown = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        yield f"response.{_KINDS[item['type']][1]}.done", {**self._place_text(), **said, **shown}
        if is_call:
            item["arguments"] = text
        else:
            item["content"] = [self._part(text)]
            yield "response.content_part.done", {**self._place_text(), "part": item["content"][0]}
        item["status"] = status
        yield "response.output_item.done", {**self._place(), "item": item}
        self._output.append(item)
        self._item = {}

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    def _place_text(self) -> dict[str, Any]:
        at = {} if self._item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": self._item["id"], **self._place(), **at}

    def _part(self, text: str) -> dict[str, Any]:
        part = {"type": _KINDS[self._item["type"]][1], "text": text}
        more = {"annotations": [], "logprobs": self._logprobs}
        return part | (more if self._item["type"] == "message" else {})


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def _rename_usage(chats: Mapping[str, Any]) -> dict[str, Any]:
    cached = chats.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": chats["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chats["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **chats["completion_tokens_details"]},
        "total_tokens": chats["total_tokens"],
    }
