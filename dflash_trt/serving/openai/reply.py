"""Replies to OpenAI's completion requests: whole, or as the chunks of a stream."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from dflash_trt.decoding import RequestResult, RequestStatistics, TokenLogprob
from dflash_trt.decoding.request import TokenOrigin
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import TextDelta
from dflash_trt.serving.openai.access import AccessRecord
from dflash_trt.serving.openai.answer_reader import AnswerReader
from dflash_trt.serving.openai.chat_request import CompletionRequest
from dflash_trt.serving.openai.errors import as_api_error
from dflash_trt.serving.openai.large import EVENT, WHOLE, Written, is_large, write_json
from dflash_trt.text.detokenise import AnswerPiece, CallPiece
from dflash_trt.text.tokenizer import TokenBytes


class ReplyWriter:
    """A request's replies; all of them carry the same id.

    Each choice has a reader, and a lead that it begins with: the prompt, where it is echoed. With
    `reasons` they say what the reasoning was; `record` gets the tokens of outputs that have ended.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        readers: Sequence[AnswerReader],
        leads: Sequence[str],
        tokens: TokenBytes,
        record: AccessRecord,
        *,
        reasons: bool,
    ) -> None:
        self._asked, self._record, self._is_chat = asked, record, asked.chat is not None
        top = asked.body.prompt_logprobs

        def describe_prompt(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
            if top is None or logprobs is None:
                return {}
            return {"prompt_logprobs": describe_prompt_logprobs(tokens, logprobs, top)}

        self._describe_prompt = describe_prompt
        self._choices = [
            _Choice(index, asked, reader, lead, tokens, describe_prompt, reasons=reasons)
            for index, (reader, lead) in enumerate(zip(readers, leads, strict=True))
        ]
        self._readers, self._told = readers, [0] * len(readers)
        tells = self._is_chat and asked.body.return_token_ids
        self._prompt_ids: dict[str, Any] = {"prompt_token_ids": asked.prompts[0]} if tells else {}
        self._statistics: dict[int, RequestStatistics] = {}
        self._prompt_logprobs: Sequence[TokenLogprob] | None = None
        self._is_large = False
        self._warnings = {"warnings": [*asked.warnings]} if asked.warnings else {}
        record.warnings = len(asked.warnings) or None
        prefix, self._object = (
            ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        )
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{asked.body.request_id or secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.body.model,
        }

    def choice(self, index: int, result: RequestResult) -> Iterator[bytes]:
        """Yields the JSON of a choice of a reply that does not stream."""
        self._take(index, result.statistics)
        if self._is_chat:  # says it once
            self._prompt_logprobs = self._prompt_logprobs or result.prompt_logprobs
        yield from write_json(self._choices[index].whole(result), WHOLE)

    def whole(self, choices: Sequence[Written]) -> Iterator[bytes]:
        """Yields the JSON of a reply that does not stream, of all its choices."""
        reply = {
            **self._head,
            "object": self._object,
            **self._prompt_ids,
            **self._describe_prompt(self._prompt_logprobs),
            "choices": choices,
            "usage": self._describe_usage(),
            **self._warnings,
        }
        yield from write_json(reply, WHOLE)

    def opening(self) -> bytes:
        """What a stream begins with: who speaks in a chat, an echo without log-probabilities."""
        opened = [one for choice in self._choices for one in choice.open()]
        return b"".join(part for one in opened for part in self._event(one, **self._prompt_ids))

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """Yields the chunks of a choice's delta; none while there is nothing to show yet."""
        choice, self._is_large = self._choices[index], is_large(delta)
        self._told[index] += 0 if self._asked.echoes_only else len(delta.token_ids)
        chunks = choice.continue_by(delta)
        if self._is_chat and (shown := self._describe_prompt(delta.prompt_logprobs)):
            yield from self._event(choice.chunk({}), **shown)
        for chunk in chunks:
            yield from self._event(chunk)
        if delta.result is None:
            return
        self._take(index, delta.result.statistics)
        if len(self._statistics) == len(self._choices):
            if self._asked.include_usage:
                yield from self._event(None, usage=self._describe_usage())
            yield b"data: [DONE]\n\n"

    def fail(self, error: DflashError) -> bytes:
        """An error after the status line has gone: the stream ends with it, without [DONE]."""
        return b"".join(self._to_event(as_api_error(error).to_json()))

    def _take(self, index: int, one: RequestStatistics) -> None:
        if self._asked.echoes_only:
            one = replace(one, output_tokens=0)
        self._statistics[index], record = one, self._record
        record.output_tokens = (record.output_tokens or 0) + one.output_tokens
        if index % self._asked.body.n == 0:  # a prompt counts once
            record.prompt_tokens = (record.prompt_tokens or 0) + one.prompt_tokens

    def _event(
        self, choice: dict[str, Any] | None, *, usage: dict[str, Any] | None = None, **shown: Any
    ) -> Iterator[bytes]:
        body: dict[str, Any] = {
            **self._head,
            **shown,
            "object": "chat.completion.chunk" if self._is_chat else self._object,
            "choices": [] if choice is None else [choice],
            **(self._warnings if choice is not None and choice["finish_reason"] else {}),
        }
        if choice is not None and self._asked.counts_always:
            told = self._told[choice["index"]]
            prompt = len(self._asked.prompts[choice["index"] // self._asked.body.n])
            usage = {"prompt_tokens": prompt, "completion_tokens": told}
            usage["total_tokens"] = prompt + told
        return self._to_event(body | ({"usage": usage} if self._asked.include_usage else {}))

    def _to_event(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        """The parts of one server-sent event."""
        yield b"data: "
        yield from write_json(body, EVENT) if self._is_large else [EVENT.encode(body).encode()]
        yield b"\n\n"

    def _describe_usage(self) -> dict[str, Any]:
        """Token counts of the choices, of which samples of one prompt count it once.

        Drafts go under the names that OpenAI has for predicted output. What came of prompts from a
        prefix cache is said where there is one.
        """
        each = [one for _, one in sorted(self._statistics.items())]
        firsts = each[:: self._asked.body.n]
        prompt = sum(one.prompt_tokens for one in firsts)
        output = sum(one.output_tokens for one in each)
        cached = [
            one.cached_prompt_tokens for one in firsts if one.cached_prompt_tokens is not None
        ]
        accepted = sum(one.accepted_tokens for one in each)
        forced = [one.forced_tokens for one in each if one.forced_tokens is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            **({"prompt_tokens_details": {"cached_tokens": sum(cached)}} if cached else {}),
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.reasoning_tokens for one in self._readers),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(one.drafted_tokens for one in each) - accepted,
                "num_verify_steps": sum(one.steps for one in each),
                **({"forced_tokens": sum(forced)} if forced else {}),
            },
        }


class _Choice:
    """One of a reply's choices: whole, or piece by piece."""

    def __init__(
        self,
        index: int,
        asked: CompletionRequest,
        reader: AnswerReader,
        lead: str,
        tokens: TokenBytes,
        describe_prompt: Callable[[Sequence[TokenLogprob] | None], dict[str, Any]],
        *,
        reasons: bool,
    ) -> None:
        self._index, self._reader, self._lead, self._reasons = index, reader, lead, reasons
        self._is_chat, self._echoes = asked.chat is not None, asked.body.echo
        self._echoes_only = asked.echoes_only
        self._describe_prompt = describe_prompt
        self._has_called = False
        # A completion's begins when its prompt's log-probabilities are there.
        self._waits = not self._is_chat and asked.generation.prompt_logprobs is not None
        top = asked.generation.logprobs
        self._logprobs = (
            None if top is None else LogprobsWriter(tokens, chat=self._is_chat, top=top)
        )
        self._untold: list[TokenLogprob] = []
        self._tokens, self._tells_tokens = tokens, asked.body.stream_options.include_tokens
        self._untraced: list[TokenOrigin] = []
        self._ids: dict[str, Any] = {"token_ids": []} if asked.body.return_token_ids else {}
        if self._ids and not self._is_chat:
            self._ids["prompt_token_ids"] = asked.prompts[index // asked.body.n]

    def whole(self, result: RequestResult) -> dict[str, Any]:
        """The choice of a reply that does not stream."""
        if self._is_chat:
            message = {"role": "assistant", **self._message(result), "refusal": None}
            shown: dict[str, Any] = {"message": message}
        else:
            text = self._lead + ("" if self._echoes_only else result.text or "")
            shown = {"text": text, **self._begin_text(result.prompt_logprobs)}
        self._hear(result.token_ids, result.logprobs or ())
        return self._show(shown, self._reason(result))

    def open(self) -> list[dict[str, Any]]:
        """What its stream begins with."""
        if self._is_chat:
            return [self.chunk({"role": "assistant", "content": ""})]
        return [] if self._waits or not self._lead else [self.chunk({"content": self._lead})]

    def continue_by(self, delta: TextDelta) -> list[dict[str, Any]]:
        """What its stream goes on with, up to its end."""
        chunks = []
        if self._waits:
            self._waits = False
            shown = self._begin_text(delta.prompt_logprobs)
            chunks.append({**self.chunk({"content": self._lead}), **shown})
        self._hear(delta.token_ids, delta.logprobs)
        if not self._echoes_only:
            self._untraced += delta.origins
            chunks += self._chunks(self._reader.push(delta.text, delta.token_ids))
        if delta.result is None:
            return chunks
        chunks += self._chunks(self._reader.flush())
        return [*chunks, self.chunk({}, self._reason(delta.result))]

    def chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        """A piece of its stream, which adds `delta`."""
        shown = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return self._show(shown, reason)

    def _hear(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Keeps what the next chunk tells, unless only the prompt is echoed."""
        if not self._echoes_only:
            self._untold += logprobs
            if self._ids:
                self._ids["token_ids"] += token_ids

    def _begin_text(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        """What a completion says of its prompt; of an echo its tokens come first."""
        if self._echoes and self._logprobs is not None:
            self._untold += logprobs or ()
        return self._describe_prompt(logprobs)

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
        self._has_called |= bool(piece.calls)
        deltas: list[dict[str, Any]] = []
        if piece.reasoning:
            deltas.append({"reasoning_content": piece.reasoning})
        if piece.content:
            deltas.append({"content": piece.content})
        deltas += [{"tool_calls": [_describe_call(call)]} for call in piece.calls]
        return [self.chunk(delta) for delta in deltas]

    def _show(self, shown: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        """With the log-probabilities and tokens that no chunk has had yet."""
        logprobs = None
        if self._logprobs is not None and (self._untold or reason is not None):
            logprobs, self._untold = self._logprobs.write(self._untold), []
        told, self._ids = self._ids, {"token_ids": []} if self._ids else {}
        ending = {"logprobs": logprobs, "finish_reason": reason}
        if self._tells_tokens:
            told["tokens"], self._untraced = [*map(self._trace, self._untraced)], []
        return {"index": self._index, **shown, **ending, **told}

    def _trace(self, one: TokenOrigin) -> dict[str, Any]:
        return {"id": one.token_id, "bytes": [*self._tokens[one.token_id]], "origin": one.origin}


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


# JSON has no infinity; OpenAI's own value for a token that cannot come.
_LEAST = -9999.0


class LogprobsWriter:
    """Writes a reply's log-probabilities in order; offsets count the characters of the tokens."""

    def __init__(self, tokens: TokenBytes, *, chat: bool, top: int) -> None:
        self._tokens, self._chat, self._top, self._offset = tokens, chat, top, 0

    def write(self, newest: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a choice."""
        if self._chat:
            content = [
                {
                    **self._describe(one.token_id, one.logprob),
                    "top_logprobs": [*map(self._describe, one.top_ids, one.top_logprobs)],
                }
                for one in newest
            ]
            return {"content": content, "refusal": None}
        tokens = [_text(self._tokens, one.token_id) for one in newest]
        *offsets, self._offset = accumulate(map(len, tokens), initial=self._offset)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if math.isnan(one.logprob) else max(one.logprob, _LEAST) for one in newest
            ],
            "top_logprobs": [self._by_text(one) for one in newest] if self._top else None,
            "text_offset": offsets,
        }

    def _describe(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens[token_id]
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, _LEAST),
            "bytes": list(data),
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float] | None:
        """The likeliest, and the token itself; of two with one text the likelier."""
        if math.isnan(one.logprob):
            return None
        # A prompt's may have more, which `prompt_logprobs` has asked for.
        top = [*zip(one.top_ids, one.top_logprobs, strict=True)][: self._top]
        pairs = [(one.token_id, one.logprob), *top]
        pairs.sort(key=lambda pair: pair[1])
        texts = ((_text(self._tokens, one), logprob) for one, logprob in pairs[::-1])
        return {text: max(logprob, _LEAST) for text, logprob in texts}


def describe_prompt_logprobs(
    tokens: TokenBytes, logprobs: Sequence[TokenLogprob], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM answers it: of each token but the first it and the likeliest."""
    places: list[dict[str, dict[str, Any]] | None] = []
    for one in logprobs:
        ranked = zip(one.top_ids, one.top_logprobs, range(1, top + 1), strict=False)
        place = {
            str(token_id): {
                "logprob": max(logprob, _LEAST),
                "rank": rank,
                "decoded_token": _text(tokens, token_id),
            }
            for token_id, logprob, rank in [(one.token_id, one.logprob, one.rank), *ranked]
        }
        places.append(None if math.isnan(one.logprob) else place)
    return places


def _text(tokens: TokenBytes, token_id: int) -> str:
    return tokens[token_id].decode(errors="replace")
