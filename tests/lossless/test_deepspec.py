"""Rung 2: a Markov chain of drafts changes no bit of any logit, and is replayed as it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.build import BuildOptions
from dflash_trt.graph.form import CacheDtype
from dflash_trt.replay import Answer, Replay
from dflash_trt.runtime import Request, SamplingParams
from tests.lossless.runs import check_groups, make_requests, run, run_baseline
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.deepspec import write_deepspec

VOCAB, SLOTS = 64, 8
SAMPLED = SamplingParams(temperature=0.8, seed=5)
FORMS: dict[str, dict[str, Any]] = {
    "linear": {},
    "paged": {"page_size": 8, "pages": 61},
    "fp8": {"cache_dtype": CacheDtype.FP8},
}


def requests(sampling: SamplingParams) -> list[Request]:
    return make_requests(VOCAB, SLOTS, sampling)


@pytest.fixture(scope="module")
def checkpoints(make_pair: PairFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose Markov head knows which token followed which in the target's own answers."""
    base = make_pair("qwen3", {"vocab": VOCAB}, {"target_layer_ids": [1, 3]}, max_seq_len=192)
    answers = run_baseline(base.open(), requests(SamplingParams()))
    followed = torch.zeros(VOCAB, VOCAB)
    for one in answers:
        for before, token in zip(one.token_ids, one.token_ids[1:], strict=False):
            followed[token, before] += 20
    folder = tmp_path_factory.mktemp("deepspec")
    (folder / "target").symlink_to(base.folder / "target")
    markov = torch.eye(VOCAB), followed
    write_deepspec(folder / "draft", base.folder / "draft", base.folder / "target", markov)
    return folder


def build(folder: Path, form: str) -> TinyPair:
    options = BuildOptions(overwrite=True, **FORMS[form])
    return bundle_pair(folder, options, max_batch=SLOTS, max_seq_len=192)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "drawn"])
def test_a_chain_keeps_every_bit(form: str, sampling: SamplingParams, checkpoints: Path) -> None:
    executor = open_executor(build(checkpoints, form).bundle, threads=1)
    asked = requests(sampling)
    expected = run_baseline(executor, asked)
    for batch, live in ((1, False), (SLOTS, False), (SLOTS, True)):
        check_groups(executor, asked, expected, batch, live=live)
    if not sampling.temperature:
        statistics = [one.statistics for one in run(executor, asked)]
        accepted = sum(one.accepted_tokens for one in statistics)
        assert 2 * accepted > sum(one.steps for one in statistics), "drafts are taken"


def test_a_replay_counts_what_the_loop_counted(checkpoints: Path) -> None:
    bundle = build(checkpoints, "linear").bundle
    asked = requests(SamplingParams())
    found = run(open_executor(bundle, threads=1), asked)
    answers = [Answer(a.prompt_ids, b.token_ids) for a, b in zip(asked, found, strict=True)]
    with Replay(bundle) as replay:
        result = replay.measure(answers)
    counts = [one.statistics.acceptance_histogram for one in found]
    assert [one.acceptance_histogram for one in result.per_answer] == counts
    table = result.table
    taken = [
        int(rank)
        for ranks, accepted in zip(table.rank, table.accepted, strict=True)
        for rank in ranks[:accepted]
    ]
    assert taken and set(taken) == {0}, "an accepted draft is the highest of its own logits"
