"""What no call of an executor may ask for, whichever executor it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.backends.base import ExecutorLimits, StepCall, TargetCall
from dflash_trt.decoding import SamplingParams
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import one_chunk, one_step

LENGTH = 512
LIMITS = ExecutorLimits(
    max_batch=4,
    max_seq_len=LENGTH,
    block_size=8,
    prefill_chunk=16,
    vocab_size=256,
    mask_token_id=255,
)
IDS, ONE = np.zeros((1, 4), np.int64), pack_sampling([SamplingParams()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (one_chunk(IDS, start=LENGTH - 2), "rows end at"),
        (one_chunk(IDS[:, :1], start=LENGTH), "rows end at"),
        (one_chunk(IDS[:, :1], start=-1), "rows end at"),
        (one_chunk(IDS, slot=-1), "slots"),
        (one_chunk(IDS, slot=4), "slots"),
        (one_chunk(IDS, 4), "logit rows"),  # another sequence's
        (one_chunk(IDS, -1), "logit rows"),
        (one_chunk(IDS, sampling=ONE), r"shape \(1, 4\), not None"),
        (one_step(1), "block size"),
        (one_step(9), "block size"),
        (one_step(start=LENGTH - 3), "rows end at"),
        (one_step(slot=4), "slots"),
    ],
)
def test_calls_outside_the_limits_are_refused(call: TargetCall | StepCall, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LIMITS.check(call)


@pytest.mark.parametrize("call", [one_chunk(IDS, 3), one_step()])
def test_every_sequence_of_a_call_that_draws_has_its_sampling(call: TargetCall | StepCall) -> None:
    limits = replace(LIMITS, draws=True)
    with pytest.raises(ValueError, match=r"shape None, not \(1, 4\)"):
        limits.check(call)
    assert limits.check(replace(call, sampling=ONE)) == {0: 4}
