"""A pair served by `dflash-trt serve` as users start it, and the same pair in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import dflash_trt
from dflash_trt.cli.main import main
from dflash_trt.config import data_folder
from dflash_trt.runtime import Request, RequestResult, SamplingParams
from dflash_trt.text.prompts import read_prompts
from tests.waiting import PATIENCE_S

TEMPLATE = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}"
SLOTS = 8
QUEUE = 8
LONG_CONTEXT = 1 << 14
FREE_PORTS = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--openai-port", "0"]
PROMPTS = read_prompts(data_folder("demo_pair") / "prompts.jsonl")[:16]
# The middle of a text that the demo pair continues for as long as it may.
GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    SamplingParams(temperature=1.3, top_k=5, seed=2**64 - 1),
)


@dataclass(frozen=True)
class Served:
    """Where a served bundle answers: URLs, of the metrics host and port."""

    bundle: Path
    grpc: str
    metrics: str
    openai: str


class Local:
    """The bundle's engine in this process: what served texts must equal."""

    def __init__(self, bundle: Path) -> None:
        self.pair = dflash_trt.load(bundle)
        self.tokenizer = self.pair.tokenizer

    def run(
        self,
        prompt: str,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        stops: tuple[str, ...] = (),
        *,
        chat: bool = False,
    ) -> RequestResult:
        """The result for a text, or for a user's message."""
        request = self._request(prompt, max_tokens, sampling, stops, chat)
        return self.pair.run([request])[0]

    def run_all(
        self, prompts: Sequence[str], max_tokens: int, samplings: Sequence[SamplingParams]
    ) -> list[RequestResult]:
        """Results of several prompts, which take the samplings in turn."""
        return self.pair.run(
            [
                self._request(prompt, max_tokens, samplings[number % len(samplings)])
                for number, prompt in enumerate(prompts)
            ]
        )

    def _request(
        self,
        prompt: str,
        max_tokens: int,
        sampling: SamplingParams,
        stops: tuple[str, ...] = (),
        chat: bool = False,
    ) -> Request:
        ids = self.tokenizer.encode_chats([prompt])[0] if chat else self.tokenizer.encode(prompt)
        return Request(
            prompt_ids=tuple(ids), max_tokens=max_tokens, sampling=sampling, stop_strings=stops
        )


def build_chat_demo(folder: Path) -> Path:
    """A bundle of the demo pair, with a chat template that it does not have by itself."""
    target = folder / "target"
    shutil.copytree(data_folder("demo_pair") / "target", target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    bundle = folder / "demo-bundle"
    arguments = ["--target", "demo", "--target-checkpoint", str(target), "-o", str(bundle)]
    assert main(["build", *arguments]) == 0
    return bundle


def build_long_demo(folder: Path) -> Path:
    """A bundle of the demo pair whose context is sixteen times what it was trained for."""
    arguments: list[str] = []
    for role in ("target", "draft"):
        checkpoint = folder / role
        shutil.copytree(data_folder("demo_pair") / role, checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        config["max_position_embeddings"] = LONG_CONTEXT
        (checkpoint / "config.json").write_text(json.dumps(config))
        arguments += [f"--{role}-checkpoint", str(checkpoint)]
    bundle = folder / "long-bundle"
    arguments += ["--target", "demo", "--max-seq-len", str(LONG_CONTEXT), "-o", str(bundle)]
    assert main(["build", *arguments]) == 0
    return bundle


@contextmanager
def serving(source: Path, bundle: Path, *arguments: str) -> Iterator[Served]:
    """Runs `serve` on `source`, a bundle or a repository of it; SIGTERM must end it well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_trt", "serve", str(source), *FREE_PORTS, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready after ")
        addresses = dict(process.stdout.readline().split()[:2] for _ in range(4))
        yield Served(
            bundle, addresses["gRPC"], urlsplit(addresses["metrics"]).netloc, addresses["OpenAI"]
        )
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
