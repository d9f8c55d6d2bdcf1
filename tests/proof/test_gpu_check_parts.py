"""The GPU check's parts over stand-ins that compute: what they find, and that faults are found."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_trt.backends.base import SpeculationOutput, StepCall, TargetCall, TargetOutput
from dflash_trt.backends.device.executor import DeviceExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.core.progress import SilentProgress
from dflash_trt.deploy.planning.known_pairs import find_pair
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import CacheDtype, Precision
from dflash_trt.hardware.device import Device
from dflash_trt.models.sizes import LayerSizes
from dflash_trt.proof.gpu_check import check as parts
from dflash_trt.proof.gpu_check import engine_part, engine_probes, kernel_part, ratio_part
from dflash_trt.proof.gpu_check.cuda_probes import PROBES, check_cuda
from dflash_trt.proof.gpu_check.engine_part import PAIRS, RandomPair
from dflash_trt.proof.gpu_check.engine_probes import (
    CHANGING,
    DIRTY,
    DRAFTS,
    DRIFT,
    IN_PLACE,
    NEIGHBOURS,
)
from dflash_trt.proof.gpu_check.gpu_record import PartOutcome
from dflash_trt.proof.gpu_check.runner import Setting, run_here
from tests.cli.bigram import write_bigram_pair
from tests.cli.test_gpu_check import run_parts_here
from tests.covering import exhaustive
from tests.standins.cuda import FakeCuda
from tests.standins.driver import FakeDriver
from tests.standins.plugin_tensorrt import AOT_FLAG, PluginBuilder, PluginTensorRt
from tests.standins.stub_builder import FullBuilder, StubBuilder
from tests.standins.stub_builder import real as tensorrt_rtx
from tests.standins.tensorrt import FakeTensorRt, add_engines, install

LINEAR = RandomPair(1, "window", 64, False, CacheDtype.COMPUTE, 1, 4, 64)
PAGED = RandomPair(2, "window", 64, True, CacheDtype.COMPUTE, 1, 4, 64)


class EitherBuilder(PluginBuilder):
    """Builds networks with plugins, and such without."""

    def create_network(self, flags: int) -> Any:
        return super().create_network(flags | 1 << AOT_FLAG)

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        return FullBuilder.build_serialized_network_to_stream(self, network, config, writer)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRt:
    """Stand-ins for both libraries and their GPU, and pairs that are smaller still."""
    trt = FakeTensorRt(FakeCuda(arch=(12, 0)))
    install(monkeypatch, trt)

    def open_registered(bundle: Bundle, **options: Any) -> Any:
        add_engines(trt, bundle)
        return open_executor(bundle, **options)

    full = PluginTensorRt()
    full.Builder = EitherBuilder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tensorrt", full)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", full.plugin)
    monkeypatch.setattr("tensorrt_rtx.Builder", StubBuilder)
    monkeypatch.setattr(engine_part, "open_executor", open_registered)
    monkeypatch.setattr(engine_part, "PRECISION", Precision.FLOAT16)
    monkeypatch.setattr(engine_part, "PROMPT_LENGTHS", (20, 5))
    monkeypatch.setattr(engine_part, "RANDOM_TOKENS", 6)
    for name, size in {"HIDDEN": 64, "MLP": 64, "VOCABULARY": 300, "PREFILL_CHUNK": 24}.items():
        monkeypatch.setattr(engine_part, name, size)
    for name, size in {"CALLS": 12, "CHANGES": 10, "SIZES": 3}.items():
        monkeypatch.setattr(engine_probes, name, size)
    return trt


def check(gpu: FakeTensorRt, folder: Path, shape: RandomPair | None = PAGED) -> PartOutcome:
    """The part of one random pair: with plugins where its caches need them."""
    library, plugins = (TENSORRT, True) if shape and shape.needs_plugins else (TENSORRT_RTX, False)
    gpu.version = "11.4.0" if plugins else str(tensorrt_rtx.__version__)
    folder.mkdir()
    setting = Setting(folder, time.monotonic() + 600)
    return run_here(
        lambda given: engine_part.check_engines(library, shape, given, plugins=plugins), setting
    )


def wrong(outcome: PartOutcome) -> set[str]:
    return {one.name for one in outcome.probes if one.passed is False}


def test_the_stand_ins_do_all_that_is_believed(
    gpu: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_part, "load_driver", lambda: FakeDriver(gpu.cuda))
    setting = Setting(tmp_path, time.monotonic() + 600)
    found = {
        "CUDA": run_here(check_cuda, setting),
        "kernels: accept": run_here(
            lambda given: kernel_part.check_kernels("accept", 0, 1, given), setting
        ),
        "TensorRT with plugins: paged": check(gpu, tmp_path / "paged"),
        "TensorRT-RTX: linear": check(gpu, tmp_path / "linear", LINEAR),
    }
    for name, outcome in found.items():
        assert (outcome.status, wrong(outcome)) == ("done", set()), (name, outcome.reason)
    assert len(found["CUDA"].probes) == len(PROBES) and gpu.cuda.is_clean
    # The bounds are for bfloat16, whose steps are eight times as wide as those of float16 here.
    for outcome in list(found.values())[2:]:
        figures = {one.name: one.figures for one in outcome.probes}
        rows = figures[IN_PLACE]
        assert 8 * max(rows["relative_errors"].values()) < rows["bound"] / 4
        assert 8 * figures[CHANGING]["worst"] < figures[CHANGING]["bound"] / 4
        assert 1 - figures[DRAFTS]["same"] < (1 - engine_probes.DRAFTS_AGREE) / 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [*PAIRS, None], ids=lambda shape: shape.name if shape else "demo")
def test_every_pair_is_as_it_should_be(
    gpu: FakeTensorRt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: RandomPair | None,
) -> None:
    monkeypatch.setattr(engine_part, "DEMO", str(write_bigram_pair(tmp_path / "demo", head_dim=16)))
    outcome = check(gpu, tmp_path / "work", shape)
    assert (outcome.status, outcome.reason, wrong(outcome)) == ("done", None, set())
    assert gpu.cuda.is_clean


def _elsewhere(gpu: FakeTensorRt, patch: pytest.MonkeyPatch) -> None:
    """What a pass writes into caches is gone when it has ended, as of an output of its own."""
    real = DeviceExecutor.forward

    def forward(self: DeviceExecutor, call: TargetCall) -> TargetOutput:
        base = min(self.caches._addresses.values())
        before = gpu.cuda.memory[base].copy()
        output = real(self, call)
        gpu.cuda.memory[base][...] = before
        return output

    patch.setattr(DeviceExecutor, "forward", forward)


def _forward(change: Callable[..., None]) -> Callable[..., None]:
    """Changes what a pass left, or its output."""

    def damage(gpu: FakeTensorRt, patch: pytest.MonkeyPatch) -> None:
        real = DeviceExecutor.forward

        def forward(self: DeviceExecutor, call: TargetCall) -> TargetOutput:
            output = real(self, call)
            change(gpu.cuda, self.caches, call, output.logits)
            return output

        patch.setattr(DeviceExecutor, "forward", forward)

    return damage


def _astray(cuda: FakeCuda, caches: Any, call: TargetCall, logits: Any) -> None:
    """A byte of the row before the call's own is written."""
    if call.starts[0]:
        address = caches.row_places("target_v_0", call.first_slot, int(call.starts[0]) - 1)[0]
        cuda.array(address, (1,), np.uint8)[...] ^= 1


