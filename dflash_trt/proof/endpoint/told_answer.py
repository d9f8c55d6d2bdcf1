"""An answer as an OpenAI-compatible server tells it: its text, and what it says of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from dflash_trt.errors import DflashError
from dflash_trt.serving.client.draft_counts import DraftCounts, estimate_counts, read_answer_counts

Unit = Literal["token id", "token", "character"]
UNITS: tuple[Unit, ...] = ("token id", "token", "character")
"""What answers can be compared by, the best first."""
_SHOWN = 12
_TEXTS = (("reasoning_content", "reasoning"), ("content",), ("text",))  # the first of each


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token's id, bytes, log-probability, and those of the likeliest; None where untold."""

    token_id: int | None
    name: bytes | None = None
    logprob: float | None = None
    likeliest: Mapping[bytes | None, float] | None = None

    def __str__(self) -> str:
        shown = "" if self.name is None else repr(self.name.decode(errors="replace"))
        return shown if self.token_id is None else f"{shown} ({self.token_id})".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldAnswer:
    """One answer; `drafts` are the server's counts of it, `estimate` what its chunks suggest."""

    text: str
    tokens: tuple[ToldToken, ...]
    prompt_tokens: int | None
    output_tokens: int
    drafts: DraftCounts | None
    estimate: DraftCounts | None

    def parts(self, unit: Unit) -> list[tuple[Any, ToldToken]] | None:
        """What is compared in that unit, with its token; None where it is not told."""
        if unit == "character":
            return [(one, ToldToken(None, one.encode(errors="replace"))) for one in self.text]
        found = [(one.token_id if unit == "token id" else one.name, one) for one in self.tokens]
        is_told = all(key is not None for key, _ in found) and (found or not self.text)
        return found if is_told else None

    def spell(self, like: Sequence[ToldToken]) -> list[tuple[Any, ToldToken]]:
        """The text in the tokens of another answer, as far as it goes on as they or rivals do."""
        left, found = self.text.encode(errors="replace"), list[tuple[Any, ToldToken]]()
        for one in like:
            rivals = sorted(filter(None, one.likeliest or ()), key=len, reverse=True)
            names = (name for name in (one.name, *rivals) if name and left.startswith(name))
            name = next(names, left[:_SHOWN])
            if not left:
                break
            found.append((name, one if name == one.name else ToldToken(None, name)))
            left = left[len(name) :]
            if name != one.name:
                return found
        return [*found, *([(left, ToldToken(None, left[:_SHOWN]))] if left else [])]


def read_answer(events: Iterable[Mapping[str, Any]], where: str) -> ToldAnswer:
    """The answer in the events of a stream of chats or completions.

    Raises:
        DflashError: it has no choice, or never says why it ended.
    """
    text, told, ids, chunks = "", list[ToldToken](), list[int](), list[int]()
    final: dict[str, Any] = {}
    for event in events:
        final |= {key: event[key] for key in ("usage", "metrics", "timings") if event.get(key)}
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                final |= {key: one for key, one in choice.items() if one is not None}
                part = delta if isinstance(delta := choice.get("delta"), dict) else choice
                found = (filter(None, map(part.get, keys)) for keys in _TEXTS)
                new = "".join(str(next(one, "")) for one in found)
                more, fresh = _tokens(choice.get("logprobs")), _ids(choice.get("token_ids"))
                text, told, ids = text + new, told + more, ids + fresh
                chunks += [len(fresh) or len(more)] if new or more or fresh else []
    if not final.get("finish_reason"):
        what = "never says why its answer ended" if "index" in final else "answers with no choice"
        raise DflashError(what, where=where)
    if ids:  # log-probabilities that are not as many could be anyone's
        told = told if len(told) == len(ids) else [ToldToken(None)] * len(ids)
        told = [replace(token, token_id=one) for token, one in zip(told, ids, strict=True)]
    usage = final.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, output = (counts.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
    tokens = output if type(output) is int else len(told)
    spelt = b"".join(one.name or b"" for one in told)
    if len(told) != tokens and spelt != text.encode(errors="replace"):
        told = []  # llama-server tells none of accepted drafts
    return ToldAnswer(
        text=text,
        tokens=tuple(told),
        prompt_tokens=prompt if type(prompt) is int else None,
        output_tokens=tokens,
        drafts=read_answer_counts(final, tokens),
        estimate=estimate_counts(chunks, tokens),
    )


def _ids(value: object) -> list[int]:
    return [one for one in value if type(one) is int] if isinstance(value, list) else []


def _tokens(logprobs: object) -> list[ToldToken]:
    """A choice's `logprobs`, as chats or as completions have them."""
    if not isinstance(logprobs, dict):
        return []
    content = logprobs.get("content")
    if not isinstance(content, list):
        keys = ("tokens", "token_logprobs", "top_logprobs")
        rows = (one if isinstance(one := logprobs.get(key), list) else [] for key in keys)
        content = [
            {
                "token": token,
                "logprob": value,
                "top_logprobs": [{"token": key, "logprob": top[key]} for key in top],
            }
            for token, value, told in zip_longest(*rows)
            for top in (told if isinstance(told, dict) else {},)
        ]
    return [_token(one) for one in content if isinstance(one, dict)]


def _token(item: Mapping[str, Any]) -> ToldToken:
    value, token_id, raw = (item.get(key) for key in ("logprob", "id", "bytes"))
    is_bytes = isinstance(raw, list) and all(type(one) is int and 0 <= one < 256 for one in raw)
    told = item.get("top_logprobs")
    each = told if isinstance(told, list) else ()
    top = [_token(one) for one in each if isinstance(one, dict)]
    return ToldToken(
        token_id if type(token_id) is int else None,
        bytes(raw or ()) if is_bytes else str(item.get("token")).encode(errors="replace"),
        float(value) if isinstance(value, int | float) else None,
        {one.name: one.logprob for one in top if one.logprob is not None},
    )
