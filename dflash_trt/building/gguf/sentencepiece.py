"""SentencePiece's BPE, which merges by scores, in the words of the tokenizers library.

A file has a score for each piece and no merges: of two neighbours that make a piece, those go first
whose piece scores highest. What no piece covers becomes bytes. A text is cut at user-defined and
control tokens before anything else happens to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.building.gguf.config import FROM_HF
from dflash_trt.building.gguf.gguf_file import AGAIN, GgufFile
from dflash_trt.core.strict_json import quoted

NAME = "sentencepiece"
"""What `Vocabulary.pre_name` says of these; a file says "default" there, or nothing."""
DEFAULT_IDS: Mapping[str, int] = {"unknown": 0, "bos": 1, "eos": 2}
"""llama.cpp's own for a file that does not name them."""
TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")
"""What llama.cpp ends a turn at where a file has such a token and names none."""

_SPACE = "▁"
_PLACEHOLDER = "[PAD"
"""How the converter names ids that the model's tokenizer does not have."""


def read_scores(file: GgufFile, count: int) -> list[float]:
    """Reads a score for each of `count` pieces.

    Raises:
        DflashError: there are others; or the text is changed in ways that the file cannot say.
    """
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if file.fields.get(f"tokenizer.ggml.{key}"):
            what = f"tokenizer.ggml.{key}: how it normalises a text is not known"
            raise file.error(what, FROM_HF)
    stated = file.fields.get("tokenizer.ggml.scores")
    listed = stated if isinstance(stated, list) else []
    scores = [one for one in listed if isinstance(one, float) and math.isfinite(one)]
    if not len(scores) == len(listed) == count:
        what = f"tokenizer.ggml.scores must have a finite number for each of {count} tokens"
        raise file.error(what, AGAIN)
    return scores


def merges_by_score(
    file: GgufFile, pieces: Mapping[str, int], scores: Sequence[float], unused: Sequence[str]
) -> list[tuple[str, str]]:
    """Every two of `pieces` that make a third, best first; the longer left one where they tie.

    Args:
        pieces: normal ones with their ids; others neither merge nor are made.
        unused: pieces that are made, and cut again at the end.

    Raises:
        DflashError: scores that say no order; an unused piece that two others make.
    """
    found = [
        (-scores[index], -cut, cut - len(text), text)
        for text, index in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    if found and len({score for score, *_ in found}) == 1 and len({one for *_, one in found}) > 1:
        what = "all scores are equal, so the order of merging is not in it"
        raise file.error(f"tokenizer.ggml.scores: {what}", FROM_HF)
    for text in unused:
        cuts = range(1, 0 if text.startswith(_PLACEHOLDER) else len(text))
        if any(text[:cut] in pieces and text[cut:] in pieces for cut in cuts):
            what = f"token {quoted(text)} is unused, and is made before it is cut again"
            raise file.error(what, FROM_HF)
    found.sort(key=lambda one: one[:3])  # stable: by id where all else ties
    return [(text[:-cut], text[-cut:]) for _, cut, _, text in found]


def steps(unknown: str | None, *, has_prefix: bool) -> dict[str, Any]:
    """The parts of a tokenizer.json that differ; `has_prefix`: a space comes before every text.

    It comes behind each control and user-defined token, too.
    """
    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }
