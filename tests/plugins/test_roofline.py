"""The calculator: its errors on published measurements are frozen, its arithmetic is checked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from dflash_plugins.assembler import Resources
from dflash_plugins.block_attention.benchmark import AttentionPoint
from dflash_plugins.block_attention.cases import draft_shape
from dflash_plugins.check import describe_speed, measure
from dflash_plugins.compile import CompiledKernel
from dflash_plugins.gated_delta_step.launch import CHUNKS, STEP, make_case
from dflash_plugins.operation import DType
from dflash_plugins.public import public_pairs, recurrences
from dflash_plugins.roofline import __main__ as command
from dflash_plugins.roofline import kernels, recurrence
from dflash_plugins.roofline.kernels import attention_work, open_predictor, split_tiles
from dflash_plugins.roofline.model import LaunchWork, predict_launch, resident_programs
from dflash_plugins.roofline.published import published_arithmetic, published_times
from dflash_plugins.roofline.rates import find_rates, rated_gpus, read_constants
from dflash_plugins.roofline.sampling import RowSteps, count_steps
from dflash_plugins.roofline.table import describe_errors

from dflash_trt.sampling.params import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "design" / "roofline.md"
FROZEN_POINTS = [
    -6.5,
    -11.0,
    -6.1,
    -3.2,
    15.8,
    11.9,
    -0.3,
    1.5,
    3.5,
    13.8,
    21.5,
    6.2,
    29.9,
    17.2,
    3.8,
]
"""Predicted less published share of bandwidth, in points, as committed before any redesign."""


def test_the_errors_on_published_measurements_are_frozen() -> None:
    """A change of the formula or its constants is a commit of its own, with a table of its own."""
    times = published_times()
    assert [round(one.error, 1) for one in times] == FROZEN_POINTS
    assert len({one.rates.name for one in times}) >= 3
    assert all(one.source.startswith("https://") and one.config for one in times)
    page = PAGE.read_text(encoding="utf-8")
    for one in times:
        row = (
            f"{one.seconds * 1e6:,.1f} µs, {one.share:.0%} | "
            f"{one.predicted.seconds * 1e6:,.1f} µs, {one.predicted_share:.0%} | {one.error:+.1f} |"
        )
        assert row in page, row
    assert list(describe_errors(times))[len(times) + 1] in page
    for constant in read_constants().values():
        assert f"`{constant.name}` | {constant.value:g} |" in page, constant.name


def test_whole_prompts_in_this_language_take_the_phases_of_a_tile_in_a_row() -> None:
    """Within what the tile, which is assumed, makes of it: half as long, it is 456 TFLOP/s."""
    page = PAGE.read_text(encoding="utf-8")
    (one,) = published_arithmetic()
    short = replace(one, positions=one.positions // 2)
    assert short.predicted < one.flops < one.predicted
    figures = (one.flops, one.predicted, short.predicted, one.by_hand)
    row = " | ".join(f"{figure / 1e12:.0f}" for figure in figures)
    assert f"| {one.rates.name.upper()} | {row} |" in page


def _stream(**other: Any) -> LaunchWork:
    """An even stream: a program on each SM of an H200, with 100 tiles of 32 KiB."""
    fields: dict[str, Any] = {
        "name": "stream",
        "groups": ((132, 100),),
        "tile_bytes": 32 << 10,
        "buffers": 2,
        "tile_seconds": 0.0,
        "resident": 1,
        "cached_loads": 0,
    }
    return LaunchWork(**fields | other)


@pytest.mark.parametrize(("occupancy", "published"), [(0.25, 935), (0.5, 1715), (1.0, 2775)])
def test_the_one_fitted_constant_is_what_a_streaming_benchmark_gave(
    occupancy: float, published: float
) -> None:
    """gpu-benches' read kernel: 2,048 loads of 8 bytes an SM, 545 ns alone, 3,942 GB/s at most."""
    rates = replace(find_rates("h200"), reach=3.942e12, memory_latency=545e-9)
    held = 2048 * 8 * occupancy
    time = predict_launch(_stream(tile_bytes=held, buffers=1), rates)
    assert time.work.read_bytes / time.stream == pytest.approx(published * 1e9, rel=0.05)


def test_little_s_law_bounds_a_stream() -> None:
    rates = find_rates("h200")
    alone = predict_launch(_stream(groups=((1, 1000),)), rates)
    assert alone.stream == pytest.approx(1000 * rates.memory_latency / 2, rel=0.01)
    times = [predict_launch(_stream(buffers=count), rates) for count in (1, 2, 4, 16)]
    assert [one.stream for one in times] == sorted((one.stream for one in times), reverse=True)
    least = times[0].work.read_bytes / rates.reach
    assert all(one.stream >= least for one in times)
    assert times[-1].stream == pytest.approx(least, rel=0.01)
    assert times[0].load < times[1].load < times[-1].load < 1


