"""Tokenizers of SentencePiece give the ids that its definition does, and transformers."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_trt.building.gguf.gguf_file import GgufFile
from dflash_trt.building.gguf.tokenizer import read_vocabulary
from tests.importing.files import CONTROL, UNUSED, USER_DEFINED, write_gguf
from tests.importing.test_tokenizer import CORPUS, TEXTS, imported
from tests.models.helpers import refused
from tests.reference.checkpoints import write_target

NORMAL, UNKNOWN, BYTE = 1, 2, 6
LEARNED = (
    "er in ▁t he ▁the re ers ▁in ▁u ▁us ▁users ey ▁k ▁key aa ▁a aaa 12 ▁12 23 ▁'v 've é▁ 中文 tt"
)
KINDS = {"<unk>": UNKNOWN} | dict.fromkeys(("<s>", "</s>", "<end_of_turn>"), CONTROL)
KINDS |= dict.fromkeys(("\n", "\n\n", "  ", "   ", "<b>"), USER_DEFINED)
KINDS |= dict.fromkeys((f"<0x{byte:02X}>" for byte in range(256)), BYTE)
KINDS |= dict.fromkeys((*LEARNED.split(), *sorted({*LEARNED, *"<>0xA.,"} - {" "})), NORMAL)
KINDS |= {"[PAD1]": UNUSED}
IDS = {text: index for index, text in enumerate(KINDS)}
NAMED: dict[str, Any] = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# What transformers reads as the definition has it. It puts no space before one, nor behind a token
# that is found whole, and joins a run of spaces that is longer than any token in another order.
PLAIN = {
    "llama": ["In 1234, aaaaa keys", "naïve — 中文 🙂👍🏽 ½", "[the] key"],
    "gemma3": ["In 1234,  aaaa a 🙂👍🏽 ½", " x\n\n\ty <b>z</b>   <0x0A>", "a</s>b"],
}


def keys(architecture: str, **more: Any) -> dict[str, Any]:
    scores = [-float(index) for index in range(len(KINDS))]
    stated = NAMED | {"model": "llama", "tokens": list(KINDS), "scores": scores}
    stated |= {"token_type": [*KINDS.values()], "add_space_prefix": architecture == "llama"}
    return {f"tokenizer.ggml.{key}": value for key, value in (stated | more).items()}


def defined(text: str, *, has_space: bool) -> list[int]:
    """Ids by the definition: of neighbours that make a piece the best are joined, leftmost."""
    whole = [one for one, kind in KINDS.items() if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, sorted(whole, key=len)[::-1]))})", text):
        symbols = list((" " * (has_space and part != "") + part).replace(" ", "▁"))
        while part not in whole:
            pairs = [IDS.get(left + right, 0) for left, right in pairwise(symbols)]
            best = min((one for one in pairs if one > IDS["<0xFF>"]), default=None)
            if best is None:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for one in [part] if part in whole else symbols:
            parts = [one] if one in IDS else [f"<0x{byte:02X}>" for byte in one.encode()]
            found += [IDS[each] for each in parts]
    return found


@pytest.mark.parametrize("architecture", PLAIN)
def test_ids_and_texts(architecture: Any, tmp_path: Path) -> None:
    source = write_target(tmp_path / "hf", architecture, num_layers=3, hidden=32, vocab=8)
    given = keys(architecture)
    write_gguf(tmp_path / "m.gguf", source, keys=given | {"tokenizer.ggml.merges": None})
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = imported(given, tmp_path)
    for text in [*TEXTS, *PLAIN[architecture], CORPUS, " " * 9, "<s> [PAD1]<unk>x", "the <0x0A>"]:
        ids = defined(text, has_space=architecture == "llama")
        assert ours.encode(text) == [1, *ids], text
        if text in PLAIN[architecture]:
            assert theirs(text).input_ids == [1, *ids], text
            assert ours.core.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert AutoTokenizer.from_pretrained(tmp_path)(CORPUS).input_ids == ours.encode(CORPUS)


def test_tokens_of_each_kind(tmp_path: Path) -> None:
    assert imported(keys("llama", add_eos_token=True), tmp_path).encode("") == [1, 2]
    silent = {key: one for key, one in keys("llama").items() if key[15:] not in NAMED}
    turns = {"tokenizer.chat_template": "{{ messages[0].content }}<end_of_turn>"}
    for more, ends in (({}, (2,)), (turns, (2, 3))):
        found = read_vocabulary(GgufFile(tmp_path / "m", 0, silent | more, {}))
        assert (found.ends, found.prefix, found.special["unknown"]) == (ends, 1, 0)
    with refused('token "erer" is unused, and is made before it is cut again'):
        imported(keys("llama", tokens=[*list(KINDS)[:-1], "erer"]), tmp_path)
