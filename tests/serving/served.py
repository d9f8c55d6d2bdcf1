"""A pair served by `dflash-trt serve` as users start it, and the same pair in this process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_trt.cli.main import main
from dflash_trt.config import data_folder
from dflash_trt.runtime import SamplingParams
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository
from dflash_trt.text.prompts import read_prompts
from tests.pairs import SilentProgress
from tests.waiting import PATIENCE_S

TEMPLATE = "{% for m in messages %}{{ eos_token }}{{ m.content }}{% endfor %}"
SLOTS = 8
QUEUE = 8
LONG_CONTEXT = 1 << 14
SERVER_PORTS = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]  # any free ones
FREE_PORTS = [*SERVER_PORTS, "--openai-port", "0"]
PROMPTS = read_prompts(data_folder("demo_pair") / "prompts.jsonl")[:16]
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

    @property
    def address(self) -> str:
        """Of gRPC, as clients other than ours write it."""
        return self.grpc.removeprefix("grpc://")


def package(bundle: Path, folder: Path, **options: Any) -> Path:
    """Writes a model repository of `bundle` to `folder`; `options` are RepositoryOptions'."""
    write_repository(bundle, folder, RepositoryOptions(**options), SilentProgress())
    return folder


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
