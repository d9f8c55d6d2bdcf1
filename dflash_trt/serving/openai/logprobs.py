"""Log-probabilities in OpenAI's two forms: a chat's list of tokens, a completion's columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.runtime import TokenLogprob
from dflash_trt.runtime.logprobs import LOGPROBS_MODES, MAX_TOP_LOGPROBS, LogprobsMode
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.token_bytes import TokenBytes

MOST_CHAT = 20
MOST_COMPLETION = 5
# JSON has no infinity; OpenAI's own value for a token that cannot come.
_LEAST = -9999.0


def read_chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many alternatives `logprobs` and `top_logprobs` ask for; None: no log-probabilities.

    Raises:
        ApiError: they are wrong, or do not fit together.
    """
    wanted, top = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise ApiError(f"must be true or false, not {quoted(wanted)}", param="logprobs")
    _check(top, MOST_CHAT, "top_logprobs")
    if top and not wanted:
        raise ApiError("goes with logprobs: true only", param="top_logprobs")
    return top if wanted else None


def read_completion_logprobs(fields: Mapping[str, Any]) -> int | None:
    """The same of a completion, whose `logprobs` is the number."""
    top = fields.get("logprobs")
    if top is not None:
        _check(top, MOST_COMPLETION, "logprobs")
    return top


def read_prompt_logprobs(fields: Mapping[str, Any]) -> int | None:
    """vLLM's `prompt_logprobs`: how many alternatives of each token of the prompt are shown."""
    top = fields.get("prompt_logprobs")
    if top is not None:
        _check(top, MAX_TOP_LOGPROBS, "prompt_logprobs")
    return top


def read_logprobs_mode(fields: Mapping[str, Any]) -> LogprobsMode:
    """`logprobs_mode`, of one request here and of a server in vLLM."""
    given = fields.get("logprobs_mode", LOGPROBS_MODES[0])
    for mode in LOGPROBS_MODES:
        if given == mode:
            return mode
    known = " or ".join(LOGPROBS_MODES)
    raise ApiError(f"must be {known}, not {quoted(given)}", param="logprobs_mode")


def _check(value: Any, most: int, param: str) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ApiError(f"must be an integer from 0 to {most}, not {quoted(value)}", param=param)


class LogprobsWriter:
    """Writes a reply's log-probabilities in order; offsets count the characters of the tokens."""

    def __init__(self, tokens: TokenBytes, *, chat: bool, top: int) -> None:
        self._tokens = tokens
        self._chat = chat
        self._top = top
        self._offset = 0

    def write(self, newest: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a choice."""
        return self._write_chat(newest) if self._chat else self._write_completion(newest)

    def _write_chat(self, newest: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **self._describe(one.token_id, one.logprob),
                "top_logprobs": [
                    self._describe(*pair)
                    for pair in zip(one.top_ids, one.top_logprobs, strict=True)
                ],
            }
            for one in newest
        ]
        return {"content": content, "refusal": None}

    def _describe(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens[token_id]
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, _LEAST),
            "bytes": list(data),
        }

    def _write_completion(self, newest: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._text(one.token_id) for one in newest]
        offsets = []
        for text in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [_show(one.logprob) for one in newest],
            "top_logprobs": [self._by_text(one) for one in newest] if self._top else None,
            "text_offset": offsets,
        }

    def _by_text(self, one: TokenLogprob) -> dict[str, float] | None:
        """The likeliest, and the token itself; of two with one text the likelier."""
        if math.isnan(one.logprob):
            return None
        # A prompt's may have more, which `prompt_logprobs` has asked for.
        top = [*zip(one.top_ids, one.top_logprobs, strict=True)][: self._top]
        pairs = [(one.token_id, one.logprob), *top]
        pairs.sort(key=lambda pair: pair[1])
        return {self._text(token_id): max(logprob, _LEAST) for token_id, logprob in pairs[::-1]}

    def _text(self, token_id: int) -> str:
        return _text(self._tokens, token_id)


def describe_prompt(
    tokens: TokenBytes, logprobs: Sequence[TokenLogprob], top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM answers it: of each token of a prompt it and the likeliest by id.

    Nothing of the first one, which nothing comes before.
    """
    return [
        None if math.isnan(one.logprob) else _describe_place(tokens, one, top) for one in logprobs
    ]


def _describe_place(tokens: TokenBytes, one: TokenLogprob, top: int) -> dict[str, dict[str, Any]]:
    ranked = [*zip(one.top_ids, one.top_logprobs, range(1, top + 1), strict=False)]
    return {
        str(token_id): {
            "logprob": max(logprob, _LEAST),
            "rank": rank,
            "decoded_token": _text(tokens, token_id),
        }
        for token_id, logprob, rank in [(one.token_id, one.logprob, one.rank), *ranked]
    }


def _text(tokens: TokenBytes, token_id: int) -> str:
    return tokens[token_id].decode(errors="replace")


def _show(logprob: float) -> float | None:
    """Nothing for a prompt's first token, before which nothing is."""
    return None if math.isnan(logprob) else max(logprob, _LEAST)
