"""The corpus is a function of its seed, and its tokenizer keeps any UTF-8 text."""

from __future__ import annotations

import re

import pytest
from transformers import PreTrainedTokenizerFast

from demo_pair.recipe.corpus import TRAIN_STREAM, document, documents
from demo_pair.recipe.tokenizer import END_ID, MASK_ID, save_tokenizer, train_tokenizer


def test_same_seed_same_documents_in_any_order() -> None:
    together = list(documents(3, TRAIN_STREAM, 20))
    assert [document(3, TRAIN_STREAM, i) for i in reversed(range(20))] == together[::-1]
    assert document(4, TRAIN_STREAM, 0) != together[0]


def test_first_document_is_golden() -> None:
    assert document(0, TRAIN_STREAM, 0).splitlines()[:4] == [
        "route #8262 to #8274 in lima at load 8",
        "parcels: wet ram gold, mad hen silver, odd pug silver",
        "drivers: ben, ana, leo",
        "parcel #8262 holds wet ram, gold, load 8",
    ]


def test_ids_count_up_to_the_last_one_of_the_header() -> None:
    for text in documents(0, TRAIN_STREAM, 50):
        first, last = map(int, re.findall(r"#(\d{4})", text.split("\n")[0]))
        told = [int(n) for n in re.findall(r"#(\d{4})", text)]
        assert told[:2] == [first, last]
        assert sorted(set(told)) == list(range(first, last + 2))
        assert told[2:] == sorted(told[2:])


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    trained = train_tokenizer(documents(0, TRAIN_STREAM, 100), 400)
    return save_tokenizer(trained, tmp_path_factory.mktemp("tokenizer"), 128)


def test_round_trip(fast: PreTrainedTokenizerFast) -> None:
    for text in ("", " ", "\n\n\t x", "naïve café 😀 漢字", "007 #12", "a\x00b\x7f"):
        assert fast.decode(fast(text)["input_ids"]) == text


def test_vocabulary(fast: PreTrainedTokenizerFast) -> None:
    assert len(fast) == 400
    assert fast.eos_token_id == END_ID == 0
    assert fast.mask_token_id == MASK_ID == 1
    assert len(fast("#4817")["input_ids"]) == 5
