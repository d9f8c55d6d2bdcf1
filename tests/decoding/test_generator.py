"""The generator against plain decoding, on an executor that enforces its contract."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.limits import PagePool, WindowedPages
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.errors import DflashError
from tests.decoding.reference import Steps, assert_plain
from tests.decoding.schedules import (
    EOS,
    MAX_SEQ_LEN,
    TRAINED_BLOCK,
    VOCAB_SIZE,
    options,
    scheduled_options,
)
from tests.inspection import count_functions
from tests.standins.executor import Call, FakeExecutor, PagedFakeExecutor


def make_prompts(count: int) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(7)
    return [
        tuple(generator.integers(0, 15, generator.integers(1, 24)).tolist()) for _ in range(count)
    ]


def make_requests(count: int = 9, **fields: object) -> list[Request]:
    """Ragged prompts; every third request is greedy, the others sampled in two ways."""
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.9, seed=2**63 + 5),
    ]
    return [
        Request(prompt_ids=prompt, sampling=samplings[index % 3], **{"max_tokens": 20} | fields)
        for index, prompt in enumerate(make_prompts(count))
    ]


@pytest.mark.parametrize("max_batch", [1, 4, 8])
@pytest.mark.parametrize("block_size", [2, 3, 5, 8])
@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
def test_speculation_changes_nothing(max_batch: int, block_size: int, prefill_chunk: int) -> None:
    executor = FakeExecutor(max_batch=max_batch)
    options = GeneratorOptions(
        block_size=block_size, prefill_chunk=prefill_chunk, record_logits=True
    )
    requests = make_requests()
    results = Generator(executor, options=options).generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.logits is not None
        assert_plain(result, request, executor)
    assert sum(result.statistics.accepted_tokens for result in results) > 20


def test_the_functions_of_a_step_are_bounded_and_none_is_of_a_token() -> None:
    """Of greedy requests: behind a pass each function is fetched from memory anew."""

    def count(requests: int, skill: float) -> int:
        executor = FakeExecutor(max_batch=8, draft_skill=skill, max_seq_len=128)
        generator = Generator(executor, options=GeneratorOptions(block_size=8))
        for token_id in range(requests):
            generator.submit(Request(prompt_ids=(token_id,), max_tokens=100))
        for _ in range(requests):
            assert generator.step()
        entered = count_functions("decoding", generator.step)
        assert executor.calls[-1] == Call("speculate", 0, requests, 8)
        return entered

    one = count(1, skill=0.0)
    assert one <= 36
    assert count(1, skill=1.0) == one
    assert count(8, skill=1.0) - one <= 7 * 12


def test_long_prompts_do_not_starve_running_requests() -> None:
    executor = FakeExecutor(max_batch=2)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=2, block_size=2))
    first = generator.submit(Request(prompt_ids=(1,), max_tokens=30))
    generator.step()
    generator.submit(Request(prompt_ids=(2,) * 20, max_tokens=5))
    for _ in range(10):
        assert {event.request_id for event in generator.step()} >= {first}


@pytest.mark.parametrize("paged", [False, True])
def test_one_flow_of_many_leaves_others_their_share(paged: bool) -> None:
    """Twelve samples fill four slots; strangers get theirs at once, and end in the usual time."""
    executor = FakeExecutor(max_batch=4)
    if paged:
        executor = PagedFakeExecutor(PagePool(page_size=4, pages=16), max_batch=4)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=8, block_size=2))
    steps, requests = Steps(generator, executor), {}

    def submit(first: int, count: int, tokens: int, flow: str | None) -> list[int]:
        asked = [Request(prompt_ids=(first, one), max_tokens=tokens) for one in range(count)]
        ids = [generator.submit(one, flow=flow) for one in asked]
        requests.update(zip(ids, asked, strict=True))
        return ids

    many = submit(1, 12, 12, "many")
    for _ in range(6):
        steps.step()
    strangers = [*submit(2, 1, 4, None), *submit(3, 2, 4, "few")]
    for _ in range(8):
        steps.step()
    assert steps.results.keys() >= {*strangers}, "a prompt's step each, and four tokens"
    for one, result in steps.finish().items():
        assert_plain(result, requests[one], executor)
    assert [one for one in steps.results if one in many[4:]] == many[4:], "in their own order"


def test_cancellation_while_queued_prefilling_and_decoding() -> None:
    executor = FakeExecutor(max_batch=2)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=2))
    requests = [Request(prompt_ids=(one,) * 6, max_tokens=30) for one in (1, 2, 3, 4)]
    decoding, prefilling, queued, kept = map(generator.submit, requests)
    steps = Steps(generator, executor)
    for _ in range(4):
        steps.step()
    assert generator.cancel(decoding) and generator.cancel(prefilling) and generator.cancel(queued)
    assert not generator.cancel(decoding) and not generator.cancel(999)
    results = steps.finish()
    reasons = {one: result.finish_reason for one, result in results.items()}
    assert reasons.pop(kept) == "length" and set(reasons.values()) == {"cancelled"}
    for one, request in zip((decoding, prefilling, queued, kept), requests, strict=True):
        assert bool(results[one].token_ids) == (one in (decoding, kept))
        assert_plain(results[one], request, executor)
    assert results[queued].statistics.time_to_first_token_s is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": ()}, "prompt: it holds no token"),
        ({"prompt_ids": (1.5,)}, "prompt: it must be a list of token ids"),
        ({"prompt_ids": (1,) * 64}, "prompt: 64 tokens do not fit: the context of 64"),
        ({"prompt_ids": (16,)}, "prompt: token id 16 is outside the vocabulary of 16"),
        ({"prompt_ids": (-1,)}, "prompt: token id -1 is outside"),
        ({"stop_token_ids": (99,)}, "stop_token_ids: token id 99 is outside"),
        ({"max_tokens": 0}, "max_tokens: 0 is not an integer of at least 1"),
        ({"min_tokens": -1}, "min_tokens: -1 is not an integer of at least 0"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: 3 is more than max_tokens, 2"),
        ({"min_tokens": 3, "stop_strings": ("a",)}, "min_tokens: does not go with stop strings"),
        ({"block_size": 9}, "block_size: 9 is not between 2 and 8"),
        ({"block_size": 1}, "block_size: 1 is not an integer of at least 2"),
        ({"block_size": float("nan")}, "block_size: nan is not an integer"),
        ({"stop_strings": ("",)}, "stop_strings: it must be a list of texts"),
        ({"stop_strings": ("a",) * 65}, "stop_strings: 65 stop strings are more than 64"),
        ({"stop_strings": ("a" * 4097,)}, "stop_strings: 4,097 characters of stop strings"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids: 257 stop tokens are more than 256"),
        ({"stop_strings": "END"}, "stop_strings: it must be a list of texts"),
        ({"stop_strings": ("a",)}, "stop_strings: the generator has no tokenizer"),
    ],
)
def test_bad_requests_are_refused_in_one_line(fields: dict[str, object], message: str) -> None:
    generator = Generator(FakeExecutor())
    with pytest.raises(DflashError, match=message) as caught:
        generator.generate([Request(prompt_ids=(1,)), Request(**{"prompt_ids": (1,)} | fields)])
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    assert not generator.has_work


PAGE_SIZE = 4
DIGITS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3) * 2

token_ids = st.integers(0, VOCAB_SIZE - 1)
# Some begin alike, by pages and one token more or less, so that pages are shared.
prompts = st.lists(token_ids, min_size=1, max_size=MAX_SEQ_LEN - 1) | st.builds(
    lambda kept, tail: DIGITS[:kept] + tuple(tail),
    st.sampled_from([0, 3, 4, 5, 8, 12, 16, 17, 31]),
    st.lists(token_ids, min_size=1, max_size=5),
)


def make_request(least: int, max_tokens: int | None, **fields: Any) -> Request:
    least = min(least, max_tokens or least)
    return Request(min_tokens=least, max_tokens=max_tokens, **fields)


requests = st.builds(
    make_request,
    least=st.sampled_from([0, 0, 1, 9]),
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
                flow = f"{len(action.prompt_ids) % 4}"
                submitted[generator.submit(action, flow=flow)] = action
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
