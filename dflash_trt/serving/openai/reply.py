"""Replies to OpenAI's completion requests: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.runtime import RequestResult, RequestStatistics, TokenLogprob
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.errors import as_api_error
from dflash_trt.serving.openai.logprobs import LogprobsWriter
from dflash_trt.serving.openai.request import CompletionRequest
from dflash_trt.text.harmony import HarmonyPiece, HarmonyStream
from dflash_trt.text.token_bytes import TokenBytes


class ReplyWriter:
    """A request's replies; all of them carry the same id.

    `channels` tells a chat's answer from its reasoning, where the model has channels; `tokens` has
    the bytes of log-probabilities' tokens.
    """

    def __init__(
        self, asked: CompletionRequest, channels: HarmonyStream | None, tokens: TokenBytes
    ) -> None:
        self._logprobs: LogprobsWriter | None = None
        self._untold: list[TokenLogprob] = []
        if (top := asked.generation.logprobs) is not None:
            self._logprobs = LogprobsWriter(tokens, chat=asked.is_chat, top=top)
        self._chat = asked.is_chat
        self._channels = channels
        self._include_usage = asked.include_usage
        prefix, self._object = (
            ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        )
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, result: RequestResult) -> dict[str, Any]:
        """The reply to a request that does not stream."""
        shown: dict[str, Any] = (
            {"message": {"role": "assistant", **self._message(result), "refusal": None}}
            if self._chat
            else {"text": result.text or ""}
        )
        self._untold += result.logprobs or ()
        choice = self._choice(shown, result.finish_reason)
        return {
            **self._head,
            "object": self._object,
            "choices": [choice],
            "usage": _describe_usage(result.statistics),
        }

    def opening(self) -> bytes:
        """What a chat's stream begins with: who speaks. Nothing for a completion."""
        return self._chunk({"role": "assistant", "content": ""}) if self._chat else b""

    def piece(self, delta: TextDelta) -> bytes:
        """The chunks of a delta; none while there is nothing to show yet."""
        self._untold += delta.logprobs
        if self._channels is not None and delta.token_ids:
            chunks = self._chunks(self._channels.push(delta.token_ids))
        else:
            chunks = self._chunks(HarmonyPiece(content=delta.text))
        return chunks if delta.result is None else chunks + self._end(delta.result)

    def _end(self, result: RequestResult) -> bytes:
        last = b"" if self._channels is None else self._chunks(self._channels.flush())
        last += self._chunk({}, result.finish_reason)
        if self._include_usage:
            last += self._event([], _describe_usage(result.statistics))
        return last + b"data: [DONE]\n\n"

    def _message(self, result: RequestResult) -> dict[str, Any]:
        if self._channels is None:
            return {"content": result.text or ""}
        if not result.token_ids:  # a server that sends none
            return {"content": result.text or "", "reasoning_content": None}
        whole = self._channels.push(result.token_ids) + self._channels.flush()
        return {"content": whole.content, "reasoning_content": whole.reasoning or None}

    def _chunks(self, piece: HarmonyPiece) -> bytes:
        chunks = b""
        if piece.reasoning:
            chunks += self._chunk({"reasoning_content": piece.reasoning})
        if piece.content:
            chunks += self._chunk({"content": piece.content})
        return chunks

    def _chunk(self, delta: Mapping[str, str], reason: str | None = None) -> bytes:
        shown = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return self._event([self._choice(shown, reason)], None)

    def _choice(self, shown: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        """With the log-probabilities that no chunk has had yet."""
        logprobs = None
        if self._logprobs is not None and (self._untold or reason is not None):
            logprobs, self._untold = self._logprobs.write(self._untold), []
        return {"index": 0, **shown, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else self._object,
            "choices": choices,
        }
        if self._include_usage:
            body["usage"] = usage
        return _to_event(body)


def _describe_usage(statistics: RequestStatistics) -> dict[str, Any]:
    """Token counts. Drafts go under the names that OpenAI has for predicted output.

    What came of the prompt from a prefix cache is said where there is one.
    """
    cached = statistics.cached_prompt_tokens
    return {
        "prompt_tokens": statistics.prompt_tokens,
        "completion_tokens": statistics.output_tokens,
        "total_tokens": statistics.prompt_tokens + statistics.output_tokens,
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
        "completion_tokens_details": {
            "accepted_prediction_tokens": statistics.accepted_tokens,
            "rejected_prediction_tokens": statistics.drafted_tokens - statistics.accepted_tokens,
            "num_verify_steps": statistics.steps,
        },
    }


def _to_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    # ASCII: some readers of event streams take U+2028 for the end of a line.
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: DflashError) -> bytes:
    """An error after the status line has gone: the stream ends with it, without [DONE]."""
    return _to_event(as_api_error(error).to_json())
