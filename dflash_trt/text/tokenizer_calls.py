"""Calls of the tokenizers library, whose errors, Rust's panics included, become ours.

A panic is no `Exception` in Python; the library has written a note about it to stderr by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.bounded import BoundedEncoder
from dflash_trt.text.foreign import ForeignProcessLostError
from dflash_trt.text.tokenizer_trial import check_tokenizer


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
    with _one_error(f"cannot encode {one_line(ascii(text[:60]), 40)}"):
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
    with _one_error("cannot decode what was generated"):
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))


@contextmanager
def _one_error(what: str, where: str | Path = "tokenizer") -> Iterator[None]:
    try:
        yield
    except ForeignProcessLostError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DflashError(f"{what}: {one_line(error)}", where=where) from error
