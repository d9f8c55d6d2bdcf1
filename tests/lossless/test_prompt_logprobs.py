"""Rung 2: a prompt's log-probabilities are those of its tokens chosen one by one, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.decoding import Request, TokenLogprob
from dflash_trt.decoding.logprobs import score_token
from dflash_trt.decoding.request import check_request
from dflash_trt.errors import DflashError
from tests.covering import exhaustive
from tests.lossless.runs import OUTPUT, assert_same, make_requests, run
from tests.pairs import PairFactory
from tests.standins.executor import FakeExecutor

PAGING = {"linear": None, "paged": {"page_size": 8, "pages": 24}}


def score_by_steps(executor: Executor, request: Request, top: int) -> tuple[TokenLogprob, ...]:
    """What each beginning of the prompt says of the token behind it."""
    ids, scores = request.prompt_ids, []
    for end in range(1, len(ids)):
        (result,) = run(executor, [replace(request, prompt_ids=ids[:end], max_tokens=1)])
        assert result.logits is not None
        scores.append(score_token(result.logits[0], ids[end], top))
    return tuple(scores)


@pytest.mark.parametrize("layout", [exhaustive("linear"), "paged"])
def test_they_are_those_of_single_tokens(layout: str, make_pair: PairFactory) -> None:
    built = make_pair(
        "qwen3", {"vocab": 64}, fit_steps=60, max_batch=8, max_seq_len=192, paging=PAGING[layout]
    )
    executor = open_executor(built.bundle, threads=1)
    plain = make_requests(64, 5)
    plain.append(plain[2])  # the same 90 tokens again, by then cached by another
    asked = [replace(one, prompt_logprobs=3 if at else None) for at, one in enumerate(plain)]
    expected = run(executor, plain)
    together = run(executor, asked, prefill_chunk=64)
    for want, got in zip(expected, together, strict=True):
        assert_same(want, got, "a scored prompt")
    assert together[0].prompt_logprobs is None and together[1].prompt_logprobs is not None
    assert together[5].prompt_logprobs == together[2].prompt_logprobs
    assert together[2].prompt_logprobs == score_by_steps(executor, plain[2], 3)
    if layout == "paged":  # some were preempted and computed again
        lost = [one.statistics.preemptions or 0 for one in together]
        assert sum(lost) > 0 and [len(one.token_ids) for one in together] == [OUTPUT] * 6


def test_engines_refuse_them() -> None:
    limits = replace(FakeExecutor().limits, takes_any_chunk=False)
    with pytest.raises(DflashError, match="prompt_logprobs: engines hand out the logits of a"):
        check_request(Request(prompt_ids=(3, 4), prompt_logprobs=0), limits, True)
