"""`generate --url`: what it prints is what `generate` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dflash_trt.serving.client.text_assembly import TextAssembler
from tests.cli.conftest import Run, run  # noqa: F401
from tests.serving.served import PROMPTS, Served

# Times differ, and the contract has no place for what was accepted where in a block.
OWN = re.compile(r"_s$|tokens_per_second|conditional_acceptance|interactivity|throughput")


def _without_times(record: object) -> object:
    if isinstance(record, dict):
        kept = {key: value for key, value in record.items() if not OWN.search(key)}
        return {key: _without_times(value) for key, value in kept.items()}
    return [_without_times(item) for item in record] if isinstance(record, list) else record


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", 0.7, "--top-p", 0.9, "--seed", 5],
        ["--temperature", 1.1, "--top-k", 7, "--seed", 2**64 - 1],
        ["--temperature", 1, "--top-p", 1e-50, "--seed", 3],  # 0 in FP32, which is: keep all
        ["--stop", "\n", "--stop", "silver"],
        ["--ignore-eos"],
    ],
)
def test_the_same_output(run: Run, served: Served, options: list[object]) -> None:  # noqa: F811
    common = ["--prompt", PROMPTS[2], "--raw", "--max-tokens", 24, *options]
    local = run("generate", served.bundle, *common)
    remote = run("generate", "--url", served.grpc, *common)
    assert (remote.code, remote.out) == (0, local.out)
    shown = local.err.splitlines()
    assert remote.err.splitlines()[:2] == shown[:2] and len(remote.err.splitlines()) == len(shown)
    records = [
        run("generate", source, *common, "--json").json
        for source in (served.bundle, f"--url={served.grpc}")
    ]
    assert records[0].keys() == records[1].keys()
    assert _without_times(records[0]) == _without_times(records[1])
    assert records[1]["time_to_first_token_s"] > 0


def test_many_prompts(run: Run, served: Served, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "many.jsonl"
    # More than the server holds: the client keeps the rest back.
    texts = [PROMPTS[number % len(PROMPTS)] for number in range(40)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    common = ["--prompt-file", file, "--raw", "--max-tokens", 8]
    local = run("generate", served.bundle, *common)
    remote = run("generate", "--url", served.grpc, *common)
    assert (remote.code, remote.out) == (0, local.out)
    records = [
        run("generate", source, *common, "--json").json
        for source in (served.bundle, f"--url={served.grpc}")
    ]
    assert _without_times(records[0]) == _without_times(records[1])


def test_a_chat_template_is_not_skipped_in_silence(
    run: Run,  # noqa: F811
    served: Served,
) -> None:
    outcome = run("generate", "--url", served.grpc, "--prompt", "x")
    outcome.fails(2, "has a chat template", "--raw")


def test_what_the_server_refuses(run: Run, served: Served) -> None:  # noqa: F811
    arguments = ["generate", "--url", served.grpc, "--raw", "--prompt", "a b c " * 600]
    run(*arguments).fails(1, "tokens do not fit: the context of 1024")
    hot = ["generate", "--url", served.grpc, "--raw", "--prompt", "a", "--temperature", 1e40]
    run(*hot).fails(2, "temperature: 1e+40 is too large to be sent")


def test_a_text_that_changes_is_an_error(
    run: Run,  # noqa: F811
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(*_: object, **__: object) -> str:
        raise ValueError("a streamed text changed after it was sent")

    monkeypatch.setattr(TextAssembler, "push", change)
    run("generate", "--url", served.grpc, "--raw", "--prompt", "x").fails(1, "text changed")


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--url", "grpc://localhost:1", "--prompt", "x"], ["no server answers", "serve"]),
        (["--url", "http://localhost:1", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "localhost:1", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://a:b", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://u@a:1", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://a:1/x", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://a:1?x", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "", "--prompt", "x"], ["--url", "grpc://HOST:PORT"]),
        (["--url", "grpc://a:1"], ["no prompt"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--temperature", "-1"], ["temperature"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--stop", ""], ["stop", "empty"]),
        (["bundle", "--url", "grpc://a:1", "--prompt", "x"], ["BUNDLE", "server decides"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--view"], ["--view", "server decides"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--threads", "1"], ["--threads"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--no-speculation"], ["--no-speculation"]),
        (["--url", "grpc://a:1", "--prompt", "x", "--block-size", "4"], ["--block-size"]),
        (["--prompt", "x"], ["no model", "BUNDLE", "--url"]),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], pieces: list[str]) -> None:  # noqa: F811
    outcome = run("generate", *arguments)
    outcome.fails(1 if "no server answers" in pieces else 2, *pieces)
    assert outcome.out == ""
