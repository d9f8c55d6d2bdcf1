"""/tokenize and /detokenize of the OpenAI front: the tokenizer's own answers, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dflash_trt.serving.openai.options import FrontOptions
from dflash_trt.serving.openai.tokenization import MAX_CHARACTERS
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import Front, ScriptedModel, post, switching_front

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
TEXT = "é red\nfox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    with switching_front(folder) as front:
        yield front


def ask(front: Front, path: str, body: Any) -> tuple[int, Any]:
    status, answer, _ = post(front(ScriptedModel()), path, body)
    return status, json.loads(answer)


def test_there_and_back(front: Front, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert ids
    expected = {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    for model in ({}, {"model": "demo"}):
        assert ask(front, "/tokenize", {"prompt": TEXT} | model) == (200, expected)
    _, named = ask(front, "/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert named["token_strs"] == [tokenizer.id_to_token(one) for one in ids]
    assert ask(front, "/detokenize", {"tokens": ids}) == (200, {"prompt": TEXT})
    assert ask(front, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    rendered = tokenizer.encode(f"<user>{TEXT}<answer>", add_special_tokens=False).ids
    assert ask(front, "/tokenize", chat)[1]["tokens"] == rendered


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {"prompt": "a", "model": 1}, 400, "model"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "a" * (MAX_CHARACTERS + 1)}, 400, "prompt"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [1, True]}, 400, "tokens[1]"),
        ("detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("detokenize", {"tokens": [299999]}, 400, "tokens[0]"),
        ("detokenize", {"tokens": [1 << 80]}, 400, "tokens[0]"),
    ],
)
def test_refusals(front: Front, path: str, body: Any, status: int, param: str) -> None:
    got, answer = ask(front, f"/{path}", body)
    assert (got, answer["error"]["param"]) == (status, param)
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_key_is_needed_where_there_are_keys(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-twenty-char\n")
    keys.chmod(0o600)
    with switching_front(folder, FrontOptions(key_file=keys)) as front:
        assert ask(front, "/tokenize", {"prompt": "a"})[0] == 401
        assert ask(front, "/detokenize", {"tokens": [1]})[0] == 401
