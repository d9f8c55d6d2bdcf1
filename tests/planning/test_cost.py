"""Physics: never faster than a roofline, monotone in what hardware gives, experts as simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.bundle.memory.cache_bytes import kv_bytes
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.deploy.planning.calibration import PARAMETERS, Calibration, read_calibration
from dflash_trt.deploy.planning.cost import PassCost, Replica, Seconds, expected_experts
from dflash_trt.deploy.planning.known_pairs import (
    PairShape,
    find_pair,
    pair_names,
    published_decodings,
)
from dflash_trt.hardware.gpus import Gpu, find_gpu, gpu_names

CALIBRATION = read_calibration().parameters
IDEAL = Calibration(
    bandwidth_fraction=1,
    flops_fraction=1,
    layer_overhead_us=0,
    step_overhead_us=0,
    collective_us=0,
    link_fraction=1,
)
PAIRS = st.sampled_from(pair_names()).map(find_pair)
GPUS = st.sampled_from(gpu_names()).map(find_gpu)
BATCHES = st.integers(1, 512)
ROWS = st.integers(1, 16)


def _pass(pair: PairShape, batch: int, rows: int, context: float = 1000) -> PassCost:
    return PassCost(
        model=pair.target,
        sequences=batch,
        rows=rows,
        context=context,
        head_rows=rows,
        head_weights=pair.target.vocab_weights,
    )


@pytest.mark.parametrize(("count", "per_token"), [(128, 4), (32, 4), (128, 8)])
@pytest.mark.parametrize("tokens", [1, 3, 17, 100])
def test_experts_touched_as_simulated(count: int, per_token: int, tokens: int) -> None:
    generator = np.random.default_rng(count * tokens)
    runs = 300
    touched = [
        len({int(e) for _ in range(tokens) for e in generator.choice(count, per_token, False)})
        for _ in range(runs)
    ]
    error = max(np.std(touched) / runs**0.5, 1e-3)
    assert abs(np.mean(touched) - expected_experts(count, per_token, tokens)) <= 4 * error


@given(PAIRS, GPUS, BATCHES, ROWS)
def test_never_faster_than_a_roofline(pair: PairShape, gpu: Gpu, batch: int, rows: int) -> None:
    """Against bytes and FLOPs counted apart, on hardware without any overhead."""
    target, work = pair.target, _pass(pair, batch, rows)
    time = Replica(gpu, GpuLayout(), IDEAL).time(work).total
    per_token = 1 if target.experts is None else target.experts.chosen
    attention = sum(map(target.attention_weights, target.sizes.layers))
    active = attention + len(target.sizes.layers) * per_token * target.mlp_weights
    fastest = max(rate for rate in (gpu.bf16, gpu.fp8, gpu.fp4) if rate is not None)
    assert time >= 2 * batch * rows * active / fastest
    # At least one token's experts, at 4 bits or more, and every sequence's cache.
    assert time >= (active / 2 + batch * kv_bytes(target.sizes, 1000)) / gpu.bandwidth


@given(PAIRS, GPUS, BATCHES, ROWS, st.floats(1.0, 4.0), st.sampled_from([1, 2, 4, 8]))
def test_better_hardware_is_never_slower(
    pair: PairShape, gpu: Gpu, batch: int, rows: int, factor: float, size: int
) -> None:
    work = _pass(pair, batch, rows)
    base = Replica(gpu, GpuLayout(size), CALIBRATION).time(work).total
    for better in (
        replace(gpu, bandwidth=gpu.bandwidth * factor),
        replace(gpu, bf16=gpu.bf16 * factor),
        replace(gpu, link_bandwidth=gpu.link_bandwidth * factor),
    ):
        assert Replica(better, GpuLayout(size), CALIBRATION).time(work).total <= base * (1 + 1e-12)


@given(PAIRS, GPUS, BATCHES, ROWS, st.sampled_from(["tensor", "data"]))
def test_more_work_takes_longer(
    pair: PairShape, gpu: Gpu, batch: int, rows: int, attention: str
) -> None:
    if attention == "data" and pair.target.experts is None:
        attention = "tensor"
    replica = Replica(gpu, GpuLayout(4, attention), CALIBRATION)  # type: ignore[arg-type]
    base = replica.time(_pass(pair, batch, rows)).total
    assert replica.time(_pass(pair, batch, rows + 1)).total > base
    assert replica.time(_pass(pair, batch + 4, rows)).total > base
    assert replica.time(_pass(pair, batch, rows, context=2000)).total > base


@given(PAIRS, GPUS, BATCHES)
def test_each_parameter_pulls_its_way(pair: PairShape, gpu: Gpu, batch: int) -> None:
    decoding = published_decodings(pair, acceptance="1.5")[-1]

    def step(calibration: Calibration) -> float:
        return decoding.step(Replica(gpu, GpuLayout(2), calibration), batch, 1000, 3).total

    base = step(CALIBRATION)
    for name in PARAMETERS:
        other = step(CALIBRATION.scaled(name, 1.2))
        assert other < base if name.endswith("_fraction") else other > base


def test_seconds_add_up_and_name_the_largest() -> None:
    both = Seconds(weights=1, kv=2) + Seconds(compute=4) * 0.25
    assert both == Seconds(weights=1, kv=2, compute=1)
    assert (both.total, both.limit, both.largest) == (4, "KV bandwidth", 2)


def test_one_token_of_qwen3_4b_by_hand() -> None:
    pair, gpu = find_pair("qwen3-4b"), find_gpu("b200")
    time = Replica(gpu, GpuLayout(), IDEAL).time(_pass(pair, 1, 1))
    # All weights but no embedding of its own (it is tied), and 36 layers of 1,000 tokens.
    assert time.weights == pytest.approx(8.04e9 / 8e12, rel=0.01)
    assert time.kv == pytest.approx(1000 * 147456 / 8e12)
    assert time.launch == time.link == time.host == 0