def test_arithmetic_bounds_a_program_and_programs_of_an_sm_share_it() -> None:
    rates, tile = find_rates("h200"), 10e-6
    one = predict_launch(_stream(tile_seconds=tile), rates)
    assert one.stream == pytest.approx(100 * tile, rel=0.01)
    two = predict_launch(_stream(tile_seconds=tile, groups=((264, 100),), resident=2), rates)
    assert two.stream == pytest.approx(2 * one.stream, rel=0.01)
    waves = predict_launch(_stream(tile_seconds=tile, groups=((264, 100),)), rates)
    assert (one.waves, two.waves, waves.waves) == (1, 1, 2)
    assert waves.stream == pytest.approx(2 * one.stream, rel=0.01)
    assert waves.latency == 2 * one.latency


def test_programs_of_an_sm() -> None:
    """By registers, by shared memory and by threads, each with what the system rounds and keeps."""
    h200, rtx = find_rates("h200"), find_rates("rtx-pro-6000")
    assert resident_programs(h200, threads=128, registers=184, shared_bytes=114_688) == 2
    assert resident_programs(h200, threads=256, registers=162, shared_bytes=1024) == 1
    assert resident_programs(h200, threads=128, registers=129, shared_bytes=0) == 3
    assert resident_programs(rtx, threads=128, registers=32, shared_bytes=45_056) == 2
    assert resident_programs(rtx, threads=128, registers=32, shared_bytes=50_176) == 2
    assert resident_programs(rtx, threads=128, registers=32, shared_bytes=50_177) == 1
    assert resident_programs(rtx, threads=256, registers=16, shared_bytes=0) == 6


