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
        ("input_file: p\n", ["configurations is missing"]),
        (YAML + "goodput: {ttf: 1}\n", ["unknown key 'goodput.ttf'", "nearest: 'ttft'"]),
        (
            YAML.replace("url:", "parameters: {a: {b: 1}}, url:"),
            ["parameters: a is nested, which gRPC does not take"],
        ),
        (YAML + "concurrency: [0]\n", ["concurrency.0", "got 0"]),
        (YAML + "concurrency: [1.5]\n", ["concurrency.0", "got 1.5"]),
        (YAML + "request_rate: [-1]\n", ["request_rate.0", "got -1"]),
        (YAML + "request_rate: [.inf]\n", ["request_rate.0", "got inf"]),
        (YAML + "- {name: A, url: x}\n", ["'A' and another configuration are both 'a'"]),
        (YAML + "- {name: 'a/../b', url: x}\n", ["configurations.1.name"]),
        (YAML + "baseline: b\n", ["baseline 'b' is no configuration's name"]),
        (YAML + "- {name: b, url: x, gpus: 2}\n", ["gpus for all configurations"]),
        (YAML + "isl: 5\n", ["isl needs a tokenizer"]),
        (YAML + "categories: [coding]\n", ["dataset speed-bench"]),
        (YAML + "duration_s: 3\nrequest_count: 4\n", ["request_count or duration_s"]),
        (YAML + "seed: 99999999999\n", ["seed", "got 99999999999"]),
        (YAML + "temperature: .nan\n", ["temperature", "got nan"]),
        ("[]\n", ["must be a YAML mapping"]),
        (
            SETS + "prompts: {a: p.jsonl}\ndataset: speed-bench\n",
            ["dataset speed-bench is read from an input_file"],
        ),
        (SETS + "prompts: {}\n", ["give prompts, or isl and tokenizer"]),
    ],
)
def test_mistakes(tmp_path: Path, text: str, pieces: list[str]) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    message = refusal_of(read_sweep_config, path, {})
    for piece in [str(path), *pieces]:
        assert piece in message, message


@pytest.mark.parametrize("name", ["all", "a b"])
def test_names_of_sets(tmp_path: Path, name: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{SETS}prompts: {{{name}: p.jsonl}}\n")
    message = refusal_of(read_sweep_config, path, {})
    assert f"prompts: {name!r} cannot name a set" in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "sweep: --url is missing, a required key"),
        (GOOD | {"isl": 5}, "sweep: isl needs a tokenizer to count with"),
        (
            GOOD | {"duration_s": 3.0, "request_count": 4},
            "sweep: give request_count or duration_s, not both",
        ),
        (GOOD | {"categories": ("x",)}, "sweep: categories belong to dataset speed-bench"),
        (GOOD | {"baseline": "c"}, "sweep: baseline 'c' is no configuration's name"),
        (
            {"configurations": [ONE]},
            "sweep: give --prompts, or isl and tokenizer",
        ),
        (
            GOOD | {"timeout_s": -2.0, "top_p": 3.0},
            "sweep: 2 errors: top_p: Input should be less than or equal to 1, got 3.0; "
            "timeout_s: Input should be greater than 0, got -2.0",
        ),
        (
            GOOD | {"configurations": [{**ONE, "name": "a/b"}]},
            "sweep: configurations.0.name: String should match pattern",
        ),
    ],
)
def test_the_command_line_reads_of_options(given: dict[str, Any], said: str) -> None:
    assert refusal_of(read_sweep_config, None, given).startswith(said)


def test_a_file_with_options_reads_of_both(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(YAML + "top_p: 3.0\n")
    said = refusal_of(read_sweep_config, path, {"osl": 0})
    assert "top_p: Input" in said and "--osl: Input" in said


def test_paths_of_the_file_are_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(YAML)
    assert read_sweep_config(path, {}).input_file == str(tmp_path / "p.jsonl")
    assert read_sweep_config(path, {"input_file": "q.jsonl"}).input_file == "q.jsonl"


def test_a_load_given_replaces_the_whole_load_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(YAML + "concurrency: [1, 2]\nrequest_count: 3\n")
    config = read_sweep_config(path, {"request_rate": [2.5, 1.0], "duration_s": 4.0})
    assert config.loads == (OfferedLoad(request_rate=1.0), OfferedLoad(request_rate=2.5))
    assert config.request_count is None and config.duration_s == 4


def test_defaults() -> None:
    config = read_sweep_config(None, GOOD)
    assert config.concurrency == (1, 2, 4, 8, 16) and config.repeats == 3
    assert config.baseline_name == "a"
    assert [load.slug for load in config.loads] == ["c1", "c2", "c4", "c8", "c16"]
    assert "is no configuration's name" in refusal_of(
        read_sweep_config, None, GOOD | {"baseline": "c"}
    )
    assert refusal_of(read_sweep_config, None, {}).startswith("sweep: ")
