"""A small tokenizer with harmony's special tokens; every other character is a token."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_trt.text.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
)

SPECIAL = (START, END, MESSAGE, CHANNEL, RETURN, CALL, CONSTRAIN, "<|endoftext|>")


@cache
def make_harmony() -> Tokenizer:
    """Byte-level, without merges: é is two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def encode(text: str) -> list[int]:
    """Token ids; harmony's tokens are written as themselves."""
    return list(make_harmony().encode(text).ids)


ANALYSIS = "<|channel|>analysis<|message|>Simple: 2 + 2, é 🙂.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4 🙂.<|return|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>"
    '{"location": "Tokyo"}<|call|>'
)
