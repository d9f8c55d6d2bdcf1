"""Through a pair's own graphs, speculated samples follow the target's law."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding import Generator, GeneratorOptions, Penalties, Request, SamplingParams
from dflash_trt.decoding.drafter_kinds import DFLASH, PROMPT_LOOKUP
from dflash_trt.sampling.token_rules import TokenRules
from tests.backends.steps import forward_rows
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.deepspec import write_deepspec
from tests.reference.eagle import write_eagle
from tests.sampling.definitions import exact_law

VOCAB = 10  # holds every token of the prompts that drafts are fitted on
LENGTH = 3
PROMPT = (3, 1, 4, 1, 5)
TARGET = {
    "vocab": VOCAB,
    "num_layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 48,
    "logit_gain": 0.7,
}
DRAFT = {"num_layers": 1, "block_size": LENGTH, "target_layer_ids": [0]}


@pytest.fixture(scope="module")
def executor(make_pair: PairFactory) -> OnnxRuntimeExecutor:
    built = make_pair("qwen3", TARGET, DRAFT, fit_steps=60, max_batch=VOCAB ** (LENGTH - 1))
    return built.open()


@pytest.fixture(scope="module")
def others(make_pair: PairFactory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyPair]:
    """Pairs of one target and a Markov chain, or an EAGLE-3 head, of random weights."""
    base = make_pair("qwen3", {**TARGET, "num_layers": 5}, {**DRAFT, "target_layer_ids": [1]})
    pairs = {}
    for name in ("dspark", "eagle3"):
        folder = tmp_path_factory.mktemp(name)
        target = base.folder / "target"
        (folder / "target").symlink_to(target)
        if name == "dspark":
            markov = torch.eye(VOCAB), 2 * torch.randn(VOCAB, VOCAB)
            write_deepspec(folder / "draft", base.folder / "draft", target, markov)
        else:
            write_eagle(folder / "draft", target, taps=(1, 2, 4), draft_vocab=None)
        pairs[name] = bundle_pair(folder, BuildSpec(overwrite=True), max_batch=100)
    return pairs


def exact_joint(
    executor: OnnxRuntimeExecutor, sampling: SamplingParams, like: Request | None = None
) -> np.ndarray:
    """P(first, second, third token): `target_only` on every prefix there is, in one batch.

    `like` has penalties and rules, which change the rows by what stands before them.
    """
    outputs = list(product(range(VOCAB), repeat=LENGTH - 1))
    ids = [[*PROMPT, *output] for output in outputs]
    logits = forward_rows(executor, ids, [0] * len(ids), graph="target_only")[:, len(PROMPT) - 1 :]
    joint = np.empty((VOCAB,) * LENGTH)
    for output, rows in zip(outputs, logits, strict=True):
        if like is not None:
            rows = [_change(like, row, output[:place]) for place, row in enumerate(rows)]
        laws = [exact_law(row, sampling) for row in rows]
        before = math.prod(law[token] for law, token in zip(laws[:-1], output, strict=True))
        joint[output] = before * laws[-1]
    return joint


def _change(like: Request, row: np.ndarray, before: tuple[int, ...]) -> np.ndarray:
    """The row behind `before`, its penalties and mask written down once more."""
    changed, penalties, seen = row.copy(), like.penalties, {*PROMPT, *before}
    for token_id, value in penalties.bias:
        changed[token_id] += value
    for token in seen:
        factor = penalties.repetition
        changed[token] *= 1 / factor if changed[token] > 0 else factor
    for token in {*before}:
        changed[token] -= before.count(token) * penalties.frequency + penalties.presence
    for word in like.rules.bad:
        if before[len(before) - len(word) + 1 :] == word[:-1] and len(word) <= len(before) + 1:
            changed[word[-1]] = -np.inf
    return changed


PLAIN = Request(prompt_ids=PROMPT, max_tokens=LENGTH)
CHANGED = replace(
    PLAIN,
    penalties=Penalties(frequency=0.9, presence=0.5, repetition=1.4, bias=((2, 1.0), (5, -1.0))),
    rules=TokenRules(bad=((6,), (2, 4))),
)

MIN_P = SamplingParams(temperature=1.0, min_p=0.02)
TOP = SamplingParams(temperature=1.0, top_k=4, top_p=0.9)


@pytest.mark.parametrize(
    ("name", "sampling", "like", "seeds"),
    [
        ("dflash", MIN_P, CHANGED, 1_000),
        ("dflash", TOP, PLAIN, 1_000),
        ("dspark", MIN_P, CHANGED, 1_000),
        ("eagle3", MIN_P, PLAIN, 1_000),
        exhaustive("dflash", SamplingParams(temperature=1.0), PLAIN, 20_000),
        exhaustive("prompt-lookup", MIN_P, CHANGED, 5_000),
    ],
)
def test_speculated_tokens_follow_the_law(
    name: str,
    sampling: SamplingParams,
    like: Request,
    seeds: int,
    request: pytest.FixtureRequest,
) -> None:
    """First, second and third token over many seeds, each against its marginal."""
    others = {"dspark", "eagle3"}
    executor: OnnxRuntimeExecutor = (
        request.getfixturevalue("others")[name].open()
        if name in others
        else request.getfixturevalue("executor")
    )
    drafter = PROMPT_LOOKUP if name == "prompt-lookup" else DFLASH
    joint = exact_joint(executor, sampling, like)
    assert joint.sum() == pytest.approx(1, abs=1e-9)
    asked = [replace(like, sampling=replace(sampling, seed=seed)) for seed in range(seeds)]
    results = Generator(executor, options=GeneratorOptions(drafter=drafter)).generate(asked)
    drawn = np.array([result.token_ids for result in results])
    assert joint[tuple(drawn.T)].all(), "nothing comes that may not"
    for position in range(LENGTH):
        law = joint.sum(axis=tuple({*range(LENGTH)} - {position}))
        is_common = seeds * law > 5
        counts = np.bincount(drawn[:, position], minlength=VOCAB)[is_common]
        expected = seeds * law[is_common]
        expected *= counts.sum() / expected.sum()
        assert chisquare(counts, expected).pvalue > 0.001, f"token {position}"
    if drafter == DFLASH:
        assert sum(result.statistics.accepted_tokens for result in results) > 0