def _past_the_end(cuda: FakeCuda, caches: Any, call: TargetCall, logits: Any) -> None:
    """Logits have a part of a row far behind a sequence's last."""
    if call.starts[0] + call.rows == 20 and logits is not None:
        address = caches.row_places("target_v_0", call.first_slot, 38)[0]
        logits[0] += cuda.array(address, (1,), np.float16)


def _beside_others(cuda: FakeCuda, caches: Any, call: TargetCall, logits: Any) -> None:
    if call.batch > 1 and logits is not None:
        logits[...] = logits[:, ::-1].copy()


def _other_drafts(gpu: FakeTensorRt, patch: pytest.MonkeyPatch) -> None:
    real = DeviceExecutor.speculate

    def speculate(self: DeviceExecutor, call: StepCall) -> SpeculationOutput:
        output = real(self, call)
        output.token_ids[:, 1:] = 5
        return output

    patch.setattr(DeviceExecutor, "speculate", speculate)


def _leak(gpu: FakeTensorRt, patch: pytest.MonkeyPatch) -> None:
    calls = count()
    patch.setattr(Device, "free_bytes", lambda self: (1 << 30) - next(calls) * (1 << 22))


def _refuse_capture(device: Any) -> int:
    device.abandon_capture()
    raise DflashError("not today")


