"""What a request's events become on their way to Dynamo's frontend.

Ids go out as they come, unless log-probabilities are wanted: the frontend lays those beside the
ids of the same chunk, and ours come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_trt.decoding import RequestResult, TokenEvent
from dflash_trt.decoding.logprobs import TokenLogprob

Chunk = dict[str, Any]
STATISTICS = "dflash"
"""Where an answer's statistics are in `nvext.engine_data`, which clients ask for."""


class ChunkWriter:
    """Writes the chunks of one choice: its place, and whether log-probabilities are wanted."""

    def __init__(self, index: int, *, logprobs: bool) -> None:
        self._index, self._logprobs = index, logprobs
        self._held: list[int] = []
        self._prompt: tuple[TokenLogprob, ...] | None = None

    def write(self, event: TokenEvent) -> Iterator[Chunk]:
        """The chunks of an event: none while ids wait for their log-probabilities."""
        self._held += event.token_ids
        if event.prompt_logprobs is not None:
            self._prompt = event.prompt_logprobs
        count = len(event.logprobs) if self._logprobs else len(self._held)
        chunk = self._take(count)
        if self._logprobs and count:
            chunk["log_probs"] = [one.logprob for one in event.logprobs]
            chunk["top_logprobs"] = [_rank(one) for one in event.logprobs]
        if event.result is None:
            if count:
                yield chunk
            return
        if self._held:  # what a stop text cut off has no log-probabilities
            if count:
                yield chunk
            chunk = self._take(len(self._held))
        # In one chunk: the frontend reads no further behind an id that ends the output.
        yield chunk | self._end(event.result)

    def _take(self, count: int) -> Chunk:
        taken, self._held = self._held[:count], self._held[count:]
        return {"token_ids": taken, "index": self._index}

    def _end(self, result: RequestResult) -> Chunk:
        data: dict[str, Any] = {STATISTICS: result.statistics.to_json()}
        if self._prompt is not None:
            data["prompt_logprobs"] = [None, *map(_by_id, self._prompt)]
        last: Chunk = {
            "finish_reason": result.finish_reason,
            "completion_usage": _count(result),
            "engine_data": data,
        }
        if result.stop_reason is not None:
            last["stop_reason"] = result.stop_reason
        return last


def end_together(ends: Sequence[Chunk]) -> Iterator[Chunk]:
    """The last chunks of several choices, none of which may have a stop text.

    The frontend ends all choices with the first one's end, and with an id that ends an output; it
    takes the first usage for all. So their texts come first.
    """
    for end in ends:
        cut = len(end["token_ids"]) - (end["finish_reason"] == "stop")
        kept = ("token_ids", "log_probs", "top_logprobs")
        yield {name: end[name][:cut] for name in kept if name in end} | {"index": end["index"]}
    usages = [one["completion_usage"] for one in ends]
    total, drafts = dict(usages[0]), "completion_tokens_details"
    total["completion_tokens"] = sum(one["completion_tokens"] for one in usages)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    total[drafts] = {name: sum(one[drafts][name] for one in usages) for name in total[drafts]}
    first = {name: value for name, value in ends[0].items() if "log" not in name}
    yield first | {"token_ids": [], "completion_usage": total}


def _count(result: RequestResult) -> dict[str, Any]:
    """OpenAI's usage, with the drafts that were kept and those that were not."""
    own = result.statistics
    return {
        "prompt_tokens": own.prompt_tokens,
        "completion_tokens": own.output_tokens,
        "total_tokens": own.prompt_tokens + own.output_tokens,
        "prompt_tokens_details": {"cached_tokens": own.cached_prompt_tokens or 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": own.accepted_tokens,
            "rejected_prediction_tokens": own.drafted_tokens - own.accepted_tokens,
        },
    }


def _rank(one: TokenLogprob) -> list[dict[str, Any]]:
    """The token itself first, unless it is among the likeliest; the frontend adds their texts."""
    pairs = list(zip(one.top_ids, one.top_logprobs, strict=True))
    ranked = [(place, *pair) for place, pair in enumerate(pairs, start=1)]
    if one.token_id not in one.top_ids:
        ranked = [(one.rank or len(pairs) + 1, one.token_id, one.logprob), *ranked]
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": value}
        for rank, token_id, value in ranked
    ]


def _by_id(one: TokenLogprob) -> dict[str, Any]:
    return {
        str(entry["token_id"]): {"logprob": entry["logprob"], "rank": entry["rank"]}
        for entry in _rank(one)
    }
