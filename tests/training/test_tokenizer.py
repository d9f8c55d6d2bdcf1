"""Any UTF-8 text survives the tokenizer; the special tokens have fixed ids."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from dflash_trt.training.corpus import TRAIN_STREAM, documents
from dflash_trt.training.tokenizer import END_ID, MASK_ID, save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    trained = train_tokenizer(documents(0, TRAIN_STREAM, 100), 400)
    return save_tokenizer(trained, tmp_path_factory.mktemp("tokenizer"), 128)


def texts() -> Iterator[str]:
    yield from ("", " ", "\n\n\t x", "naïve café 😀 漢字", "007 #12", "a\x00b\x7f")
    rng = Random(0)
    for _ in range(200):
        points = (rng.randrange(1, 0x11000) for _ in range(rng.randrange(20)))
        yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def test_round_trip(fast: PreTrainedTokenizerFast) -> None:
    for text in texts():
        assert fast.decode(fast(text)["input_ids"]) == text


def test_vocabulary(fast: PreTrainedTokenizerFast) -> None:
    assert len(fast) == 400
    assert fast.eos_token_id == END_ID == 0
    assert fast.mask_token_id == MASK_ID == 1
    assert len(fast("#4817")["input_ids"]) == 5
