"""The generator against plain decoding, on an executor that enforces its contract."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.backends.base import SpeculationOutput, StepCall
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams, TokenEvent
from dflash_trt.errors import DflashError
from tests.decoding.reference import Steps, assert_plain, decode_plainly
from tests.standins.executor import FakeExecutor


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


@pytest.mark.parametrize("max_batch", [1, 4])
def test_baseline_runs_target_only(max_batch: int) -> None:
    executor = FakeExecutor(max_batch=max_batch)
    options = GeneratorOptions(speculation=False, prefill_chunk=5, record_logits=True)
    requests = make_requests()
    results = Generator(executor, options=options).generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert_plain(result, request, executor)
        assert result.statistics.steps == len(result.token_ids) - 1
        assert result.statistics.acceptance_length is None
    assert {call.kind for call in executor.calls} - {"move"} == {"target_only"}


def test_requests_may_differ_in_block_size_and_speculation() -> None:
    executor = FakeExecutor(max_batch=4)
    requests = [
        Request(prompt_ids=prompt, max_tokens=30, block_size=block_size, speculate=speculate)
        for prompt, block_size, speculate in zip(
            make_prompts(6),
            [None, 2, 2, 5, None, 8],
            [True, True, True, True, False, True],
            strict=True,
        )
    ]
    results = Generator(executor, options=GeneratorOptions(block_size=6)).generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == decode_plainly(request, executor)[0]
    assert {call.rows for call in executor.calls if call.kind == "speculate"} == {2, 5, 6, 8}
    assert results[4].statistics.drafted_tokens == 0


def test_events_stream_the_output_and_mark_drafts() -> None:
    executor = FakeExecutor(max_batch=4)
    requests = make_requests(6)
    events: dict[int, list[TokenEvent]] = {index: [] for index in range(6)}
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=3))
    results = generator.generate(requests, lambda index, event: events[index].append(event))
    for index, result in enumerate(results):
        streamed = events[index]
        assert sum((event.token_ids for event in streamed), ()) == result.token_ids
        assert [event.result for event in streamed[:-1]] == [None] * (len(streamed) - 1)
        assert streamed[-1].result is result
        assert streamed[0].accepted_tokens == 0 and len(streamed[0].token_ids) == 1
        assert sum(event.accepted_tokens for event in streamed) == (
            result.statistics.accepted_tokens
        )
        assert len(streamed) == result.statistics.steps + 1


def test_long_prompts_do_not_starve_running_requests() -> None:
    executor = FakeExecutor(max_batch=2)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=2, block_size=2))
    first = generator.submit(Request(prompt_ids=(1,), max_tokens=30))
    generator.step()
    generator.submit(Request(prompt_ids=(2,) * 20, max_tokens=5))
    for _ in range(10):
        assert {event.request_id for event in generator.step()} >= {first}


def test_admission_is_first_come_first_served() -> None:
    generator = Generator(FakeExecutor(max_batch=2))
    order: list[tuple[int, int]] = []
    generator.generate(
        [Request(prompt_ids=(one,), max_tokens=12) for one in range(7)],
        lambda index, event: order.append((index, len(event.token_ids))),
    )
    assert list(dict.fromkeys(index for index, _ in order)) == list(range(7))


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


def test_cancelling_from_the_callback() -> None:
    executor = FakeExecutor(max_batch=2)
    generator = Generator(executor)

    def stop_early(index: int, event: TokenEvent) -> None:
        if index == 1 and event.result is None:
            generator.cancel(event.request_id)

    requests = [Request(prompt_ids=(one, one), max_tokens=25) for one in range(3)]
    results = generator.generate(requests, stop_early)
    assert [result.finish_reason for result in results] == ["length", "cancelled", "length"]
    assert_plain(results[2], requests[2], executor)


def test_a_failing_callback_leaves_an_idle_engine() -> None:
    executor = FakeExecutor(max_batch=2)
    generator = Generator(executor)
    requests = make_requests(4)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(requests, fail)
    assert not generator.has_work
    assert generator.generate(requests)[3].token_ids == decode_plainly(requests[3], executor)[0]


def test_a_failing_pass_can_be_repeated() -> None:
    class Flaky(FakeExecutor):
        def _run(self, *args: object, **kwargs: object) -> np.ndarray:
            logits = super()._run(*args, **kwargs)  # type: ignore[arg-type]
            if len(self.calls) % 5 == 0:
                raise DflashError("out of luck")
            return logits

    executor = Flaky(max_batch=2)
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=3))
    requests = [Request(prompt_ids=prompt, max_tokens=20) for prompt in make_prompts(4)]
    ids = [generator.submit(request) for request in requests]
    steps, failures = Steps(generator, executor), 0
    while generator.has_work:
        try:
            steps.step()
        except DflashError:
            failures += 1
    assert failures > 2
    for request_id, request in zip(ids, requests, strict=True):
        assert_plain(steps.results[request_id], request, executor)


def test_a_request_that_ended_before_a_failing_pass_is_not_run_again() -> None:
    class FailsOnce(FakeExecutor):
        failures = 0

        def speculate(self, call: StepCall) -> SpeculationOutput:
            if call.first_slot == 1 and self.failures == 0:
                self.failures += 1
                raise DflashError("out of luck")
            return super().speculate(call)

    executor = FailsOnce(draft_skill=1.0)
    generator = Generator(executor)
    short = Request(prompt_ids=(3,), max_tokens=5, block_size=2)
    other = Request(prompt_ids=(2,), max_tokens=30, block_size=8)
    ids = [generator.submit(request) for request in (short, other)]
    steps = Steps(generator, executor)
    steps.step()
    steps.step()
    with pytest.raises(DflashError, match="out of luck"):
        generator.step()
    results = steps.finish()
    for request_id, request in zip(ids, (short, other), strict=True):
        assert_plain(results[request_id], request, executor)


@pytest.mark.parametrize(("temperature", "draws"), [(0.0, False), (1.0, False), (0.0, True)])
def test_logits_that_are_not_finite_are_an_error(temperature: float, draws: bool) -> None:
    class Broken(FakeExecutor):
        def _run(self, *args: object, **kwargs: object) -> np.ndarray:
            return np.full_like(super()._run(*args, **kwargs), np.nan)  # type: ignore[arg-type]

    request = Request(prompt_ids=(1,), sampling=SamplingParams(temperature=temperature))
    with pytest.raises(DflashError, match="position 1 are not finite"):
        Generator(Broken(draws=draws)).generate([request])


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


@pytest.mark.parametrize("fields", [{"block_size": 9}, {"block_size": 1}, {"prefill_chunk": 0}])
def test_bad_options_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(DflashError):
        Generator(FakeExecutor(), options=GeneratorOptions(**fields))
