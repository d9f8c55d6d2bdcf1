"""The bytes of single tokens, which may be parts of a character."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: those that print are themselves."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    characters = {chr(byte): byte for byte in printed}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """Looks tokens of `tokenizer` up, special ones included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            id_: one.content for id_, one in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = tokenizer.decoder
        kinds = json.dumps(json.loads(decoder.__getstate__())) if decoder is not None else ""
        self._byte_level = _byte_characters() if '"ByteLevel"' in kinds else None
        self._fallback = '"ByteFallback"' in kinds

    def __getitem__(self, token_id: int) -> bytes:
        """Its bytes; none of an id that is no token's."""
        if token_id in self._added:
            return self._added[token_id].encode()
        text: str = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level is not None:
            known = self._byte_level
            return b"".join(
                bytes([known[char]]) if char in known else char.encode() for char in text
            )
        found = _BYTE_TOKEN.fullmatch(text) if self._fallback else None
        return text.replace("▁", " ").encode() if found is None else bytes.fromhex(found[1])