@pytest.mark.parametrize(
    ("damage", "names", "shape"),
    [
        (_elsewhere, {IN_PLACE}, LINEAR),
        (_forward(_astray), {NEIGHBOURS}, LINEAR),
        exhaustive(_forward(_past_the_end), {DIRTY}, PAGED),
        exhaustive(_leak, {DRIFT}, LINEAR),
        (_forward(_beside_others), {CHANGING}, LINEAR),
        (_other_drafts, {DRAFTS}, LINEAR),
        (
            lambda gpu, patch: patch.setattr(Device, "end_capture", _refuse_capture),
            {"CUDA graphs replay the step"},
            LINEAR,
        ),
        (lambda gpu, patch: gpu.fail.add("run"), {"tokens are the CPU's"}, LINEAR),
        (
            lambda gpu, patch: patch.setattr(engine_part, "build_pair", lambda *a, **b: 1 / 0),
            set(),
            LINEAR,
        ),
    ],
)
def test_what_is_wrong_is_found(
    gpu: FakeTensorRt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[..., Any],
    names: set[str],
    shape: RandomPair,
) -> None:
    damage(gpu, monkeypatch)
    outcome = check(gpu, tmp_path / "work", shape)
    assert names <= wrong(outcome), wrong(outcome)
    assert outcome.passed is False
    if names:
        assert outcome.probes[-1].name == engine_part.REOPENS, "one finding ends no other"
    else:
        assert outcome.reason == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("arch", "library", "plugins", "reason"),
    [
        ((9, 0), TENSORRT_RTX, False, "TensorRT-RTX has no sm_90"),
        ((8, 9), TENSORRT, True, "there are no kernels for sm_89"),
    ],
)
def test_what_a_gpu_lacks_is_skipped(
    gpu: FakeTensorRt,
    tmp_path: Path,
    arch: tuple[int, int],
    library: Library,
    plugins: bool,
    reason: str,
) -> None:
    gpu.cuda.arch, setting = arch, Setting(tmp_path, time.monotonic() + 600)
    outcome = run_here(
        lambda given: engine_part.check_engines(library, LINEAR, given, plugins=plugins), setting
    )
    assert (outcome.status, outcome.reason, outcome.passed) == ("skipped", reason, None)


