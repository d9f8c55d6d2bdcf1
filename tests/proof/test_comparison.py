"""The figures of a comparison against torch, and what they are where there is nothing to tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from dflash_trt.errors import DflashError
from dflash_trt.proof.comparison import (
    ROWS_AT_ONCE,
    LogitComparison,
    compare_texts,
    cut_texts,
)
from tests.pairs import PairFactory
from tests.standins.executor import FakeExecutor


def make_logits(rows: int, vocab: int, seed: int, scale: float = 4.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, scale, (rows, vocab))
    return values.astype(np.float32)


@given(st.integers(1, 40), st.integers(2, 300), st.floats(0.0, 30.0), st.integers(0, 99))
def test_figures_equal_torchs(rows: int, vocab: int, noise: float, seed: int) -> None:
    twin = make_logits(rows, vocab, seed)
    logits = twin + np.float32(noise) * make_logits(rows, vocab, seed + 1, 1.0)
    next_ids = np.random.default_rng(seed).integers(0, vocab, rows)
    comparison = LogitComparison()
    for part in (slice(0, rows // 3), slice(rows // 3, rows)):
        if len(twin[part]):
            comparison.add(twin[part], logits[part], next_ids[part])
    figures = comparison.to_figures()

    p, q = (torch.tensor(one).double().log_softmax(-1) for one in (twin, logits))
    rows_kl = functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    targets = torch.tensor(next_ids)
    assert figures.tokens == rows
    assert figures.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert figures.mean_kl == pytest.approx(float(rows_kl.mean()), rel=1e-9, abs=1e-12)
    assert figures.max_kl == pytest.approx(float(rows_kl.max()), rel=1e-9, abs=1e-12)
    for actual, log_p in ((figures.twin_perplexity, p), (figures.perplexity, q)):
        expected = float(functional.nll_loss(log_p, targets).exp())
        assert actual == pytest.approx(expected, rel=1e-9)


def test_tokens_ruled_out() -> None:
    """-inf on both sides tells nothing; on the model's alone, it can be infinitely wrong."""
    twin = np.array([[1.0, 2.0, -np.inf]], np.float32)
    comparison = LogitComparison()
    comparison.add(twin, twin, np.array([0]))
    assert comparison.to_figures().max_kl == 0.0
    comparison.add(twin, np.array([[-np.inf, 2.0, -np.inf]], np.float32), np.array([0]))
    figures = comparison.to_figures()
    assert figures.mean_kl == figures.max_kl == figures.perplexity == math.inf
    assert math.isfinite(figures.twin_perplexity)
    assert figures.agreement == 1.0


def test_texts_against_a_reference(make_pair: PairFactory) -> None:
    """Perplexity as transformers counts it; pieces, and passes within them, do not show."""
    built, other = make_pair(max_seq_len=64), make_pair("llama", max_seq_len=70)
    generator = np.random.default_rng(1)
    texts = [
        generator.integers(0, 256, length).tolist() for length in (150, 1, 2, ROWS_AT_ONCE + 1)
    ]
    pieces = [piece for piece in cut_texts(texts, 64) if len(piece) > 1]
    assert [len(piece) for piece in pieces] == [64, 64, 22, 2, ROWS_AT_ONCE + 1]
    seen: list[int] = []
    with_twin, with_other = built.open(), other.open()
    figures = compare_texts(with_twin, with_other, texts, seen.append)
    losses, tokens = [0.0, 0.0], 0
    for piece in pieces:
        ids = torch.tensor(piece[None])
        tokens += len(piece) - 1
        for index, model in enumerate((built.reference, other.reference)):
            losses[index] += float(model(ids, labels=ids).loss) * (len(piece) - 1)
    assert figures.tokens == tokens == sum(seen)
    assert figures.twin_perplexity == pytest.approx(math.exp(losses[0] / tokens), rel=1e-4)
    assert figures.perplexity == pytest.approx(math.exp(losses[1] / tokens), rel=1e-4)
    assert figures.agreement < 0.5 < figures.mean_kl < figures.max_kl
    for one in (with_twin, with_other):
        one.close()


def test_a_text_without_a_token_to_predict() -> None:
    executors = [FakeExecutor(vocab_size=20, max_seq_len=32, max_batch=1) for _ in range(2)]
    with pytest.raises(DflashError, match="no token to predict"):
        compare_texts(*executors, [[1], [2]])
