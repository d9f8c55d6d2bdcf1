"""Log-probabilities in OpenAI's two forms: a chat's list of tokens, a completion's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dflash_trt.decoding import TokenLogprob
from dflash_trt.text.tokenizer import TokenBytes

# JSON has no infinity; OpenAI's own value for a token that cannot come.
_LEAST = -9999.0


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
        tokens = [_text(self._tokens, one.token_id) for one in newest]
        offsets = []
        for text in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if math.isnan(one.logprob) else max(one.logprob, _LEAST) for one in newest
            ],
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
        texts = ((_text(self._tokens, one), logprob) for one, logprob in pairs[::-1])
        return {text: max(logprob, _LEAST) for text, logprob in texts}


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
