"""Tiny targets of two families that learn a language, their drafts, and the pairs served."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from dflash_trt.models.build_config import data_folder
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.frozen.command_line import run_well
from tests.reference.checkpoints import Family, write_target
from tests.reference.generate import load_target
from tests.serving.client import LLM, ask_grpc, make_fields
from tests.serving.served import Served, serving
from tests.shared import Shared

pytestmark = pytest.mark.exhaustive

DEMO = data_folder("demo_pair") / "target"
VOCAB, WORDS, ROW = 464, 61, 96

TARGETS: dict[Family, dict[str, Any]] = {
    "qwen3_5": {"num_layers": 4, "head_dim": 32},
    "gemma4": {"num_layers": 4, "tie": True, "logit_gain": 1.0},
}
SMALL = (
    "--set raw=true --set answer-tokens=72 --hours 0.1 --set max-length=128 --set rows=48 "
    "--set batch-rows=8 --set anchors=16 --threads 1 --block-size 8"
).split()
TRAININGS: dict[Family, list[str]] = {
    "qwen3_5": "--set layers=1 --set steps=240".split(),
    "gemma4": "--set layers=2 --set taps=1,2,3 --set steps=480".split(),
}


@dataclass(frozen=True)
class Trained:
    """A pair whose draft was trained, as a bundle; what `train-draft --json` said."""

    bundle: Path
    prompts: Path
    told: dict[str, Any]


def say(first: int, count: int) -> str:
    """So many words of a language in which a word says which one is next."""
    chance = random.Random(0)
    letters = ("bcdfghjklmnprstvw", "aeiou")
    words = ["".join(map(chance.choice, letters * 2)) for _ in range(WORDS)]
    said = [first]
    while len(said) < count:
        said.append((5 * said[-1] + 7) % WORDS)
    return " ".join(words[word] for word in said)


def teach(folder: Path, steps: int = 120) -> None:
    """Makes the target in `folder` speak it; rewrites its weights, and gives it a tokenizer."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = [tokenizer.encode(say(first, ROW)).ids[:ROW] for first in range(WORDS)]
    rows, model = torch.tensor(texts), load_target(folder)
    for weight in model.parameters():
        weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = rows[torch.randint(WORDS, (8,), generator=generator)]
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    path, learnt = folder / "model.safetensors", model.state_dict()
    stored = load_file(path)
    weights = {
        name: learnt[name].to(old.dtype).contiguous() if name in learnt else old
        for name, old in stored.items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)


def train(folder: Path, family: Family) -> None:
    """A target that speaks it, a draft for that one, and a bundle of both."""
    target = write_target(folder / "target", family, vocab=VOCAB, eos_token_id=0, **TARGETS[family])
    teach(target)
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": say(first, 4 + first % 3)}) for first in range(WORDS)]
    prompts.write_text("\n".join(lines), "utf-8")
    given = ["--target", target, "--prompts", f"words={prompts}", *SMALL, *TRAININGS[family]]
    told = run_well("train-draft", *given, "-o", folder / "draft", "--json").json
    (folder / "told.json").write_text(json.dumps(told), "utf-8")


@pytest.fixture(scope="module", params=TARGETS)
def trained(request: pytest.FixtureRequest, shared: Shared) -> Trained:
    folder = shared.folder(train, request.param)
    told = json.loads((folder / "told.json").read_text("utf-8"))
    return Trained(folder / "draft-bundle", folder / "prompts.jsonl", told)


@pytest.fixture(scope="module")
def served(tritonserver: TritonServerBinary, trained: Trained) -> Iterator[Served]:
    # Drafts are never left out: whether they pay at a batch is a question for the machine's clock.
    with serving(trained.bundle, trained.bundle, "--block-schedule", "none") as running:
        yield running


def test_three_tokens_a_step_and_every_bit(trained: Trained) -> None:
    assert trained.told["best"]["acceptance_length"] >= 3
    told = run_well("verify", trained.bundle, "--max-tokens", 48, "--limit-prompts", 8, "--json")
    assert told.json["lossless"] and all(mode["identical"] for mode in told.json["modes"])


def test_it_is_served_and_swept(served: Served, trained: Trained, tmp_path: Path) -> None:
    prompt = say(7, 5)
    alone = run_well("generate", trained.bundle, "--prompt", prompt, "--max-tokens", 40).out
    fields = make_fields(LLM, prompt, max_tokens=40)
    assert ask_grpc(served.address, LLM, fields).texts[0].strip() in alone
    where = ["--url", served.grpc, "--prompts", trained.prompts, "-o", tmp_path / "results"]
    (tmp_path / "short.yaml").write_text("request_count: 8\nrepeats: 1\n")
    load = ["--config", tmp_path / "short.yaml", "--concurrency", "1,4", "--osl", 32]
    told = run_well("sweep", *where, *load, "--json").json
    lengths = [one["values"]["acceptance_length"]["mean"] for one in told["points"]]
    assert len(lengths) == 2 and min(lengths) >= 3
