"""Drafts that share the noise of sampled draws change how many are accepted, and no bit."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.runtime.statistics import total
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair

# Of all but one draft of a block of 8.
SHARPNESS = (1.0, 1.0, 1.5, 2.0, 1e6, 1.0, 1.0)


@pytest.fixture(scope="module")
def built(make_pair: PairFactory) -> TinyPair:
    return make_pair(draft={"block_size": 8}, fit_steps=60, sharpness=SHARPNESS)


@pytest.fixture(scope="module")
def plain(make_pair: PairFactory) -> TinyPair:
    return make_pair(draft={"block_size": 8}, fit_steps=60)


@pytest.fixture(scope="module")
def paged(make_pair: PairFactory) -> TinyPair:
    paging = {"page_size": 16, "pages": 128}
    return make_pair(draft={"block_size": 8}, fit_steps=60, sharpness=SHARPNESS, paging=paging)


def requests() -> list[Request]:
    """Greedy and sampled ones, filtered ones too."""
    return [
        Request(
            prompt_ids=(3, 1, 4, 1 + one, 5),
            max_tokens=40,
            sampling=SamplingParams(
                temperature=one % 4 * 0.5,
                seed=2**40 + one,
                top_k=30 if one == 6 else None,
                top_p=0.9 if one == 7 else 1.0,
            ),
            block_size=5 if one == 9 else None,
        )
        for one in range(12)
    ]


@pytest.mark.parametrize("caches", ["linear", exhaustive("paged")])
def test_no_bit_depends_on_it(
    built: TinyPair, paged: TinyPair, plain: TinyPair, caches: str
) -> None:
    options = GeneratorOptions(record_logits=True)
    expected = Generator(
        plain.open(), options=GeneratorOptions(speculation=False, record_logits=True)
    ).generate(requests())
    likeliest = Generator(plain.open(), options=options).generate(requests())
    coupled = (built if caches == "linear" else paged).open()
    results = Generator(coupled, options=options).generate(requests())
    for want, got in zip(expected, results, strict=True):
        assert want.token_ids == got.token_ids
        np.testing.assert_array_equal(want.logits, got.logits)
    greedy = [one.sampling.greedy for one in requests()]
    for same, before, after in zip(greedy, likeliest, results, strict=True):
        if same:
            assert before.statistics.accepted_tokens == after.statistics.accepted_tokens
    drawn = [
        total(one.statistics for one, is_greedy in zip(each, greedy, strict=True) if not is_greedy)
        for each in (likeliest, results)
    ]
    # The draft learnt the target's law, so that sharing its noise pays.
    assert drawn[1].acceptance_length > 1.03 * drawn[0].acceptance_length  # type: ignore[operator]
