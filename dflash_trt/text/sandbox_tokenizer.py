"""Tries a tokenizer: loads it, encodes and decodes. Run by sandbox_worker.py, in its limits.

The library runs what `tokenizer.json` says: patterns that backtrack, steps that each double a text,
tables whose lengths lie. What ends badly for some text only is looked for in the file itself.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from tokenizers import Tokenizer

MAX_GROWTH = 1000
"""The most that all steps together may multiply a text's length by; T5's do by less than 200."""

_SENTENCE = (
    "The 1st of 23,456 foxes: x_1 != 'é'\r\n\n\tdéjà vu  日本語 Привет 🙂👍🏽 \u200d\ufeff\0"
)
_RUNS = "aA0 _.!-(\n\t\x01é日🙂"
_RUN_LENGTH, _LONG_TEXT, _MOST_RUNS, _MOST_IDS = 48, 8192, 96, 256
_MOST_EXPRESSIONS, _LONGEST_EXPRESSION = 16, 1000


_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_TELLING = {
    *(*_STEPS, "normalizers", "pretokenizers", "decoders", "model", "dropout"),
    *("pattern", "String", "Regex", "content", "precompiled_charsmap"),
}
"""Keys by which it is judged here what the library would do."""


class _UnfitError(Exception):
    """What no text should have to find out."""


def answer(job: dict[str, Any], payload: bytes, held: None) -> dict[str, Any]:
    """{"expressions": its regular expressions} if the tokenizer that `payload` holds behaves.

    An expression is told by its first characters, and many as an empty one.
    """
    try:
        literals, expressions = _inspect(payload)
        _try(_load(payload), literals + expressions)
    except (_UnfitError, MemoryError):
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise _UnfitError(f"makes the tokenizers library panic: {error}") from error
        if isinstance(error, Exception):
            raise _UnfitError(f"fails when it is tried: {error}") from error
        raise
    told = expressions if len(expressions) <= _MOST_EXPRESSIONS else [""]
    return {"expressions": [one[:_LONGEST_EXPRESSION] for one in told]}


def _inspect(payload: bytes) -> tuple[list[str], list[str]]:
    """Its literal patterns and its others, once no step is found unfit by what the file says."""
    try:
        root = json.loads(payload, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        root = None
    if not isinstance(root, dict):
        _load(payload)  # mostly it says what is wrong
        raise _UnfitError("is no JSON object to Python, whatever the library reads in it")
    model = root.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise _UnfitError(
            f"its model has a dropout of {model['dropout']!r}, which gives a text other tokens "
            'each time: set "dropout" to null'
        )
    literals: list[str] = []
    expressions: list[str] = []
    for part in _STEPS:
        before = len(expressions)
        growth = _growth(root.get(part), literals, expressions)
        if part == "decoder" and len(expressions) > before:
            raise _UnfitError("its decoder has a regular expression, which may go on without end")
        if growth > MAX_GROWTH:
            raise _UnfitError(f"its {part} may make a text more than {MAX_GROWTH:,} times as long")
    return literals, expressions


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. A vocabulary may have a key twice; what is judged here by its last value not."""
    built = dict(pairs)
    if len(built) < len(pairs):
        keys = [key for key, _ in pairs]
        for key in _TELLING:
            if keys.count(key) > 1:
                raise _UnfitError(f'gives "{key}" twice')
    return built


def _growth(part: Any, literals: list[str], expressions: list[str]) -> int:
    """How many times as long a text may come out of a step and all inside it; notes patterns.

    Told by the keys: the library reads steps that do not say their type, too.
    """
    if not isinstance(part, dict | list):
        return 1
    growth = 1
    if isinstance(part, dict):
        for kind, found in (("String", literals), ("Regex", expressions)):
            if isinstance(part.get(kind), str):
                found.append(part[kind])
        pattern, content = part.get("pattern"), part.get("content")
        literal = None
        if isinstance(pattern, dict):
            literal = pattern.get("String")
        if pattern is not None and isinstance(content, str):
            # A regular expression may match between any two bytes.
            shortest = len(literal.encode()) if isinstance(literal, str) else 0
            length = len(content.encode("utf-8", "surrogatepass"))
            growth = -(-length // shortest) if shortest else length + 1
        if isinstance(part.get("precompiled_charsmap"), str):
            growth = _longest_piece(part["precompiled_charsmap"])
    for inner in part.values() if isinstance(part, dict) else part:
        growth = min(max(growth, 1) * _growth(inner, literals, expressions), MAX_GROWTH + 1)
    return growth


def _longest_piece(table: str) -> int:
    """Bytes of the longest text that SentencePiece's table puts in place of another."""
    try:
        data = base64.b64decode(table)
    except (binascii.Error, ValueError):
        return 1
    pieces = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, pieces.split(b"\0")))


def _load(payload: bytes) -> Any:
    try:
        tokenizer = Tokenizer.from_buffer(payload)
    except MemoryError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise _UnfitError(f"is not a readable tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _try(tokenizer: Any, patterns: list[str]) -> None:
    """All that the project asks of a tokenizer, over texts that provoke."""
    # What a pattern names is what it stumbles over.
    named = dict.fromkeys([*_RUNS, *"".join(patterns)])
    runs = [one * _RUN_LENGTH + "\x01" for one in list(named)[:_MOST_RUNS]]
    sentence = _SENTENCE * (_LONG_TEXT // len(_SENTENCE))
    for text in ("a", _SENTENCE, sentence, *runs, *patterns[:_MOST_RUNS]):
        for special in (True, False):
            ids = _encode(tokenizer, text, special=special)
            if ids is None:
                continue
            if ids != _encode(tokenizer, text, special=special):
                raise _UnfitError("gives the same text other tokens each time")
            tokenizer.decode(ids, skip_special_tokens=not special)
    entries = list(tokenizer.get_vocab(with_added_tokens=True).values())
    some = entries[:: max(len(entries) // _MOST_IDS, 1)]
    some += list(tokenizer.get_added_tokens_decoder())[:_MOST_IDS]
    tokenizer.decode(some, skip_special_tokens=False)
    for one in some:
        tokenizer.decode([one], skip_special_tokens=False)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int] | None:
    """None for a text that it refuses, as a vocabulary without an unknown token may."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    except MemoryError:
        raise
    except Exception:
        return None
