"""A small tokenizer with harmony's special tokens; every other character is a token."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer

from dflash_trt.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.text.tokenizers import make_plain

SPECIAL = (START, END, MESSAGE, CHANNEL, RETURN, CALL, CONSTRAIN, "<|endoftext|>")


@cache
def make_harmony() -> Tokenizer:
    return make_plain(*SPECIAL)


def encode(text: str) -> list[int]:
    """Token ids; harmony's tokens are written as themselves."""
    return list(make_harmony().encode(text).ids)


ANALYSIS = "<|channel|>analysis<|message|>Simple: 2 + 2, é 🙂.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4 🙂.<|return|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
    '{"location": "Tokyo"}<|call|>'
)
