"""The token that stands at positions to draft: one that no text contains."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_trt.errors import DflashError
from dflash_trt.text.tokenizer import BundleTokenizer

_RESERVED = re.compile(r"mask|reserved|unused", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MaskToken:
    """A token id, and why it was chosen."""

    token_id: int
    why: str


def choose_mask_token(
    tokenizer: BundleTokenizer, vocab_size: int, end_ids: tuple[int, ...], given: int | None
) -> MaskToken:
    """The mask token: `given`, or the first that there is of

    1. a special token whose name says mask, reserved or unused;
    2. a row of the embedding behind the tokenizer's last entry;
    3. the last special token that neither the chat template nor the end of a text uses.

    Raises:
        DflashError: `given` is outside the vocabulary or ends texts; there is none to choose.
    """
    if given is not None:
        if not 0 <= given < vocab_size or given in end_ids:
            what = f"{given} is not a token from 0 to {vocab_size - 1} that ends no text"
            raise DflashError(what, where="--mask-token-id", usage=True)
        return MaskToken(given, "given")
    added = sorted(tokenizer.core.get_added_tokens_decoder().items())
    special = [
        (token_id, token.content)
        for token_id, token in added
        if token.special and token_id < vocab_size and token_id not in end_ids
    ]
    for token_id, name in special:
        if _RESERVED.search(name):
            return MaskToken(token_id, f"{name}, a special token that texts do not use")
    entries = tokenizer.core.get_vocab_size(with_added_tokens=True)
    largest = max(tokenizer.core.get_vocab(with_added_tokens=True).values(), default=entries - 1)
    if largest + 1 < vocab_size:
        return MaskToken(largest + 1, "the embedding's first row that no token of the text has")
    template, named = tokenizer.chat_template or "", tokenizer.special_texts.values()
    for token_id, name in reversed(special):
        if name not in template and name not in named:
            return MaskToken(token_id, f"{name}, the last special token that chats do not use")
    raise DflashError(
        "the tokenizer has no reserved or unused token to stand for what is to be drafted",
        where="--mask-token-id",
        fix="pass the id of a token that no text of yours contains",
        usage=True,
    )
