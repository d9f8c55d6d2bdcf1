"""Whole generations through the executor, token for token against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.steps import begin, speculate_until
from tests.covering import exhaustive
from tests.pairs import PairFactory
from tests.reference.compare import max_relative_error, stack_error
from tests.reference.generate import greedy

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [31] * 3 + [8, 9] * 30, [40])
MORE_PROMPTS = ([1, 60, 2], [7] * 50, list(range(2, 40)), [9, 9, 5, 20, 33])
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
PAIRS: dict[str, dict[str, Any]] = {
    "qwen3": {"target": {"vocab": 64}, "draft": SLIDING, "fit_steps": 60},
    "llama": {
        "family": "llama",
        "target": {"vocab": 64, "dtype": "bfloat16", "tie": True, "rope": "llama3", "shards": 2},
        "draft": {"dtype": "bfloat16"},
        "fit_steps": 60,
    },
    "qwen3_half": {
        "target": {"vocab": 100, "dtype": "float16", "kv_heads": 1, "attention_bias": True},
        "draft": {"dtype": "float16", "block_size": 16},
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 64, "mxfp4": True, "rope": "yarn", "num_layers": 4},
        "fit_steps": 60,
        "max_batch": 8,
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "target": {"vocab": 64, "dtype": "bfloat16"},
        "draft": SLIDING,
        "fit_steps": 60,
        "max_batch": 8,
    },
}

DAILY = ("llama", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, 4) for name in DAILY]
    + [exhaustive(name, 4) for name in PAIRS if name not in DAILY]
    + [exhaustive(name, batch) for name in ("gpt_oss", "qwen3_moe") for batch in (1, 8)],
)
def test_speculation_emits_the_tokens_that_transformers_does(
    make_pair: PairFactory, name: str, batch: int
) -> None:
    """Ragged prompts, together or one by one, block sizes in turn; past gpt-oss's window of 24."""
    is_mixture = name in MIXTURES
    built = make_pair(**(PAIRS | MIXTURES)[name])
    prompts = [*PROMPTS, *MORE_PROMPTS] if is_mixture else PROMPTS
    tokens, gap = (40, 1e-4) if is_mixture else (100, 1e-3)
    blocks = (8, 3) if is_mixture else range(2, built.pair.draft.block_size + 1)
    executor = built.open()
    accepted = 0
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        sequences = [begin(executor, list(p), slot, (5, 3)) for slot, p in enumerate(group)]
        speculate_until(executor, sequences, tokens, blocks)
        for prompt, sequence in zip(group, sequences, strict=True):
            expected = greedy(built.reference, prompt, tokens)
            assert expected.smallest_gap > gap, "a near tie: choose another seed"
            assert sequence.output[:tokens] == expected.tokens
            accepted += sum(sequence.accepted)
            if not is_mixture:
                rows = zip(sequence.logits[:tokens], expected.logits, strict=True)
                assert max(max_relative_error(*row) for row in rows) <= stack_error(6)
    if name != "qwen3_half":
        assert accepted > 30, "drafts were hardly ever accepted"
