"""A sweep's configuration and prompts: every mistake is one line with the key."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from dflash_perf.harness.load_prompts import PromptSet, Tokenizer, load_prompts
from dflash_perf.harness.sweep_config import OfferedLoad, SweepConfig, read_sweep_config

from dflash_trt.errors import DflashError
from dflash_trt.models.build_config import data_folder
from tests.cli.conftest import refusal_of

ONE = {"name": "a", "url": "h:1"}
GOOD: dict[str, Any] = {"configurations": [ONE], "input_file": "p.jsonl"}
SETS = "configurations:\n- {name: a, url: 'h:1'}\n"
YAML = f"input_file: p.jsonl\n{SETS}"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (YAML + "concurency: [1]\n", ["unknown key 'concurency'", "nearest: 'concurrency'"]),
        (
            YAML.replace("url:", "urll:"),
            ["unknown key 'configurations.0.urll'", "nearest: 'url'"],
        ),
        (YAML.replace("url: 'h:1'", "gpus: 1"), ["configurations.0.url is missing"]),
        ("input_file: p\n", ["has no configuration"]),
        (YAML + "goodput: {ttf: 1}\n", ["unknown key 'goodput.ttf'", "nearest: 'ttft'"]),
        (
            YAML.replace("url:", "parameters: {a: {b: 1}}, url:"),
            ["parameters: a is nested, which gRPC does not take"],
        ),
        (YAML + "concurrency: [0]\n", ["concurrency.0", "got 0"]),
        (YAML + "request_rate: [.inf]\n", ["request_rate.0", "got inf"]),
        (YAML + "- {name: A, url: x}\n", ["'A' and another configuration are both 'a'"]),
        (YAML + "- {name: 'a/../b', url: x}\n", ["configurations.1.name"]),
        (YAML + "baseline: b\n", ["baseline 'b' is no configuration's name"]),
        (YAML + "- {name: b, url: x, gpus: 2}\n", ["gpus for all configurations"]),
        (YAML + "isl: 5\n", ["isl needs a tokenizer"]),
        (YAML + "duration_s: 3\nrequest_count: 4\n", ["request_count or duration_s"]),
        (YAML + "seed: 99999999999\n", ["seed", "got 99999999999"]),
        (YAML + "temperature: .nan\n", ["temperature", "got nan"]),
        ("[]\n", ["must be a YAML mapping"]),
        (YAML + "prompts: {a: p.jsonl}\n", ["an input_file or named sets, not both"]),
        (SETS + "prompts: {}\n", ["give prompts"]),
        (SETS + "prompts: {all: p.jsonl}\n", ["prompts: 'all' cannot name a set"]),
    ],
)
def test_mistakes(tmp_path: Path, text: str, pieces: list[str]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    message = refusal_of(read_sweep_config, path, {})
    for piece in pieces:
        assert piece in message, message


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(YAML + "concurrency: [1, 2]\nrequest_count: 3\n")
    assert read_sweep_config(path, {}).input_file == str(tmp_path / "p.jsonl")
    assert read_sweep_config(path, {"input_file": "q.jsonl"}).input_file == "q.jsonl"
    config = read_sweep_config(path, {"request_rate": [2.5, 1.0], "duration_s": 4.0})
    assert config.loads == (OfferedLoad(request_rate=1.0), OfferedLoad(request_rate=2.5))
    assert config.request_count is None and config.duration_s == 4


def test_defaults() -> None:
    config = read_sweep_config(None, GOOD)
    assert config.repeats == 3 and config.baseline_name == "a"
    assert [load.slug for load in config.loads] == ["c1", "c2", "c4", "c8", "c16"]
    assert "the --url of a server" in refusal_of(read_sweep_config, None, {})


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
