"""`generate --url`: what it prints is what `generate` prints."""

from __future__ import annotations

import json
import re
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


def test_wrong_addresses(run: Run) -> None:
    """More that is refused stands in tests/frozen."""
    for url in ("grpc://", "grpc://a:1?x"):
        run("generate", "--url", url, "--prompt", "x").fails(2, "--url", "grpc://HOST:PORT")
    gone = run("generate", "--url", "grpc://localhost:1", "--prompt", "x")
    gone.fails(1, "no server answers", "dflash-trt serve")

    grpc = ("generate", "--chat", "--url", "grpc://127.0.0.1:9")
    run(*grpc).fails(2, "--url", "is no http:// or https:// address")
