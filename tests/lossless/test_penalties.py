"""Rung 2 with penalties: each row is chosen by what the output holds before it, drafted or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.decoding import Generator, Penalties, Request, SamplingParams
from dflash_trt.errors import DflashError
from dflash_trt.sampling.penalties import PenaltyState
from dflash_trt.sampling.token_rules import TokenRules
from tests.covering import exhaustive
from tests.lossless.runs import check_groups, make_requests, run, run_baseline
from tests.pairs import PairFactory

PENALTIES = (
    Penalties(frequency=0.7, presence=0.4, bias=((5, 3.0), (9, -100.0))),
    Penalties(frequency=-2.0, presence=1.0, bias=((7, 20.0),)),
    Penalties(repetition=1.9),
    Penalties(bias=((5, 25.0),)),
)


@pytest.mark.parametrize("temperature", [0.0, exhaustive(0.8)], ids=["greedy", "drawn"])
def test_speculation_and_neighbours_change_nothing(
    temperature: float, make_pair: PairFactory
) -> None:
    pair = make_pair("qwen3", {"vocab": 64}, fit_steps=60, max_batch=8, max_seq_len=192)
    executor, sampling = pair.open(), SamplingParams(temperature=temperature, seed=5)
    plain = make_requests(64, 8, sampling)
    asked = [
        replace(one, penalties=PENALTIES[at // 2] if at % 2 else Penalties())
        for at, one in enumerate(plain)
    ]
    expected = run_baseline(executor, asked)
    for batch in (1, 8):
        check_groups(executor, asked, expected, batch)
    others = run_baseline(executor, plain)
    changed = [a.token_ids != b.token_ids for a, b in zip(expected, others, strict=True)]
    assert all(changed[1::2]) and not any(changed[::2])
    if not temperature:  # written down once more
        for request, result in zip(asked[1::2], expected[1::2], strict=True):
            assert result.logits is not None
            for at, (row, token) in enumerate(zip(result.logits, result.token_ids, strict=True)):
                before = result.token_ids[:at]
                state = PenaltyState(request.penalties, request.prompt_ids, before)
                assert int(np.argmax(state.apply(row))) == token
    accepted = [one.statistics.accepted_tokens for one in run(executor, asked)]
    assert sum(accepted) > 0


def test_who_cannot_is_refused(make_pair: PairFactory) -> None:
    request = Request(prompt_ids=(3,))
    executor = make_pair("qwen3", {"vocab": 64}, max_batch=8, max_seq_len=192).open()
    with pytest.raises(DflashError, match="logit_bias: token id 64 is outside the vocabulary"):
        Generator(executor).submit(replace(request, penalties=Penalties(bias=((64, 1.0),))))
    with pytest.raises(DflashError, match="bad_words: token id 70 is outside the vocabulary"):
        Generator(executor).submit(replace(request, rules=TokenRules(bad=((3, 70),))))
