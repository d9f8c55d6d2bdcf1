"""The planner's answers: within memory, as asked, and the best of what was looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.deploy.planning.acceptance_rates import AcceptanceCurve, read_acceptance
from dflash_trt.deploy.planning.calibration import PARAMETERS, read_calibration
from dflash_trt.deploy.planning.decoding import Autoregressive, DFlash
from dflash_trt.deploy.planning.known_pairs import find_pair, published_decodings
from dflash_trt.deploy.planning.layout_search import (
    Site,
    Workload,
    answer,
    memory_of,
    possible_layouts,
    project,
)
from dflash_trt.deploy.planning.projection import Projection, make_projection
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import find_gpu

WORKLOAD = Workload(1024, 1024, 2048)


def _site(name: str, gpus: int, pair: str) -> Site:
    gpu, shape = find_gpu(name), find_pair(pair)
    layouts = possible_layouts(gpu, gpus, [shape.target, shape.draft])
    return Site(gpu, gpus, layouts, read_calibration().parameters)


@pytest.fixture(scope="module")
def plan() -> Projection:
    pair = find_pair("gpt-oss-120b")
    site = _site("b300", 8, pair.name)
    return make_projection(pair, site, WORKLOAD, 500, published_decodings(pair))


def test_layouts_divide_gpus_and_model() -> None:
    assert [one.label for one in _site("b300", 8, "gpt-oss-120b").layouts] == [
        *("1 GPU", "TP 2", "DP+EP 2", "TP 4", "DP+EP 4", "TP 8", "DP+EP 8"),
    ]
    assert [one.label for one in _site("b300", 6, "qwen3-8b").layouts] == ["1 GPU", "TP 2"]
    # PCIe and NVLink domains end at eight GPUs; replicas fill the rest.
    assert max(one.gpus for one in _site("h100", 72, "qwen3-8b").layouts) == 8
    assert max(one.gpus for one in _site("gb200", 64, "qwen3-8b").layouts) == 32


def test_points_fit_in_memory(plan: Projection) -> None:
    for kind, points in plan.points.items():
        decoding = plan.decodings[kind]
        users = {
            one: memory_of(plan.site, one, decoding, WORKLOAD).users for one in plan.site.layouts
        }
        assert all(point.batch <= users[point.layout] for point in points)


def test_no_point_beats_the_answer(plan: Projection) -> None:
    for kind, points in plan.points.items():
        for asked in (50, 200, 333, 410, 500, 700):
            found = plan.answer(kind, asked)
            fast = [point for point in points if point.interactivity >= asked]
            assert (found is None) == (not fast)
            if found is not None:
                assert found.interactivity >= asked
                assert found.throughput >= max(point.throughput for point in fast) * (1 - 1e-9)


def test_ratios_are_of_answers(plan: Projection) -> None:
    assert plan.answer("autoregressive") is None and plan.ratio("DFlash") is None
    slow = make_projection(plan.pair, plan.site, WORKLOAD, 200, published_decodings(plan.pair))
    base, drafted = slow.answer("autoregressive"), slow.answer("DFlash")
    assert base is not None and drafted is not None
    assert slow.ratio("DFlash") == drafted.throughput / base.throughput > 1


def test_blocks_shrink_with_load(plan: Projection) -> None:
    blocks = [best.verified for best, _ in plan.blocks()]
    assert blocks == sorted(blocks, reverse=True) and blocks[0] == 10


def test_sensitivity_has_the_right_signs(plan: Projection) -> None:
    assert [one.parameter for one in plan.sensitivity] == ["τ", *PARAMETERS]
    for one in plan.sensitivity:
        assert one.lower is not None and one.higher is not None
        if one.parameter == "τ" or one.parameter.endswith("_fraction"):
            assert one.lower <= 0 <= one.higher
        else:
            assert one.higher <= 0 <= one.lower


@settings(max_examples=15)
@given(st.integers(1, 4000), st.integers(1, 4000))
def test_prefill_costs_throughput(inputs: int, more: int) -> None:
    site, pair = _site("h200", 1, "qwen3-8b"), find_pair("qwen3-8b")
    decoding = Autoregressive(pair.target)
    short, long = (
        answer(site, decoding, Workload(tokens, 512, 16384), 50)
        for tokens in (inputs, inputs + more)
    )
    assert short is not None
    assert long is None or long.throughput <= short.throughput * (1 + 1e-9)


@given(st.floats(1.0, 16.0), st.integers(1, 15))
def test_flat_acceptance_has_its_tau(tau: float, drafts: int) -> None:
    if tau > drafts + 1:
        with pytest.raises(DflashError, match="not between"):
            AcceptanceCurve.of_tau(tau, drafts, "")
        return
    curve = AcceptanceCurve.of_tau(tau, drafts, "")
    assert curve.tau(drafts) == pytest.approx(tau, abs=1e-6)
    assert curve.tau(0) == 1
    assert [curve.tau(k) for k in range(drafts + 1)] == sorted(
        curve.tau(k) for k in range(drafts + 1)
    )


def test_measured_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"acceptance": {"conditional": [0.9, 0.5, None]}}))
    curve = read_acceptance(str(path), 15)
    assert curve.conditional == (0.9, 0.5)
    assert curve.tau(2) == pytest.approx(1 + 0.9 + 0.45)
    # A file that tells less than the trained block limits the block.
    pair = find_pair("qwen3-8b")
    assert list(DFlash(pair.target, pair.draft, curve).drafts()) == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "conditional"),
        ('{"conditional": []}', "conditional"),
        ('{"conditional": [1.5]}', "conditional"),
        ('{"conditional": ["a"]}', "conditional"),
        ('{"conditional": [null]}', "conditional"),
        ("[0.9", "not valid JSON"),
    ],
)
def test_acceptance_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    """Wrong usage: no broken download."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DflashError, match=message) as caught:
        read_acceptance(str(path), 15)
    assert caught.value.exit_code == 2 and caught.value.fix is None


def test_layout_of_one_gpu_needs_no_link() -> None:
    site, pair = _site("b300", 1, "gpt-oss-120b"), find_pair("gpt-oss-120b")
    points = project(site, Autoregressive(pair.target), WORKLOAD)
    assert points and all(point.step.link == 0 and point.layout == GpuLayout() for point in points)
