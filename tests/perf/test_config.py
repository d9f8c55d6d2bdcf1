"""A sweep's configuration: every mistake is one line with the key, and flags win over the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dflash_perf.harness.sweep_config import OfferedLoad, read_sweep_config

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
