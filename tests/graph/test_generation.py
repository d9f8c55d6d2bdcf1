"""Whole generations through the executor, token for token against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.steps import begin, decode_plainly, speculate_until
from tests.pairs import PairFactory
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import greedy

pytestmark = pytest.mark.numeric

TOKENS = 100
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [31] * 3 + [8, 9] * 30, [40])
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
PAIRS: dict[str, dict[str, Any]] = {
    "qwen3": {"target": {"vocab": 64}, "draft": SLIDING, "fit_steps": 100},
    "llama": {
        "family": "llama",
        "target": {"vocab": 64, "dtype": "bfloat16", "tie": True, "rope": "llama3", "shards": 2},
        "draft": {"dtype": "bfloat16"},
        "fit_steps": 100,
    },
    "qwen3_half": {
        "target": {"vocab": 100, "dtype": "float16", "kv_heads": 1, "attention_bias": True},
        "draft": {"dtype": "float16", "block_size": 16},
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 64, "mxfp4": True, "rope": "yarn"},
        "fit_steps": 100,
        "max_batch": 8,
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "target": {"vocab": 64, "dtype": "bfloat16"},
        "draft": SLIDING,
        "fit_steps": 100,
        "max_batch": 8,
    },
}
MIXTURE_TOKENS = 40
MORE_PROMPTS = ([1, 60, 2], [7] * 50, list(range(2, 40)), [9, 9, 5, 20, 33])


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_emit_the_tokens_that_transformers_does(
    make_pair: PairFactory, name: str, batch: int
) -> None:
    """8 prompts × 40 tokens × 2 pairs, one by one and together; past gpt-oss's window of 24."""
    built = make_pair(**MIXTURES[name])
    executor = built.open()
    prompts = [*PROMPTS, *MORE_PROMPTS]
    accepted = 0
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        sequences = [begin(executor, list(p), slot, (5, 3)) for slot, p in enumerate(group)]
        speculate_until(executor, sequences, MIXTURE_TOKENS, (8, 3))
        for prompt, sequence in zip(group, sequences, strict=True):
            expected = greedy(built.reference, prompt, MIXTURE_TOKENS)
            assert expected.smallest_gap > 1e-4, "a near tie: choose another seed"
            assert sequence.output[:MIXTURE_TOKENS] == expected.tokens
            accepted += sum(sequence.accepted)
    assert accepted > 30, "drafts were hardly ever accepted"


@pytest.mark.parametrize("name", PAIRS)
def test_speculation_emits_the_tokens_that_transformers_does(
    make_pair: PairFactory, name: str
) -> None:
    """4 prompts × 100 tokens × 3 pairs, ragged in one batch, block sizes in turn; 1,200 tokens."""
    built = make_pair(**PAIRS[name])
    executor = built.open()
    sequences = [begin(executor, list(p), slot, (5, 3)) for slot, p in enumerate(PROMPTS)]
    speculate_until(executor, sequences, TOKENS, range(2, built.pair.draft.block_size + 1))
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        expected = greedy(built.reference, prompt, TOKENS)
        assert expected.smallest_gap > 1e-3, "a near tie: choose another seed"
        assert sequence.output[:TOKENS] == expected.tokens
        rows = sequence.logits[:TOKENS]
        worst = max(max_relative_error(r, e) for r, e in zip(rows, expected.logits, strict=True))
        assert worst <= stack_error(6)
    if "fit_steps" in PAIRS[name]:
        assert sum(sum(s.accepted) for s in sequences) > 30, "drafts were hardly ever accepted"


def test_the_baseline_emits_the_tokens_that_transformers_does(make_pair: PairFactory) -> None:
    built = make_pair(**PAIRS["llama"])
    output, logits = decode_plainly(built.open(), list(PROMPTS[0]), TOKENS)
    expected = greedy(built.reference, PROMPTS[0], TOKENS)
    assert output == expected.tokens
    assert max_relative_error(logits, expected.logits) <= stack_error(6)