@pytest.mark.parametrize(
    ("first", "end", "splits"),
    [(0, 1, 3), (0, 128, 3), (0, 129, 2), (700, 1041, 3), (0, 5000, 4), (4900, 5000, 4)],
)
def test_splits_have_the_tiles_that_the_kernel_gives_them(
    first: int, end: int, splits: int
) -> None:
    run, tile = 128, 64
    owners = [0] * splits
    for position in range(first // tile * tile, end, tile):
        owners[position // run % splits] += 1
    assert [split_tiles(one, first, end, splits, run, tile) for one in range(splits)] == owners


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel takes what the block's of Qwen3-8B's draft took on sm_90a."""

    def compile_kernel(spec: Any, arch: str, folder: Path) -> CompiledKernel:
        took = Resources(123, 114_688, 0, 0, 0)
        return CompiledKernel(spec.kernel, arch, "", b"", spec.warps * 32, 114_688, took)

    monkeypatch.setattr(kernels, "compile_kernel", compile_kernel)
    monkeypatch.setattr(recurrence, "compile_kernel", compile_kernel)
    monkeypatch.setattr(command, "check_compiler", lambda: None)


@pytest.mark.usefixtures("compiled")
def test_a_kernel_s_work_is_its_launch_s_and_its_machine_code_s() -> None:
    shape = replace(draft_shape(public_pairs()["qwen3-8b"], 0), length=4160)
    point = AttentionPoint("", shape, 8, 4096, 16)
    work = attention_work(point, 0, find_rates("h200"), Path("unused"))
    assert (work.buffers, work.resident, work.row_blocks) == (3, 2, 1)
    assert (work.tile_rows, work.tile_positions, work.splits) == (64, 64, 4)
    assert sum(work.tiles) == math.ceil(4112 / 64) and work.groups == ((8 * 8, 17), (8 * 8 * 3, 16))
    assert work.cache_bytes == 8 * 4112 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        (SamplingParams(), RowSteps(0, 1, 0)),
        # Eight groups may get furthest and are opened, the winner's again, and for its exact score.
        (SamplingParams(temperature=0.1), RowSteps(8, 0, 3)),
        # The winner is the likeliest: what ranks before it is in no group but its own.
        (SamplingParams(temperature=0.1, top_p=0.5), RowSteps(8, 1, 3)),
        # 16 bits of keys find the peak, and one opening where logits equal to it end.
        (SamplingParams(temperature=0.1, top_k=1), RowSteps(24, 1, 3)),
    ],
)
def test_the_steps_of_a_row_are_what_its_logits_demand(
    sampling: SamplingParams, steps: RowSteps
) -> None:
    logits = np.zeros(20 * 256, np.float32)
    logits[700] = 16.0
    assert count_steps(logits, DType.BFLOAT16, sampling, 0) == steps


def _run(*words: str) -> Result:
    return CliRunner().invoke(command.main, words)


@pytest.mark.usefixtures("compiled")
def test_the_table_says_time_share_and_limit_of_what_was_asked_for() -> None:
    words = ["--gpu", "h200", "--pair", "qwen3-8b", "--batch", "1", "--context", "8192"]
    outcome = _run(*words)
    assert outcome.exit_code == 0, outcome.output
    assert "block_attention, H200 SXM, qwen3-8b bf16: predictions" in outcome.output
    assert "row_sample, top-k 20, top-p 0.95" in outcome.output
    assert "launch_us = 1.28" in outcome.output and "RRZE-HPC/gpu-benches" in outcome.output
    rows = json.loads(_run(*words, "--json").output)
    wide = {command.ATTENTION, command.RECURRENCE}
    assert {row["kernel"] for row in rows} == wide | set(command.SMALL_KERNELS)
    assert all(row["predicted_seconds"] > 1e-6 for row in rows)
    small = [row for row in rows if row["kernel"] not in wide]
    assert all(0 < row["predicted_step_share"] < 1 for row in small)
    (alone,) = json.loads(_run(*words, "--json", "--kernel", "block_attention").output)
    assert 0 < alone["predicted_share"] < 1 and alone["required_bytes"] > 32 << 20


def test_the_errors_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(command, "check_compiler", fail)
    outcome = _run("--check")
    assert outcome.exit_code == 0 and "11 of 15 within 15 points" in outcome.output
    told = json.loads(_run("--check", "--json").output)
    assert {name: len(rows) for name, rows in told.items()} == {"decode": 15, "prompts": 1}
    assert told["prompts"][0]["flops"] == 487e12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "b20"], "--gpu: no figures are known of a GPU called 'b20' (nearest: 'b200');"),
        (["--gpu", "gb10"], "--gpu: no figures are known of a GPU called 'gb10' (nearest: "),
        (["--pair", "qwen3"], "--pair: 'qwen3' is not known (nearest: 'qwen3-8b'); choose of "),
        (["--kernel", "acept"], "--kernel: 'acept' is not known (nearest: 'accept'); choose of "),
        (["--batch", "0"], "Invalid value for '--batch'"),
        (["--check", "--gpu", "h200"], "--gpu: --check prints every published measurement"),
        (["--kernel", "accept", "--paged"], "--paged: is for block_attention, which --kernel"),
    ],
)
def test_what_is_not_known_is_refused_with_the_nearest(words: list[str], message: str) -> None:
    outcome = _run(*words)
    assert outcome.exit_code == 2
    assert message in outcome.output


def test_gpus_whose_figures_have_a_source_are_rated() -> None:
    assert set(command.GPUS) <= set(rated_gpus())
    for name in rated_gpus():
        rates = find_rates(name)
        assert rates.reach < rates.bandwidth < rates.l2_bandwidth
        assert rates.l2_latency < rates.memory_latency < rates.launch


@pytest.mark.usefixtures("compiled")
def test_a_recurrence_is_bound_by_rows_and_then_by_its_state() -> None:
    words = ["--gpu", "h200", "--kernel", "gated_delta_step", "--batch", "1", "--batch", "64"]
    rows = json.loads(_run(*words, "--json").output)
    assert [row["batch"] for row in rows] == [1, 64] * 3
    for one, many in zip(rows[::2], rows[1::2], strict=True):
        # Two chunks, each with 4,530 instructions of 256 threads, at 253 a nanosecond.
        assert one["predicted_seconds"] > 2 * 4530 * 256 / 253e9
        assert many["predicted_seconds"] > many["required_bytes"] / find_rates("h200").bandwidth
        assert one["predicted_share"] < many["predicted_share"]


@pytest.mark.usefixtures("compiled")
def test_a_recurrence_takes_its_faster_tactic() -> None:
    """A plain step goes by rows; a block's chunk waits less than its 16 rows."""
    (sizes, *_), rates, folder = recurrences().values(), find_rates("h200"), Path("unused")
    for count, tactic in ((1, STEP), (16, CHUNKS)):
        case = make_case("", sizes, batch=64, count=count)
        own, other = (
            recurrence.predict_recurrence(case, rates, folder, one).seconds
            for one in (tactic, STEP + CHUNKS - tactic)
        )
        assert recurrence.predict_recurrence(case, rates, folder).seconds == own < other


@pytest.mark.usefixtures("compiled")
def test_a_measurement_has_its_prediction_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, arch, total_bytes = "NVIDIA H200", "sm_90", 150 * 10**9

    class Torch:
        class cuda:  # noqa: N801
            OutOfMemoryError = MemoryError
            empty_cache = staticmethod(lambda: None)

    predict: Any = open_predictor(Card, Path("unused"))  # type: ignore[arg-type]
    monkeypatch.setattr("dflash_plugins.accept.benchmark.measure", lambda *given: {"seconds": 2e-6})
    runner: Any = None
    row = next(measure("accept", Torch, runner, 1e12, predict))
    assert row["predicted_seconds"] == pytest.approx(1.6e-6, rel=0.1)
    assert describe_speed(row | {"rival_seconds": {}}) == "2.0 µs, predicted 1.6"
    Card.name = "NVIDIA GB10"
    assert open_predictor(Card, Path("unused")) is None  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", command.GPUS)
def test_every_kernel_compiles_to_a_time(
    name: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    monkeypatch.setattr(command, "user_cache_file", lambda name: kernels)
    outcome = _run("--gpu", name, "--json")
    assert outcome.exit_code == 0, outcome.output
    assert all(row["predicted_seconds"] > 1e-6 for row in json.loads(outcome.output))
