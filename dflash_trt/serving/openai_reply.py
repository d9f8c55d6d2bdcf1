"""Replies to OpenAI's completion requests: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from dflash_trt.errors import DflashError
from dflash_trt.runtime import RequestResult, RequestStatistics
from dflash_trt.serving.openai_errors import as_api_error

Kind = Literal["completion", "chat"]
DONE = b"data: [DONE]\n\n"


class ReplyWriter:
    """One request's replies; all of them carry the same id.

    Args:
        kind: of the request.
        model: the name to answer under.
        include_usage: a stream's last chunk has the token counts, the others say null.
    """

    def __init__(self, kind: Kind, model: str, *, include_usage: bool = False) -> None:
        self._chat = kind == "chat"
        self._include_usage = include_usage
        prefix, name = (
            ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        )
        self._object = name
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, result: RequestResult) -> dict[str, Any]:
        """The reply to a request that does not stream."""
        text = result.text or ""
        shown: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._chat
            else {"text": text}
        )
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": result.finish_reason}
        return {
            **self._head,
            "object": self._object,
            "choices": [choice],
            "usage": describe_usage(result.statistics),
        }

    def opening(self) -> bytes:
        """What a chat's stream begins with: who speaks. Nothing for a completion."""
        return self._chunk({"role": "assistant", "content": ""}) if self._chat else b""

    def piece(self, text: str) -> bytes:
        """A chunk with more text."""
        return self._chunk({"content": text})

    def ending(self, result: RequestResult) -> bytes:
        """The last chunks of a stream."""
        last = self._chunk({}, result.finish_reason)
        if self._include_usage:
            last += self._event([], describe_usage(result.statistics))
        return last + DONE

    def _chunk(self, delta: Mapping[str, str], reason: str | None = None) -> bytes:
        shown = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": reason}
        return self._event([choice], None)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else self._object,
            "choices": choices,
        }
        if self._include_usage:
            body["usage"] = usage
        return to_event(body)


def describe_usage(statistics: RequestStatistics) -> dict[str, Any]:
    """Token counts. Drafts go under the names that OpenAI has for predicted output."""
    return {
        "prompt_tokens": statistics.prompt_tokens,
        "completion_tokens": statistics.output_tokens,
        "total_tokens": statistics.prompt_tokens + statistics.output_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": statistics.accepted_tokens,
            "rejected_prediction_tokens": statistics.drafted_tokens - statistics.accepted_tokens,
        },
    }


def to_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    # ASCII: some readers of event streams take U+2028 for the end of a line.
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: DflashError) -> bytes:
    """An error after the status line has gone: the stream ends with it, without [DONE]."""
    return to_event(as_api_error(error).to_json())