def test_kernels_are_timed_and_stop_when_their_time_is_up(
    gpu: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call takes a millisecond; the points are spread."""
    monkeypatch.setattr("dflash_plugins.testing.gpu.FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr(kernel_part, "load_driver", lambda: FakeDriver(gpu.cuda))
    now = time.monotonic()
    timed = run_here(
        lambda given: kernel_part.measure_kernels("accept", given), Setting(tmp_path, now + 600)
    )
    names = [one.name for one in timed.probes]
    cases = ("1 × 8", "64 × 8", "8 × 8", "64 × 16")
    assert names == [f"time of accept, {case} rows" for case in cases]
    assert timed.probes[0].detail.startswith("1,000.0 µs") and timed.passed is None
    late = run_here(
        lambda given: kernel_part.check_kernels("accept", 0, 1, given), Setting(tmp_path, now)
    )
    assert (late.status, late.passed, len(late.probes)) == ("out of time", True, 1)
    assert late.reason == "the others are left to --only" and gpu.cuda.is_clean


@pytest.fixture
def here(gpu: FakeTensorRt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Each part in this process: tiny pairs, one operation, a sanitizer that says what it ran."""
    demo = write_bigram_pair(tmp_path / "demo", head_dim=16)
    known = find_pair("qwen3-8b")
    sizes = replace(known.target.sizes, hidden_size=32, intermediate_size=32)
    sizes = replace(sizes, layers=(LayerSizes(2, 1, 16),) * 6)
    target = replace(known.target, sizes=sizes, vocab_size=100)
    draft = replace(known.draft, sizes=replace(sizes, layers=sizes.layers[:2]), vocab_size=100)
    small = replace(known, target=target, draft=replace(draft, mask_token_id=99))
    tool = tmp_path / "bin" / kernel_part.TOOL
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\necho "========= ERROR SUMMARY: 0 errors"\n')
    tool.chmod(0o755)
    for module, names in {
        engine_part: {"DEMO": str(demo), "find_torch": lambda precision: None, "MAX_TOKENS": 8},
        ratio_part: {
            "find_torch": lambda precision: None,
            "find_pair": lambda name: small,
            "CONTEXT": 64,
            "TOKENS": 8,
            "RUNS": 1,
        },
        kernel_part: {"load_driver": lambda: FakeDriver(gpu.cuda), "STRESS_REPEATS": 2},
        parts: {
            "PAIRS": (LINEAR, PAGED),
            "SHARES": {"accept": 2},
            "FOLDERS": ("accept",),
            "ATTENTION": "accept",
            "STRESSED": ("accept",),
            "SANITIZERS": (("memcheck", "accept"),),
        },
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("dflash_plugins.testing.gpu.FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr("dflash_trt.decoding.tuning.block_times.STEPS_SECONDS", 0.0)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    run_parts_here(monkeypatch)
    return tool.with_suffix(".log")


@pytest.mark.exhaustive
def test_every_step_runs_to_its_end(here: Path, gpu: FakeTensorRt, tmp_path: Path) -> None:
    gpu.cuda.arch, gpu.version = (9, 0), "11.4.0"
    record = parts.check_gpu(tmp_path / "record", SilentProgress())
    ended = {name: (one.status, one.reason, wrong(one)) for name, one in record.parts.items()}
    skipped = ("skipped", "TensorRT-RTX has no sm_90", set[str]())
    assert ended == {
        part.name: skipped if part.step == "TensorRT-RTX" else ("done", None, set())
        for part in parts.check_parts()
    }
    assert "accept" in here.read_text() and gpu.cuda.is_clean


@pytest.mark.parametrize("step", ["stress", "compile", "sanitizers", "ratio"])
def test_a_step_is_looked_at_again(
    here: Path, gpu: FakeTensorRt, tmp_path: Path, step: str
) -> None:
    record = parts.check_gpu(tmp_path, SilentProgress(), [step])
    assert {name.partition(": ")[0] for name in record.parts} == {step}
    for outcome in record.parts.values():
        assert outcome.status == "done" and outcome.passed is not False, outcome


def test_parts_have_names_of_their_own_and_pairs_of_every_kind() -> None:
    listed = parts.check_parts()
    for part in listed:
        assert callable(pickle.loads(pickle.dumps(part.work))), "a child imports it"
    assert len({part.name for part in listed}) == len(listed)
    steps = "CUDA torch ratio kernels compile stress sanitizers speed".split()
    assert [*dict.fromkeys(part.step for part in listed)][:8] == steps
    for chosen in (
        [pair for pair in PAIRS if pair.is_paged],
        [pair for pair in PAIRS if not pair.is_paged],
        [pair for pair in PAIRS if not pair.needs_plugins],
    ):
        assert {pair.group for pair in chosen} == {1, 4, 8}
        assert {pair.attention for pair in chosen} == {"full", "sinks", "window"}
