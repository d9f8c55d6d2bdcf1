"""`generate --url`: what it prints is what `generate` prints."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.covering import exhaustive
from tests.serving.served import PROMPTS, QUEUE, SLOTS, Served

# Times differ.
OWN = re.compile(r"_s$|tokens_per_second|interactivity|throughput")
SECONDS = re.compile(r"\d+\.\d+ s\b")


def _without_times(record: object) -> object:
    if isinstance(record, dict):
        kept = {key: value for key, value in record.items() if not OWN.search(key)}
        return {key: _without_times(value) for key, value in kept.items()}
    return [_without_times(item) for item in record] if isinstance(record, list) else record


@pytest.mark.parametrize(
    "options",
    [
        ["--regex", "[a-z]{3,9} #[0-9]{4}"],
        exhaustive(["--temperature", 1, "--top-p", 1e-50, "--seed", 3]),  # in FP32 0: keep all
        exhaustive(["--temperature", 1.1, "--top-k", 7, "--seed", 2**64 - 1, "--stop", "silver"]),
        exhaustive(["--ignore-eos"]),
    ],
)
def test_the_same_output(run: Run, served: Served, options: list[object]) -> None:
    common = ["--prompt", PROMPTS[2], "--raw", "--max-tokens", 24, *options]
    local, remote = (run("generate", *one, *common) for one in _sources(served))
    assert (remote.code, remote.out) == (0, local.out)
    here, there = (SECONDS.sub("s", one.err).splitlines() for one in (local, remote))
    assert there[:2] == here[:2] and len(there) == len(here)


def test_many_prompts(run: Run, served: Served, tmp_path: Path) -> None:
    """More than the server holds: the client keeps the rest back."""
    file = tmp_path / "many.jsonl"
    texts = [PROMPTS[number % len(PROMPTS)] for number in range(SLOTS + QUEUE + 4)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    common = ["--prompt-file", file, "--raw", "--max-tokens", 6, "--json"]
    here, there = (run("generate", *one, *common).json for one in _sources(served))
    assert here.keys() == there.keys() and _without_times(here) == _without_times(there)


def _sources(served: Served) -> tuple[tuple[object, ...], ...]:
    """The bundle with blocks that no clock changes, as it is served, and the server."""
    return (served.bundle, "--block-schedule", "none"), (f"--url={served.grpc}",)


def test_what_the_server_refuses(run: Run, served: Served) -> None:
    raw = ["generate", "--url", served.grpc, "--raw", "--prompt"]
    run(*raw, "a b c " * 600).fails(1, "tokens do not fit: the context of 1024")
    run(*raw, "a", "--temperature", 1e40).fails(2, "temperature: 1e+40 is too large to be sent")
    chat = run("generate", "--url", served.grpc, "--prompt", "x")
    chat.fails(2, "has a chat template", "--raw")


def test_wrong_addresses(run: Run) -> None:
    """More that is refused stands in tests/frozen."""
    for url in ("grpc://", "grpc://a:1?x"):
        run("generate", "--url", url, "--prompt", "x").fails(2, "--url", "grpc://HOST:PORT")
    gone = run("generate", "--url", "grpc://localhost:1", "--prompt", "x")
    gone.fails(1, "no server answers", "dflash-trt serve")


def test_a_chat(run: Run, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both remember what was said: the second answer continues the first."""
    typed = f"{PROMPTS[1]}\n{PROMPTS[2]}\n"
    options = ("--chat", "--max-tokens", 12, "--stop", "silver", "--system", "crew")
    said = []
    for source in ((served.bundle,), (served.bundle, "--url", served.grpc)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        said.append(run.well("generate", *source, *options))
    assert said[0].out == said[1].out and len(said[0].out) > 20
    assert f"the model at {served.grpc}" in said[1].err
    run("generate", "--chat", "--url", served.grpc).fails(2, "needs a template", "pass the BUNDLE")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
    nobody = ("--url", "grpc://127.0.0.1:9")
    run("generate", served.bundle, "--chat", *nobody).fails(1, "127.0.0.1:9")
