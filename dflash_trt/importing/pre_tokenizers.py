"""How a byte-level tokenizer cuts text before it merges, by GGUF's names for it.

A GGUF file states no pattern: the name stands for one that its reader must know. Each is that of
the model's own tokenizer.json, where it differs from llama.cpp's (Qwen normalises to NFC).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.text.tokenizer_calls import LLAMA3, QWEN2


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`steps` and `normalizer` as tokenizer.json has them.

    `ignore_merges` takes a piece that is a token as it is. `adds_bos` holds where the file does
    not say.
    """

    steps: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _bytes(*, use_regex: bool) -> Mapping[str, Any]:
    """Bytes as printable characters; `use_regex` cuts as GPT-2 does before."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> tuple[Mapping[str, Any], ...]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return (split, _bytes(use_regex=False))


_GPT2 = PreTokenizer((_bytes(use_regex=True),))
_LLAMA_BPE = PreTokenizer(_split(LLAMA3), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(({"type": "Digits", "individual_digits": True}, *_GPT2.steps)),
    "qwen2": PreTokenizer(_split(QWEN2), normalizer={"type": "NFC"}),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
}
