"""The tokenizer that an import writes gives the ids that transformers reads from the same file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from dflash_trt.building.gguf.gguf_file import GgufFile
from dflash_trt.building.gguf.tokenizer import read_vocabulary, tokenizer_files
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.importing.files import UNUSED, tokenizer_keys, write_gguf
from tests.models.helpers import refused
from tests.reference.checkpoints import write_target
from tests.text.tokenizers import SAMPLE

CORPUS = (
    SAMPLE + "In 2024 there were 1234567 users,  42 of them in 10 towns; I'm sure they've 3.14 "
    "pies.\n\n\tdef f(x):\r\n\t\treturn x  ** 2   # ½ and ٣\nWE'LL SEE. école 中文字 1 2 3\n" * 4
)
TEXTS = [
    "",
    " ",
    "  12",
    "a  1",
    "In 2024, 1234567 users!!",
    "I'm, I'M, they'VE they'll",
    "\n\n \t x\r\n\r\n  y   ",
    "<|end|>a<|end|> <think>b</think>",
    "e\u0301cole \u212b ﬁ",
    "½²٣Ⅷ 中文字1、2",
    "🙂🙃👍🏽 naïve",
    "\x00\x7f\ufeff\u200b\u00a0\u3000x",
]
NAMES = ("gpt-2", "smollm", "qwen2", "llama-bpe")


@cache
def trained() -> Tokenizer:
    """Merges that go over digits and spaces, so that each way to cut gives other ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.train_from_iterator(
        CORPUS.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=900,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<|end|>", "<|s|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = trained().get_vocab_size()
    return write_target(
        tmp_path_factory.mktemp("source") / "hf", "llama", num_layers=1, hidden=32, vocab=vocab
    )


def keys(name: str, **more: Any) -> dict[str, Any]:
    stated = tokenizer_keys(trained(), name) | {f"ggml.{key}": one for key, one in more.items()}
    return {f"tokenizer.{key}": value for key, value in stated.items()}


def imported(fields: dict[str, Any], folder: Path) -> BundleTokenizer:
    """What the importer makes of a file that has these keys and no weights."""
    file = GgufFile(folder / "m.gguf", 0, fields, {})
    for name, text in tokenizer_files(file, read_vocabulary(file), 128).items():
        (folder / name).write_text(text, encoding="utf-8")
    return BundleTokenizer(folder)


@pytest.fixture(scope="module")
def theirs(source: Path) -> dict[str, Any]:
    """transformers' own reading of each file."""
    found: dict[str, Any] = {}
    for name in NAMES:
        write_gguf(source.parent / f"{name}.gguf", source, keys=keys(name))
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=f"{name}.gguf")
        found[name] = tokenizer.backend_tokenizer
    # Three things that transformers 5.23 leaves out, and the models' own tokenizers have.
    found["qwen2"].normalizer = Qwen2Tokenizer().backend_tokenizer.normalizer
    found["smollm"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), found["smollm"].pre_tokenizer]
    )
    core = json.loads(found["llama-bpe"].to_str())
    core["model"]["ignore_merges"] = True
    found["llama-bpe"] = Tokenizer.from_str(json.dumps(core))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_are_those_of_transformers(
    name: str, theirs: dict[str, Any], tmp_path: Path
) -> None:
    check(name, theirs, tmp_path, [*TEXTS, CORPUS, *CORPUS.splitlines()])


def check(name: str, theirs: dict[str, Any], folder: Path, texts: list[str]) -> None:
    fields = keys(name, add_bos_token=False)
    tokens = fields["tokenizer.ggml.tokens"]
    ours = imported(fields, folder)
    assert ours.core.get_vocab() == {text: index for index, text in enumerate(tokens)}
    for text in texts:
        ids = theirs[name].encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        for skipped in (False, True):
            assert ours.core.decode(ids, skip_special_tokens=skipped) == theirs[name].decode(
                ids, skip_special_tokens=skipped
            )


