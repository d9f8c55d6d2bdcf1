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
PAIRS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama",
        "target": {"vocab": 64, "dtype": "bfloat16", "tie": True, "rope": "llama3", "shards": 2},
        "draft": {"dtype": "bfloat16"},
        "fit_steps": 60,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 64, "mxfp4": True, "rope": "yarn", "num_layers": 4},
        "fit_steps": 60,
    },
}


@pytest.mark.parametrize("name", ["llama", exhaustive("gpt_oss")])
def test_speculation_emits_the_tokens_that_transformers_does(
    make_pair: PairFactory, name: str
) -> None:
    """Ragged prompts, block sizes in turn; past gpt-oss's window of 24."""
    built, tokens = make_pair(**PAIRS[name]), 60
    executor = built.open()
    sequences = [begin(executor, list(p), slot, (5, 3)) for slot, p in enumerate(PROMPTS)]
    speculate_until(executor, sequences, tokens, range(2, 9))
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        expected = greedy(built.reference, prompt, tokens)
        assert expected.smallest_gap > 1e-4, "a near tie: choose another seed"
        assert sequence.output[:tokens] == expected.tokens
        rows = zip(sequence.logits[:tokens], expected.logits, strict=True)
        assert max(max_relative_error(*row) for row in rows) <= stack_error(6)
    assert sum(sum(one.accepted) for one in sequences) > 30, "drafts were hardly ever accepted"
