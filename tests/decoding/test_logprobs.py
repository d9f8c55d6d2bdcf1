"""Log-probabilities: the target's own, the same however the tokens came about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.decoding import (
    Generator,
    GeneratorOptions,
    Penalties,
    Request,
    RequestResult,
    SamplingParams,
    TokenEvent,
)
from dflash_trt.errors import DflashError
from dflash_trt.sampling.token_rules import TokenRules
from tests.decoding.test_generator import make_requests
from tests.sampling.definitions import exact_law
from tests.standins.executor import FakeExecutor
from tests.text.tokenizers import make_byte_level


def run(
    requests: list[Request], *, max_batch: int = 4, speculation: bool = True
) -> list[RequestResult]:
    options = GeneratorOptions(speculation=speculation, prefill_chunk=7)
    return Generator(FakeExecutor(max_batch=max_batch), options=options).generate(requests)


def test_are_the_log_softmax_of_the_logits() -> None:
    options = GeneratorOptions(record_logits=True)
    requests = make_requests(logprobs=3)
    for result in Generator(FakeExecutor(max_batch=4), options=options).generate(requests):
        assert result.logits is not None and result.logprobs is not None
        assert [one.token_id for one in result.logprobs] == list(result.token_ids)
        for row, one in zip(result.logits.astype(np.longdouble), result.logprobs, strict=True):
            expected = row - np.log(np.exp(row).sum())
            best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:3]
            assert one.top_ids == tuple(best)
            order = sorted(range(len(row)), key=lambda token: (-row[token], token))
            assert one.rank == order.index(one.token_id) + 1
            assert one.logprob == pytest.approx(float(expected[one.token_id]), abs=1e-12)
            assert one.top_logprobs == pytest.approx(expected[best].astype(float), abs=1e-12)


def test_what_a_stop_string_cuts_off_has_none() -> None:
    """Events tell what the result has, in its order, and take nothing back."""
    tokenizer = make_byte_level()

    def generate(**fields: object) -> tuple[RequestResult, list[int]]:
        executor = FakeExecutor(vocab_size=tokenizer.get_vocab_size(), draft_skill=0.9)
        told: list[int] = []

        def listen(_: int, event: TokenEvent) -> None:
            told.extend(one.token_id for one in event.logprobs)

        request = Request(prompt_ids=(1,), max_tokens=40, logprobs=0, **fields)  # type: ignore
        [result] = Generator(executor, tokenizer=tokenizer).generate([request], listen)
        return result, told

    free, told = generate()
    assert free.text is not None and told == list(free.token_ids)
    for start in range(1, len(free.text) - 4, 3):
        stop = free.text[start : start + 4]
        if "\N{REPLACEMENT CHARACTER}" in free.text[: start + 4]:
            continue
        cut, told = generate(stop_strings=(stop,))
        kept = len(told)
        assert cut.text is not None and cut.logprobs is not None
        assert told == [one.token_id for one in cut.logprobs] == list(free.token_ids[:kept])
        assert tokenizer.decode(told, skip_special_tokens=True).startswith(cut.text)
        assert len(tokenizer.decode(told[:-1])) < max(len(cut.text), 1) or not told


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.6, top_k=6, top_p=0.95, min_p=0.02, seed=3)],
    ids=["greedy", "drawn"],
)
@pytest.mark.parametrize("draws", [False, True], ids=["host", "engine"])
def test_processed_ones_are_of_the_row_that_is_chosen_from(
    sampling: SamplingParams, draws: bool
) -> None:
    """Written down once more: a bias, a forbidden token, the temperature and the filters."""
    request = Request(
        prompt_ids=(3, 1, 4),
        max_tokens=25,
        sampling=sampling,
        logprobs=16,
        logprobs_mode="processed_logprobs",
        penalties=Penalties(bias=((2, 1.5),), repetition=1.3),
        rules=TokenRules(bad=((7,),)),
    )
    executor = FakeExecutor(draws=draws)
    options = GeneratorOptions(record_logits=True)
    (result,) = Generator(executor, options=options).generate([request])
    assert result.logits is not None and result.logprobs is not None
    for place, (row, one) in enumerate(zip(result.logits, result.logprobs, strict=True)):
        changed = row.astype(np.float64)
        changed[2] += 1.5
        for token in {*request.prompt_ids, *result.token_ids[:place]}:
            changed[token] *= 1 / 1.3 if changed[token] > 0 else 1.3
        changed[7] = -np.inf
        if sampling.greedy:
            law = np.exp(changed - changed.max())
            law /= law.sum()
        else:
            law = exact_law(changed.astype(np.float32), sampling)
        found = np.zeros(16)
        found[list(one.top_ids)] = np.exp(one.top_logprobs)
        np.testing.assert_allclose(found, law, rtol=1e-4, atol=1e-9)
        assert np.exp(one.logprob) == pytest.approx(law[result.token_ids[place]], rel=1e-4)
    raw = replace(request, logprobs_mode="raw_logprobs")
    (other,) = Generator(FakeExecutor(draws=draws), options=options).generate([raw])
    assert other.token_ids == result.token_ids and other.logprobs != result.logprobs
    with pytest.raises(DflashError, match="logprobs_mode: 'raw_logits' is none of raw_logprobs, "):
        replace(request, logprobs_mode="raw_logits")  # type: ignore[arg-type]