@pytest.mark.parametrize(
    ("name", "more", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"bos_token_id": 468}, ([], [])),
        ("gpt-2", {"bos_token_id": 468, "add_bos_token": True}, ([468], [])),
        (
            "gpt-2",
            {"bos_token_id": 468, "add_bos_token": True, "add_eos_token": True},
            ([468], [467]),
        ),
        ("llama-bpe", {"bos_token_id": 468}, ([468], [])),
        ("llama-bpe", {"bos_token_id": 468, "add_bos_token": False}, ([], [])),
    ],
)
def test_what_is_put_around_a_text(
    name: str, more: dict[str, Any], around: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    assert trained().token_to_id("<|s|>") == 468 and trained().token_to_id("<|end|>") == 467
    ours = imported(keys(name, **more), tmp_path)
    assert ours.encode("") == [*around[0], *around[1]]
    plain = ours.encode("a b", special=False)
    assert ours.encode("a b") == [*around[0], *plain, *around[1]]
    pair = ours.core.encode("a", "b").ids
    first, second = (ours.encode(one) for one in "ab")
    assert pair == [*first, *second]


def test_a_piece_that_is_a_token_needs_no_merges_where_llama_says_so(tmp_path: Path) -> None:
    whole = trained().get_vocab_size()
    for name, ids in (("llama-bpe", [whole]), ("gpt-2", trained().encode("qzq").ids)):
        fields = keys(name, add_bos_token=False)
        fields["tokenizer.ggml.tokens"].append("qzq")
        fields["tokenizer.ggml.token_type"].append(1)
        assert imported(fields, tmp_path).encode("qzq") == ids


def test_ids_that_end_a_text(tmp_path: Path) -> None:
    fields = keys("gpt-2", eot_token_id=468, eom_token_id=467, bos_token_id=3)
    vocabulary = read_vocabulary(GgufFile(tmp_path / "m", 0, fields, {}))
    assert vocabulary.ends == (467, 468)
    assert vocabulary.special_ids() == {
        "bos_token_id": 3,
        "eos_token_id": [467, 468],
        "pad_token_id": None,
    }
    del fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eom_token_id"]
    vocabulary = read_vocabulary(GgufFile(tmp_path / "m", 0, fields, {}))
    assert vocabulary.special_ids()["eos_token_id"] == 468


def test_unused_tokens_are_left_out_and_keep_their_ids_free(tmp_path: Path) -> None:
    fields = keys("gpt-2")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD1]", "[PAD1]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], UNUSED, UNUSED]
    vocabulary = read_vocabulary(GgufFile(tmp_path / "m", 0, fields, {}))
    assert vocabulary.size == len(vocabulary.ids) + 2
    ours = imported(fields, tmp_path)
    assert "[PAD1]" not in ours.core.get_vocab()
    assert ours.encode("[PAD1]") == trained().encode("[PAD1]").ids


@pytest.mark.parametrize(
    ("change", "piece"),
    [
        ({"model": "t5"}, 'its tokenizer is "t5"; only byte-level BPE (gpt2) is imported, and'),
        ({"model": "llama"}, "scores must have a finite number for each of 470 tokens"),
        ({"model": "llama", "scores": [-1e3] * 470}, "all scores are equal"),
        ({"model": "llama", "precompiled_charsmap": [1]}, "how it normalises a text is not"),
        ({"model": None}, "only byte-level BPE"),
        ({"pre": "qwen35"}, "pre-tokenizer \"qwen35\" is not known (nearest: 'qwen2')"),
        ({"pre": None}, 'pre-tokenizer "default" is not known'),
        ({"tokens": None}, "tokens must be a list of 1 to"),
        ({"tokens": ["a"]}, "for each of 1 tokens"),
        ({"token_type": [9] * 470}, "must have one of"),
        ({"merges": [" a"]}, 'merge 0, " a", does not make one token of two'),
        ({"merges": ["e r", "a <|end|>"]}, 'merge 1, "a <|end|>", does not'),
        ({"eos_token_id": 470}, "eos_token_id is 470, not one of 470 tokens"),
        ({"bos_token_id": True}, "bos_token_id is true"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"add_bos_token": True}, "add_bos_token is true, and bos is null"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], piece: str, tmp_path: Path) -> None:
    fields = keys("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    stated = {key: value for key, value in fields.items() if value is not None}
    with refused(piece):
        imported(stated, tmp_path)
    assert not list(tmp_path.iterdir())


def test_tokens_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    fields = keys("gpt-2")
    fields["tokenizer.ggml.tokens"][300] = fields["tokenizer.ggml.tokens"][301]
    with refused("is given twice"):
        imported(fields, tmp_path)


def test_chat_templates(tmp_path: Path) -> None:
    fields = keys("gpt-2") | {
        "tokenizer.chat_template": "{{ messages[0].content }}<|end|>",
    }
    assert imported(fields, tmp_path).encode_chats(["a b"]) == [[*trained().encode("a b").ids, 467]]
    for bad in ("x" * (2 << 20), 3):
        with refused("chat_template must be text of at most 1 MiB"):
            imported(fields | {"tokenizer.chat_template": bad}, tmp_path)
