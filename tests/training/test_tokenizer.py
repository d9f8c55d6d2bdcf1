"""Any UTF-8 text survives the tokenizer; the special tokens have fixed ids."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from dflash_trt.training.corpus import TRAIN_STREAM, documents
from dflash_trt.training.tokenizer import END_ID, MASK_ID, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def trained() -> object:
    return train_tokenizer(documents(0, TRAIN_STREAM, 100), 400)


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n\t x", "naïve café 😀 漢字", "007 #12", "a\x00b\x7f"]
)
def test_round_trip(trained: object, text: str, tmp_path: Path) -> None:
    fast = save_tokenizer(trained, tmp_path, 128)
    assert fast.decode(fast(text)["input_ids"]) == text


def test_round_trip_of_random_text(trained: object, tmp_path: Path) -> None:
    fast = save_tokenizer(trained, tmp_path, 128)
    rng = Random(0)
    for _ in range(200):
        points = (rng.randrange(1, 0x11000) for _ in range(rng.randrange(20)))
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert fast.decode(fast(text)["input_ids"]) == text


def test_vocabulary(trained: object, tmp_path: Path) -> None:
    fast = save_tokenizer(trained, tmp_path, 128)
    assert len(fast) == 400
    assert fast.eos_token_id == END_ID == 0
    assert fast.mask_token_id == MASK_ID == 1
    assert len(fast("#4817")["input_ids"]) == 5
