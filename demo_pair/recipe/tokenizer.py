"""The demo pair's tokenizer: byte-level BPE trained on the corpus, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

END_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"
SPECIAL_TOKENS = (END_TOKEN, MASK_TOKEN)
END_ID = SPECIAL_TOKENS.index(END_TOKEN)
MASK_ID = SPECIAL_TOKENS.index(MASK_TOKEN)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a `tokenizers.Tokenizer` of at most `vocab_size` ids.

    All 256 bytes are in the vocabulary, so any UTF-8 text survives encode and decode; ids 0 and
    1 are the end and the mask token.
    """
    split = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(split.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path, max_length: int) -> PreTrainedTokenizerFast:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        mask_token=MASK_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return fast
