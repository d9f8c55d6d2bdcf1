"""Replies to OpenAI's completion requests: whole, or as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dflash_trt.decoding import RequestResult, RequestStatistics, TokenLogprob
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.answer_reader import AnswerReader
from dflash_trt.serving.openai.chat_request import CompletionRequest
from dflash_trt.serving.openai.errors import as_api_error
from dflash_trt.serving.openai.logprobs import LogprobsWriter, describe_prompt
from dflash_trt.text.detokenise import AnswerPiece, CallPiece
from dflash_trt.text.tokenizer import TokenBytes


class ReplyWriter:
    """A request's replies; all of them carry the same id.

    `tokens` has the bytes of log-probabilities' tokens.

    Args:
        readers: of each choice, what tells its content from its reasoning and its calls.
        reasons: replies say what the reasoning was.
        leads: of each choice, the text that it begins with: the prompt, where it is echoed.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        readers: Sequence[AnswerReader],
        leads: Sequence[str],
        tokens: TokenBytes,
        *,
        reasons: bool,
    ) -> None:
        self._chat, self._samples = asked.is_chat, asked.samples
        self._include_usage = asked.include_usage
        self._choices = [
            _Choice(index, asked, reader, lead, tokens, reasons=reasons)
            for index, (reader, lead) in enumerate(zip(readers, leads, strict=True))
        ]
        self._results: dict[int, RequestResult] = {}
        prefix, self._object = (
            ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        )
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.model,
        }

    def whole(self, results: Sequence[RequestResult]) -> dict[str, Any]:
        """The reply to a request that does not stream, of each choice's result."""
        pairs = zip(self._choices, results, strict=True)
        return {
            **self._head,
            "object": self._object,
            **self._choices[0].of_prompt(results[0].prompt_logprobs, chat=True),
            "choices": [choice.whole(result) for choice, result in pairs],
            "usage": _describe_usage([one.statistics for one in results], self._samples),
        }

    def opening(self) -> bytes:
        """What a stream begins with: who speaks in a chat, an echo without log-probabilities."""
        return b"".join(self._event(one, None) for choice in self._choices for one in choice.open())

    def piece(self, index: int, delta: TextDelta) -> bytes:
        """The chunks of a choice's delta; none while there is nothing to show yet."""
        choice = self._choices[index]
        chunks = b"".join(self._event(one, None) for one in choice.continue_by(delta))
        if shown := choice.of_prompt(delta.prompt_logprobs, chat=True):
            chunks = self._event(choice.chunk({}), None, shown) + chunks
        if delta.result is None:
            return chunks
        self._results[index] = delta.result
        if len(self._results) < len(self._choices):
            return chunks
        if self._include_usage:
            each = [self._results[place].statistics for place in range(len(self._choices))]
            chunks += self._event(None, _describe_usage(each, self._samples))
        return chunks + b"data: [DONE]\n\n"

    def _event(
        self,
        choice: dict[str, Any] | None,
        usage: dict[str, Any] | None,
        shown: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        body: dict[str, Any] = {
            **self._head,
            **shown,
            "object": "chat.completion.chunk" if self._chat else self._object,
            "choices": [] if choice is None else [choice],
        }
        if self._include_usage:
            body["usage"] = usage
        return _to_event(body)


class _Choice:
    """One of a reply's choices: whole, or piece by piece."""

    def __init__(
        self,
        index: int,
        asked: CompletionRequest,
        reader: AnswerReader,
        lead: str,
        tokens: TokenBytes,
        *,
        reasons: bool,
    ) -> None:
        self._index, self._chat, self._reader, self._lead = index, asked.is_chat, reader, lead
        self._reasons, self._has_called = reasons, False
        self._logprobs: LogprobsWriter | None = None
        self._tokens, self._prompt_top = tokens, asked.prompt_logprobs
        self._echoes = asked.echo
        # A completion's begins when its prompt's log-probabilities are there.
        self._waits = not self._chat and asked.generation.prompt_logprobs is not None
        self._untold: list[TokenLogprob] = []
        if (top := asked.generation.logprobs) is not None:
            self._logprobs = LogprobsWriter(tokens, chat=self._chat, top=top)

    def whole(self, result: RequestResult) -> dict[str, Any]:
        """The choice of a reply that does not stream."""
        shown: dict[str, Any] = (
            {"message": {"role": "assistant", **self._message(result), "refusal": None}}
            if self._chat
            else {
                "text": self._lead + (result.text or ""),
                **self._begin_text(result.prompt_logprobs),
            }
        )
        self._untold += result.logprobs or ()
        return self._show(shown, self._reason(result))

    def open(self) -> list[dict[str, Any]]:
        """What its stream begins with."""
        if self._chat:
            return [self.chunk({"role": "assistant", "content": ""})]
        if self._waits or not self._lead:
            return []
        return [self.chunk({"content": self._lead})]

    def continue_by(self, delta: TextDelta) -> list[dict[str, Any]]:
        """What its stream goes on with, up to its end."""
        chunks = []
        if self._waits:
            self._waits = False
            shown = self._begin_text(delta.prompt_logprobs)
            chunks.append({**self.chunk({"content": self._lead}), **shown})
        self._untold += delta.logprobs
        chunks += self._chunks(self._reader.push(delta.text, delta.token_ids))
        if delta.result is None:
            return chunks
        chunks += self._chunks(self._reader.flush())
        return [*chunks, self.chunk({}, self._reason(delta.result))]

    def of_prompt(
        self, logprobs: Sequence[TokenLogprob] | None, *, chat: bool = False
    ) -> dict[str, Any]:
        """What a `chat` says of its prompt, which all of its choices have, or a completion."""
        if chat != self._chat or self._prompt_top is None or logprobs is None:
            return {}
        return {"prompt_logprobs": describe_prompt(self._tokens, logprobs, self._prompt_top)}

    def _begin_text(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """What a completion says of its prompt; of an echo its tokens come first."""
        if self._echoes and self._logprobs is not None:
            self._untold += logprobs or ()
        return self.of_prompt(logprobs)

    def _message(self, result: RequestResult) -> dict[str, Any]:
        whole = self._reader.push(result.text or "", result.token_ids) + self._reader.flush()
        message: dict[str, Any] = {"content": whole.content}
        if self._reasons:
            message["reasoning_content"] = whole.reasoning or None
        if whole.calls:
            self._has_called = True
            message |= {"content": whole.content or None, "tool_calls": _join_calls(whole.calls)}
        return message

    def _reason(self, result: RequestResult) -> str:
        """Why it ended; an answer that calls ends for that."""
        is_whole = result.finish_reason == "stop"
        return "tool_calls" if self._has_called and is_whole else result.finish_reason

    def _chunks(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        chunks = []
        if piece.reasoning:
            chunks.append(self.chunk({"reasoning_content": piece.reasoning}))
        if piece.content:
            chunks.append(self.chunk({"content": piece.content}))
        for call in piece.calls:
            self._has_called = True
            chunks.append(self.chunk({"tool_calls": [_describe_call(call)]}))
        return chunks

    def chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        """A piece of its stream, which adds `delta`."""
        shown = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return self._show(shown, reason)

    def _show(self, shown: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        """With the log-probabilities that no chunk has had yet."""
        logprobs = None
        if self._logprobs is not None and (self._untold or reason is not None):
            logprobs, self._untold = self._logprobs.write(self._untold), []
        return {"index": self._index, **shown, "logprobs": logprobs, "finish_reason": reason}


def _describe_call(call: CallPiece) -> dict[str, Any]:
    """A piece of a call as a chunk has it; the first one has its id and its name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, **_open_call(), "function": function}


def _join_calls(pieces: Sequence[CallPiece]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({**_open_call(), "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def _open_call() -> dict[str, str]:
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function"}


def _describe_usage(each: Sequence[RequestStatistics], samples: int) -> dict[str, Any]:
    """Token counts of the choices, of which `samples` after another have one prompt.

    A prompt counts once. Drafts go under the names that OpenAI has for predicted output. What came
    of prompts from a prefix cache is said where there is one.
    """
    firsts = each[::samples]
    prompt, output = (
        sum(one.prompt_tokens for one in firsts),
        sum(one.output_tokens for one in each),
    )
    known = [one.cached_prompt_tokens for one in firsts if one.cached_prompt_tokens is not None]
    accepted = sum(one.accepted_tokens for one in each)
    forced = [one.forced_tokens for one in each if one.forced_tokens is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        **({"prompt_tokens_details": {"cached_tokens": sum(known)}} if known else {}),
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(one.drafted_tokens for one in each) - accepted,
            "num_verify_steps": sum(one.steps for one in each),
            **({"forced_tokens": sum(forced)} if forced else {}),
        },
    }


def _to_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    # ASCII: some readers of event streams take U+2028 for the end of a line.
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: DflashError) -> bytes:
    """An error after the status line has gone: the stream ends with it, without [DONE]."""
    return _to_event(as_api_error(error).to_json())
