"""Calls of the tokenizers library: a tokenizer is code, which is tried before it is loaded here.

Its errors, Rust's panics included, become ours. A panic is no `Exception` in Python; the library
has written a note about it to stderr by then.

A regular expression may go back over a text as often as its maker wants; the library gives up
after ten million steps at each place, which are tenths of a second, and a prompt has as many
places as characters. Whether one does so cannot be told from how it looks: those of published
tokenizers are known by heart here. A tokenizer with any other encodes in a sandbox, for a start of
half a second, a tenth of a millisecond for a short text, and twice the time for a long one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer

from dflash_trt.core.user_cache import read_cache, user_cache_file, write_cache
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.sandbox import Held, Sandbox, SandboxLimits, SandboxLostError

# The largest published tokenizers, of 262,144 entries, take 400 MiB and a few seconds.
TRIAL_LIMITS = SandboxLimits(max_seconds=15, max_bytes=1 << 30, max_answer_bytes=1 << 16)
ENCODING_LIMITS = SandboxLimits(max_seconds=5, max_bytes=2 << 30, max_answer_bytes=128 << 20)
_TRIAL = 2
"""Goes up when the trial finds more than it did."""
_PASSED = {b"passed\n": True, b"passed, with expressions of its own\n": False}
"""What the cache remembers, and whether all regular expressions are known then."""

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN = {QWEN2, LLAMA3, GPT_OSS, " {2,}"}
"""Expressions that take time in proportion to a text."""


def check_tokenizer(data: bytes, where: str | Path) -> bool:
    """Whether all regular expressions in the content of a `tokenizer.json` are known ones.

    Raises DflashError unless it loads and behaves when tried.

    Promised of what passes: loading it ends and neither panics nor takes more than the limits; no
    text comes out of its steps more than a thousand times as long; the same text gives the same
    tokens. Not promised: that no text at all makes an expression backtrack, unless all are known.

    Each content is tried once: the user's cache remembers the hashes of those that passed with
    this release of the library. A bundle cannot vouch for its own.
    """
    key = hashlib.sha256(f"{_TRIAL} {tokenizers.__version__} ".encode())
    key.update(data)
    record = user_cache_file(f"tokenizers/{key.hexdigest()}")
    remembered = _PASSED.get(read_cache(record))
    if remembered is not None:
        return remembered
    with closing(Sandbox("tokenizer")) as sandbox:
        answer = sandbox.ask({}, TRIAL_LIMITS, data)
    if "error" in answer:
        raise DflashError(one_line(answer["error"]), where=where)
    passed = _KNOWN.issuperset(answer["expressions"])
    write_cache(record, next(text for text, known in _PASSED.items() if known is passed))
    return passed


class BoundedEncoder:
    """A tokenizer in a sandbox; any thread may ask it, one after the other.

    Args:
        data: the content of a `tokenizer.json` that has passed its trial.
    """

    def __init__(self, data: bytes) -> None:
        self._sandbox = Sandbox("encoding", Held(data, ENCODING_LIMITS, {}))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            ValueError: the tokenizer fails, or takes more than the limits.
        """
        payload = text.encode("utf-8", "surrogatepass")
        answer = self._sandbox.ask({"special": special}, ENCODING_LIMITS, payload)
        if "ids" not in answer:
            raise ValueError(str(answer.get("error")))
        ids: list[int] = answer["ids"]
        return ids


def open_tokenizer(data: bytes, where: str | Path) -> Tokenizer:
    """The tokenizer of the content of a `tokenizer.json`, once it has passed its trial.

    Raises:
        DflashError: see `check_tokenizer`.
    """
    check_tokenizer(data, where)
    return load_tokenizer(data, where)


def load_tokenizer(data: bytes, where: str | Path) -> Tokenizer:
    """The same where `check_tokenizer` has said that it passed."""
    with _one_error("is not a readable tokenizer", where):
        tokenizer = Tokenizer.from_buffer(data)
    # Settings of its training that would cut or lengthen prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer | BoundedEncoder, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text; `special` adds those that the tokenizer adds by itself.

    Raises:
        DflashError: the tokenizer fails.
    """
    with _one_error("cannot encode", text=text[:60]):
        if isinstance(tokenizer, BoundedEncoder):
            return tokenizer.encode(text, special=special)
        # `encode` holds the interpreter's lock: a million characters would stop a server for 3 s.
        (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(found.ids)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of the tokens, special ones included.

    Raises:
        DflashError: the tokenizer fails.
    """
    try:  # outside `with`: twice for every token of an answer
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))
    except BaseException:
        with _one_error("cannot decode what was generated"):
            raise


@contextmanager
def _one_error(what: str, where: str | Path = "tokenizer", text: str = "") -> Iterator[None]:
    try:
        yield
    except SandboxLostError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if text:
            what = f"{what} {one_line(ascii(text), 40)}"
        raise DflashError(f"{what}: {one_line(error)}", where=where) from error
