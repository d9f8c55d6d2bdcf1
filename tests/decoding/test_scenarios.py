"""Any order of submissions, steps and cancellations: every output is the plain one."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.limits import PagePool, WindowedPages
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from tests.decoding.reference import Steps, assert_plain
from tests.decoding.schedules import (
    EOS,
    MAX_SEQ_LEN,
    TRAINED_BLOCK,
    VOCAB_SIZE,
    options,
    scheduled_options,
)
from tests.standins.executor import FakeExecutor, PagedFakeExecutor

PAGE_SIZE = 4
DIGITS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3) * 2

token_ids = st.integers(0, VOCAB_SIZE - 1)
# Some begin alike, by pages and one token more or less, so that pages are shared.
prompts = st.lists(token_ids, min_size=1, max_size=MAX_SEQ_LEN - 1) | st.builds(
    lambda kept, tail: DIGITS[:kept] + tuple(tail),
    st.sampled_from([0, 3, 4, 5, 8, 12, 16, 17, 31]),
    st.lists(token_ids, min_size=1, max_size=5),
)
requests = st.builds(
    Request,
    prompt_ids=prompts,
    max_tokens=st.none() | st.integers(1, 30),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
        top_k=st.none() | st.integers(1, VOCAB_SIZE),
        top_p=st.sampled_from([1.0, 0.9, 0.5]),
        seed=st.integers(0, 2**64 - 1),
    ),
    stop_token_ids=st.lists(token_ids, max_size=1),
    ignore_eos=st.booleans(),
    speculate=st.sampled_from([True, True, True, False]),
    block_size=st.none() | st.integers(2, TRAINED_BLOCK),
)
# A request is submitted, a number cancels the request of that number.
actions = st.lists(
    st.one_of(requests, requests, st.just("step"), st.just("step"), st.integers(0, 10)),
    max_size=40,
)


@pytest.mark.parametrize("paged", [False, True])
@given(
    actions=actions,
    options=options | scheduled_options,
    pages=st.integers(MAX_SEQ_LEN // PAGE_SIZE, 24),
    max_batch=st.integers(1, 5),
    draft_skill=st.sampled_from([0.0, 0.7, 1.0]),
    draws=st.booleans(),
    window=st.sampled_from([1, 3, 64]),
    seen=st.sampled_from([(), (1,), (2, 7), (30,)]),
    spare=st.integers(0, 12),
)
@settings(max_examples=150, deadline=None)
def test_every_output_is_the_plain_one(
    paged: bool,
    actions: list[Request | str | int],
    options: GeneratorOptions,
    pages: int,
    max_batch: int,
    draft_skill: float,
    draws: bool,
    window: int,
    seen: tuple[int, ...],
    spare: int,
) -> None:
    """With and without a block schedule, whatever it learns; the fake refuses context gaps.

    In pages, with layers of other windows beside those that see everything.
    """
    fields = {
        "max_batch": max_batch,
        "max_seq_len": MAX_SEQ_LEN,
        "block_size": TRAINED_BLOCK,
        "vocab_size": VOCAB_SIZE,
        "draft_skill": draft_skill,
        "draws": draws,
        "prefill_chunk": 12 if seen else MAX_SEQ_LEN,
    }
    # A window of n positions and a chunk of 12 rows begin anywhere in a page.
    windowed = [WindowedPages(one, (one + 9) // PAGE_SIZE + 2 + spare) for one in seen]
    pool = PagePool(PAGE_SIZE, pages, tuple(windowed))
    executor = PagedFakeExecutor(pool, **fields) if paged else FakeExecutor(**fields)  # type: ignore[arg-type]
    with patch("dflash_trt.decoding.pacers.WINDOW_STEPS", window):
        generator = Generator(executor, eos_token_ids=[EOS], options=options)
        steps = Steps(generator, executor)
        submitted: dict[int, Request] = {}
        cancelled: set[int] = set()
        for action in actions:
            if isinstance(action, Request):
                submitted[generator.submit(action)] = action
            elif action == "step":
                steps.step()
            elif generator.cancel(int(action)):
                cancelled.add(int(action))
        results = steps.finish()
    assert results.keys() == submitted.keys()
    for request_id, request in submitted.items():
        result = results[request_id]
        assert_plain(result, request, executor, (EOS,))
        assert (result.finish_reason == "cancelled") == (request_id in cancelled)
        assert (result.logits is not None) == (options.record_logits and bool(result.token_ids))
