"""Prompts: their order, their length, their sets."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from dflash_perf.harness.load_prompts import PromptSet, Tokenizer, load_prompts
from dflash_perf.harness.sweep_config import SweepConfig

from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder

DEMO = data_folder("demo_pair")
GIVEN = {"input_file": str(DEMO / "prompts.jsonl"), "tokenizer": str(DEMO / "target")}


def _config(**given: object) -> SweepConfig:
    raw = {"configurations": [{"name": "a", "url": "h:1"}], **given}
    return SweepConfig.model_validate(raw)


def test_every_prompt_once_before_any_twice() -> None:
    order = list(islice(PromptSet(("a", "b", "c", "d")).order("3"), 8))
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]
    assert list(islice(PromptSet(("a", "b", "c", "d")).order("3"), 8)) == order
    assert list(islice(PromptSet(tuple("abcdefgh")).order("4"), 8)) != list(range(8))
    assert PromptSet(("ab", "c")).digest != PromptSet(("a", "bc")).digest


@pytest.mark.parametrize("isl", [3, 50, 700])
def test_prompts_of_a_length_are_text_of_the_file(isl: int) -> None:
    tokenizer = Tokenizer(DEMO / "target")
    prompts = load_prompts(_config(**GIVEN, isl=isl), tokenizer)
    assert len(prompts.texts) == 32
    assert {tokenizer.count(prompt) for prompt in prompts.texts} == {isl}
    original = load_prompts(_config(**GIVEN), tokenizer).texts[0]
    shorter = min(len(original), len(prompts.texts[0])) - 4
    assert prompts.texts[0][:shorter] == original[:shorter]


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer, path = Tokenizer(DEMO / "target" / "tokenizer.json"), tmp_path / "p.jsonl"
    given: dict[str, object] = {"input_file": str(path)}
    for text, more, piece in (
        ("", {}, "holds no prompt"),
        ('{"prompt": "  "}\n', {}, "prompt 1 is empty"),
        ('{"text": "a"}\n', {}, 'must be an object with a text "prompt"'),
        ('{"prompt": "a few words"}\n', {"isl": 1000, "tokenizer": "t"}, "of 1,000 need more"),
        ('{"prompt": "a", "schema": "x"}\n', {}, 'must be a JSON schema, not "x"'),
        ('{"prompt": "a", "schema": {}}\n', {"ignore_eos": True}, "ignore_eos: prompts with"),
    ):
        path.write_text(text)
        with pytest.raises(DflashError, match=piece):
            load_prompts(_config(**given, **more), tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DflashError, match="not a readable tokenizer"):
        Tokenizer(tmp_path)


def test_named_sets_are_cut_from_their_own_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(DEMO / "target")
    lines = (DEMO / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "b.jsonl").write_text("".join(lines[3:5]))
    sets = {name: str(tmp_path / f"{name}.jsonl") for name in "ba"}
    given = {"prompts": sets, "tokenizer": str(DEMO / "target")}
    whole = load_prompts(_config(**given), tokenizer)
    assert whole.set_names == ("b", "b", "a", "a", "a")
    other = load_prompts(_config(**given | {"prompts": {"c": sets["b"], "a": sets["a"]}}), None)
    assert other.texts == whole.texts and other.digest != whole.digest
    prompts = load_prompts(_config(**given, isl=40, limit_prompts=1), tokenizer)
    assert prompts.set_names == ("b", "a")
    assert {tokenizer.count(text) for text in prompts.texts} == {40}
    length = 1 + sum(tokenizer.count(text) for text in whole.texts[:2])
    with pytest.raises(DflashError, match="need more"):
        load_prompts(_config(**given, isl=length), tokenizer)


def test_prompts_with_a_schema(tmp_path: Path) -> None:
    path, schema = tmp_path / "p.jsonl", {"type": "object", "title": "é"}
    rows = [{"prompt": "a", "schema": schema}, {"prompt": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(_config(input_file=str(path)), None)
    assert prompts.schemas[1] is None and json.loads(prompts.schemas[0] or "") == schema
    assert load_prompts(_config(prompts={"x": str(path)}), None).schemas == prompts.schemas
    assert load_prompts(_config(**GIVEN), None).schemas == ()
