"""Tokenizers of tests, gpt-oss's harmony among them."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_trt.text import harmony

SAMPLE = "The cache holds 12 keys; größer — 深い 深層 學習 🙂🙃 naïve, the key of the block.\n" * 5


ALPHABET = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def make_plain(*special: str) -> Tokenizer:
    """Byte-level, without merges: é is two tokens; then special tokens."""
    tokenizer = Tokenizer(models.BPE(ALPHABET, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


@cache
def make_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [SAMPLE],
        trainers.BpeTrainer(
            vocab_size=320,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


SPECIAL = (
    *(harmony.START, harmony.END, harmony.MESSAGE, harmony.CHANNEL, harmony.RETURN),
    *(harmony.CALL, harmony.CONSTRAIN, "<|endoftext|>"),
)


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
