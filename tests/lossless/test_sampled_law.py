"""Through a pair's own graphs, speculated samples follow the target's law."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.runtime import Generator, Request, SamplingParams
from tests.backends.steps import forward_rows
from tests.covering import exhaustive
from tests.pairs import PairFactory
from tests.sampling.law import exact_law

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
    built = make_pair("qwen3", TARGET, DRAFT, fit_steps=150, max_batch=VOCAB ** (LENGTH - 1))
    return built.open()


def exact_joint(executor: OnnxRuntimeExecutor, sampling: SamplingParams) -> np.ndarray:
    """P(first, second, third token): `target_only` on every prefix there is, in one batch."""
    outputs = list(product(range(VOCAB), repeat=LENGTH - 1))
    ids = [[*PROMPT, *output] for output in outputs]
    logits = forward_rows(executor, ids, [0] * len(ids), graph="target_only")[:, len(PROMPT) - 1 :]
    joint = np.empty((VOCAB,) * LENGTH)
    for output, rows in zip(outputs, logits, strict=True):
        laws = [exact_law(row, sampling) for row in rows]
        before = math.prod(law[token] for law, token in zip(laws[:-1], output, strict=True))
        joint[output] = before * laws[-1]
    return joint


@pytest.mark.parametrize(
    ("sampling", "seeds"),
    [
        exhaustive(SamplingParams(temperature=1.0), 20_000),
        (SamplingParams(temperature=1.0, top_k=4, top_p=0.9), 5_000),
    ],
    ids=["temperature", "top_k and top_p"],
)
def test_speculated_tokens_follow_the_law(
    executor: OnnxRuntimeExecutor, sampling: SamplingParams, seeds: int
) -> None:
    """First, second and third token of one prompt over many seeds, each against its marginal."""
    joint = exact_joint(executor, sampling)
    assert joint.sum() == pytest.approx(1, abs=1e-12)
    results = Generator(executor).generate(
        [
            Request(prompt_ids=PROMPT, max_tokens=LENGTH, sampling=replace(sampling, seed=seed))
            for seed in range(seeds)
        ]
    )
    drawn = np.array([result.token_ids for result in results])
    assert drawn.shape == (seeds, LENGTH)
    assert joint[tuple(drawn.T)].all()
    for position in range(LENGTH):
        law = joint.sum(axis=tuple({*range(LENGTH)} - {position}))
        expected = seeds * law[law > 0]
        assert expected.min() > 20
        counts = np.bincount(drawn[:, position], minlength=VOCAB)[law > 0]
        assert chisquare(counts, expected).pvalue > 0.001, f"token {position}"
    accepted = sum(result.statistics.accepted_tokens for result in results)
    assert 0.05 < accepted / ((LENGTH - 1) * seeds) < 0.9
