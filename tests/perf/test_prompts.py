"""Prompts: their order, their length, SPEED-Bench's rows."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pytest
from dflash_perf.harness.load_prompts import PromptSet, Tokenizer, load_prompts, random_prompts
from dflash_perf.harness.speed_bench import read_speed_bench
from dflash_perf.harness.sweep_config import SweepConfig

from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder

DEMO = data_folder("demo_pair")


def _config(**given: object) -> SweepConfig:
    raw = {"configurations": [{"name": "a", "url": "h:1"}], **given}
    return SweepConfig.model_validate(raw)


def test_every_prompt_once_before_any_twice() -> None:
    order = list(islice(PromptSet(("a", "b", "c", "d")).order("3"), 8))
    assert sorted(order[:4]) == sorted(order[4:]) == [0, 1, 2, 3]
    assert list(islice(PromptSet(("a", "b", "c", "d")).order("3"), 8)) == order
    assert list(islice(PromptSet(tuple("abcdefgh")).order("4"), 8)) != list(range(8))


def test_digest_tells_prompts_apart() -> None:
    assert PromptSet(("ab", "c")).digest != PromptSet(("a", "bc")).digest


@pytest.mark.parametrize("isl", [3, 50, 700])
def test_prompts_of_a_length_are_text_of_the_file(isl: int) -> None:
    tokenizer = Tokenizer(DEMO / "target")
    given = {"input_file": str(DEMO / "prompts.jsonl"), "tokenizer": str(DEMO / "target")}
    prompts = load_prompts(_config(**given, isl=isl), tokenizer)
    assert len(prompts.texts) == 32
    assert {tokenizer.count(prompt) for prompt in prompts.texts} == {isl}
    original = load_prompts(_config(**given), tokenizer).texts[0]
    shorter = min(len(original), len(prompts.texts[0])) - 4
    assert prompts.texts[0][:shorter] == original[:shorter]


def test_random_prompts_have_their_length_and_begin_apart() -> None:
    tokenizer = Tokenizer(DEMO / "target")
    given = {"tokenizer": str(DEMO / "target"), "limit_prompts": 20}
    prompts = load_prompts(_config(**given, isl=50), tokenizer)
    assert len(set(prompts.texts)) == 20
    assert {tokenizer.count(text) for text in prompts.texts} == {50}
    assert len({" ".join(text.split()[:3]) for text in prompts.texts}) == 20
    assert load_prompts(_config(**given, isl=50), tokenizer) == prompts
    assert load_prompts(_config(**given, isl=50, seed=1), tokenizer).texts[0] not in prompts.texts
    with pytest.raises(DflashError, match="random prompts of 1 tokens, of 1,000"):
        random_prompts(tokenizer, 1, 1000, 0)


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer(DEMO / "target" / "tokenizer.json")
    path = tmp_path / "p.jsonl"
    for text, piece in [
        ("", "holds no prompt"),
        ('{"prompt": "  "}\n', "prompt 1 is empty"),
        ('{"text": "a"}\n', 'must be an object with a text "prompt"'),
    ]:
        path.write_text(text)
        with pytest.raises(DflashError, match=piece):
            load_prompts(_config(input_file=str(path)), None)
    path.write_text('{"prompt": "a few words"}\n')
    config = _config(input_file=str(path), isl=1000, tokenizer="t")
    with pytest.raises(DflashError, match="prompts of 1,000 need more"):
        load_prompts(config, tokenizer)
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
    _write_rows(path, [{"prompt": "a", "schema": schema}, {"prompt": "b"}])
    prompts = load_prompts(_config(input_file=str(path)), None)
    assert prompts.schemas[1] is None and json.loads(prompts.schemas[0] or "") == schema
    named = load_prompts(_config(prompts={"x": str(path)}), None)
    assert named.schemas == prompts.schemas
    with pytest.raises(DflashError, match="ignore_eos: prompts with a schema end where it does"):
        load_prompts(_config(input_file=str(path), ignore_eos=True), None)
    _write_rows(path, [{"prompt": "a"}, {"prompt": "b"}])
    plain = load_prompts(_config(input_file=str(path), ignore_eos=True), None)
    assert plain.schemas == () and plain.digest != prompts.digest
    _write_rows(path, [{"prompt": "a", "schema": "x"}])
    with pytest.raises(DflashError, match='"schema" must be a JSON schema, not "x"'):
        load_prompts(_config(input_file=str(path)), None)


def _write_rows(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_speed_bench(tmp_path: Path) -> None:
    rows = [
        {"question_id": f"{n}", "category": category, "turns": [f"first {n}", "second"]}
        for n, category in enumerate(["coding", "math", "coding"])
    ]
    _write_rows(tmp_path / "test.jsonl", rows)
    config = _config(input_file=str(tmp_path), dataset="speed-bench")
    assert load_prompts(config, None).texts == ("first 0", "first 1", "first 2")
    assert read_speed_bench(tmp_path / "test.jsonl", ("coding",)) == ["first 0", "first 2"]
    with pytest.raises(DflashError, match=r"no category 'codign' \(nearest: 'coding'\)"):
        read_speed_bench(tmp_path, ("codign",))


def test_what_is_not_speed_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DflashError, match="throughput_1k"):
        read_speed_bench(tmp_path)
    for row in [{"prompt": "a"}, {"category": "a", "turns": []}, {"category": 1, "turns": ["a"]}]:
        _write_rows(tmp_path / "test.jsonl", [row])
        with pytest.raises(DflashError, match="no category and turns"):
            read_speed_bench(tmp_path)
    with (tmp_path / "test.jsonl").open("r+b") as sparse:
        sparse.truncate(5 << 29)
    with pytest.raises(DflashError, match="too large for a data set"):
        read_speed_bench(tmp_path)
    (tmp_path / "test.jsonl").rename(tmp_path / "test.parquet")
    with pytest.raises(DflashError, match="too large for a data set"):
        read_speed_bench(tmp_path)
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DflashError, match="pip install pyarrow"):
        read_speed_bench(tmp_path)
