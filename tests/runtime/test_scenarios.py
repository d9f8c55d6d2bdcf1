"""Any order of submissions, steps and cancellations: every output is the plain one."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from tests.runtime.reference import decode_plainly
from tests.runtime.schedules import (
    EOS,
    MAX_SEQ_LEN,
    TRAINED_BLOCK,
    VOCAB_SIZE,
    options,
    scheduled_options,
)
from tests.standins.executor import FakeExecutor, check_step_calls

token_ids = st.integers(0, VOCAB_SIZE - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    top_k=st.none() | st.integers(1, VOCAB_SIZE),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)
requests = st.builds(
    Request,
    prompt_ids=st.lists(token_ids, min_size=1, max_size=MAX_SEQ_LEN - 1),
    max_tokens=st.none() | st.integers(1, 30),
    sampling=samplings,
    stop_token_ids=st.lists(token_ids, max_size=1),
    ignore_eos=st.booleans(),
    speculate=st.sampled_from([True, True, True, False]),
    block_size=st.none() | st.integers(2, TRAINED_BLOCK),
)
actions = st.lists(
    st.one_of(
        requests,
        st.just("step"),
        st.just("step"),
        st.integers(0, 10).map(lambda request_id: ("cancel", request_id)),
    ),
    max_size=40,
)


@given(
    actions=actions,
    options=options,
    max_batch=st.integers(1, 5),
    draft_skill=st.sampled_from([0.0, 0.7, 1.0]),
)
@settings(max_examples=250, deadline=None)
def test_every_output_is_the_plain_one(
    actions: list[Request | str | tuple[str, int]],
    options: GeneratorOptions,
    max_batch: int,
    draft_skill: float,
) -> None:
    check_scenario(actions, options, max_batch, draft_skill)


@given(
    actions=actions,
    options=scheduled_options,
    max_batch=st.integers(1, 5),
    draft_skill=st.sampled_from([0.0, 0.7, 1.0]),
    window=st.sampled_from([1, 3, 64]),
)
@settings(max_examples=250, deadline=None)
def test_no_schedule_changes_an_output(
    actions: list[Request | str | tuple[str, int]],
    options: GeneratorOptions,
    max_batch: int,
    draft_skill: float,
    window: int,
) -> None:
    """Whatever the schedule, the measurements and what is learnt; the fake refuses context gaps."""
    with patch("dflash_trt.runtime.pacing.WINDOW_STEPS", window):
        check_scenario(actions, options, max_batch, draft_skill)


def check_scenario(
    actions: list[Request | str | tuple[str, int]],
    options: GeneratorOptions,
    max_batch: int,
    draft_skill: float,
) -> None:
    """Does `actions` and compares every output with plain decoding."""
    executor = FakeExecutor(
        max_batch=max_batch,
        max_seq_len=MAX_SEQ_LEN,
        block_size=TRAINED_BLOCK,
        vocab_size=VOCAB_SIZE,
        draft_skill=draft_skill,
    )
    generator = Generator(executor, eos_token_ids=[EOS], options=options)
    submitted: dict[int, Request] = {}
    results: dict[int, RequestResult] = {}
    streamed: dict[int, tuple[int, ...]] = {}
    cancelled: set[int] = set()

    def step() -> None:
        before = len(executor.calls)
        events = generator.step()
        check_step_calls(executor.calls[before:])
        for event in events:
            assert event.request_id not in results
            streamed[event.request_id] = streamed.get(event.request_id, ()) + event.token_ids
            if event.result is not None:
                results[event.request_id] = event.result

    for action in actions:
        if isinstance(action, Request):
            submitted[generator.submit(action)] = action
        elif isinstance(action, tuple):
            if generator.cancel(action[1]):
                cancelled.add(action[1])
        else:
            step()
    while generator.has_work:
        step()

    assert results.keys() == submitted.keys()
    for request_id, request in submitted.items():
        result = results[request_id]
        plain, finish_reason, logits = decode_plainly(request, executor, (EOS,))
        length = len(result.token_ids)
        assert result.token_ids == streamed[request_id] == plain[:length]
        assert result.statistics.output_tokens == length
        if options.record_logits and length:
            assert result.logits is not None
            assert (result.logits == logits[:length]).all()
        else:
            assert result.logits is None
        if request_id in cancelled:
            assert result.finish_reason == "cancelled" and length < len(plain)
        else:
            assert (result.finish_reason, length) == (finish_reason, len(plain))
