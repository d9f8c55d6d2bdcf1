"""FP8 KV caches on the CPU: every promise of bits holds over what E4M3 makes of K and V."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from tests.inspection import arrays
from tests.lossless.runs import (
    OUTPUT,
    check_groups,
    check_shared_prefix,
    count_tokens,
    make_requests,
    run,
    run_baseline,
    run_traffic,
)
from tests.pairs import TWO_KINDS, PairFactory, TinyPair

pytestmark = pytest.mark.covering(1)

PAGING = {"page_size": 8, "pages": 61}
PAIRS: dict[str, dict[str, Any]] = {
    # Scales of 0.01 in the target's checkpoint, which clip its largest keys; the draft's are 1.
    "qwen3_scaled": {
        "family": "qwen3",
        "target": {"vocab": 64, "num_layers": 4},
        "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
        "fit_steps": 60,
        "quantize": {"target": {"algorithm": "FP8", "kv_cache": True}},
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": 64, "num_layers": 2, "experts": 4, "chosen": 2, "rope": "yarn"},
        "draft": {"target_layer_ids": [0, 1]},
    },
}
LIMITS = {"max_seq_len": 192, "max_batch": 8}


class Case:
    """A pair by what its caches are, its requests, and what target_only makes of each alone."""

    def __init__(self, make_pair: PairFactory, name: str) -> None:
        def make(**caches: Any) -> TinyPair:
            return make_pair(**PAIRS[name], **LIMITS, **caches)

        self.plain = make()
        self.bundles = {
            "linear": make(kv_dtype="fp8"),
            "paged": make(kv_dtype="fp8", paging=PAGING),
        }
        self.requests = make_requests(64, 8)
        self.expected = run_baseline(self.bundles["linear"].open(), self.requests)


@pytest.fixture(scope="module", params=list(PAIRS))
def case(request: pytest.FixtureRequest, make_pair: PairFactory) -> Case:
    return Case(make_pair, request.param)


@pytest.fixture(params=["linear", "paged"])
def executor(request: pytest.FixtureRequest, case: Case) -> Executor:
    return open_executor(case.bundles[request.param].bundle, threads=1)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("batch", "block", "chunk"), [(1, 3, 17), (8, 8, 5)])
def test_speculation_keeps_every_bit(
    case: Case, executor: Executor, batch: int, block: int, chunk: int
) -> None:
    options = {"block_size": block, "prefill_chunk": chunk}
    check_groups(executor, case.requests, case.expected, batch, **options)


def test_sampled_tokens_do_not_depend_on_speculation(case: Case, executor: Executor) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20, seed=5)
    requests = make_requests(64, 4, sampling)
    check_groups(executor, requests, run_baseline(executor, requests), 4, block_size=5)


def test_traffic_that_comes_and_goes_keeps_every_bit(case: Case, executor: Executor) -> None:
    """With pages, too few of them for all: the youngest are preempted and computed anew."""
    rng = random.Random(2)
    generator = Generator(executor, options=GeneratorOptions(record_logits=True, prefill_chunk=17))
    results = run_traffic(generator, case.requests, case.expected, rng)
    assert count_tokens(results) > 5 * OUTPUT


def test_a_shared_prefix_changes_neither_bits_nor_acceptance(case: Case) -> None:
    """Codes of a prefix are the same whoever computed them, the drafter's context included."""
    linear, paged = (case.bundles[name].open() for name in ("linear", "paged"))
    check_shared_prefix(linear, paged, (1, 3))


def test_rounding_is_there(case: Case) -> None:
    """The promises above could hold of a build that did nothing."""
    prompt = Request(prompt_ids=case.requests[2].prompt_ids, max_tokens=1, ignore_eos=True)
    (plain,) = run(case.plain.open(), [prompt])
    (rounded,) = run(case.bundles["linear"].open(), [prompt])
    assert plain.logits is not None and rounded.logits is not None
    change = np.abs(rounded.logits - plain.logits).max() / np.abs(plain.logits).max()
    assert 1e-4 < change < 0.5


def test_caches_hold_what_codes_stand_for(case: Case) -> None:
    """float32 numbers on the grid of E4M3 times the scale, K, V and the draft's context alike."""
    opened = case.bundles["linear"].open()
    run(opened, case.requests[:2])
    target = case.plain.pair.target
    scaled = target.quantization is not None
    for name, cache in arrays(opened).items():
        scale = np.float32(0.01 if scaled and name.startswith("target") else 1)
        codes = (cache / scale).astype("float8_e4m3fn").astype(np.float32)
        assert np.abs(codes).max() <= 448
        np.testing.assert_array_equal(cache, codes * scale, name)
