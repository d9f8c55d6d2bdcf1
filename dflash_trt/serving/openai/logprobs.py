"""Log-probabilities in OpenAI's two forms: a chat's list of tokens, a completion's columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dflash_trt.decoding import TokenLogprob
from dflash_trt.text.tokenizer import TokenBytes

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
    """`prompt_logprobs` as vLLM answers it: of each token of a prompt it and the likeliest by id.

    Nothing of the first one, which nothing comes before.
    """
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
