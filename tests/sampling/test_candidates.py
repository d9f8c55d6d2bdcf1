"""Drawing from an executor's candidates is drawing from its logits, ties included."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.decoding import SamplingParams, choose_tokens
from dflash_trt.sampling.choice import choose_candidate
from tests.sampling.candidates import pick_candidates

VOCAB = 40
KEPT = 12


@given(
    levels=st.lists(st.integers(0, 6), min_size=VOCAB, max_size=VOCAB),
    top_k=st.integers(1, KEPT - 1),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 50),
)
def test_candidates_choose_what_the_row_chooses_or_nothing(
    levels: list[int], top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(levels, np.float32) / 4
    sampling = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, seed=seed)
    ids = pick_candidates(logits, KEPT, seed)
    chosen = choose_candidate(ids, logits[ids], 7, sampling)
    (expected,) = choose_tokens(logits[None], np.array([7]), sampling)
    ranked = np.sort(logits)[::-1]
    if ranked[top_k - 1] > ranked[KEPT - 1]:
        assert chosen == expected
    else:
        assert chosen is None
