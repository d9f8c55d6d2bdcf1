"""What no kernel of TensorRT's does, through its executor on a stand-in: the CPU's tokens."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.base import Executor, Scores, TargetCall, hold_positions
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import find_arch
from dflash_trt.bundle.build import BuildOptions
from dflash_trt.graph.caches import native
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import one_chunk
from tests.backends.tensorrt.machine import Machine, make_machine, run_alone
from tests.covering import exhaustive
from tests.lossless.test_hybrids import PAIR
from tests.pairs import FIT_PROMPTS, PairFactory, TinyPair, write_bundle
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.stub_builder import StubBuilder

LIMITS = {"max_batch": 4, "max_seq_len": 192, "prefill_chunk": 40}
PROMPTS = (*map(tuple, FIT_PROMPTS), (31,) * 45, (40,), tuple(range(2, 60)))


LARGE = 32
"""Heads of the Gemma 4's full layers, which count as larger than any kernel's."""
GEMMA = {"family": "gemma4", "target": {"vocab": 64, "num_layers": 4, "tie": True}}


@pytest.fixture(scope="module", params=["recurrent", exhaustive("large heads")])
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return make_pair(**{"family": "qwen3_5"} | PAIR | (GEMMA if "heads" in request.param else {}))


@pytest.fixture(autouse=True)
def largest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FUSED_HEAD_DIMS", range(16, LARGE, 8))


def open_native(built: TinyPair, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Machine:
    """A machine that runs what engines do in float32; the CPU's no longer opens."""
    monkeypatch.setattr(GraphForm, "is_native", property(lambda form: True))
    bundle = write_bundle(built.pair, folder / "native", BuildOptions(), **LIMITS)
    pair = TinyPair(built.folder, built.pair, bundle)
    return make_machine(pair, folder, "tensorrt-rtx", bundle.folder, prefill_chunk=40)


@pytest.mark.parametrize("speculation", [True, exhaustive(False)])
def test_generations_are_the_cpus(
    built: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speculation: bool
) -> None:
    """Sequences of unequal lengths, chunks, rejected drafts, moved slots, idle sequences."""
    requests = [
        Request(prompt_ids=prompt, max_tokens=67 - 9 * index, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    options = GeneratorOptions(speculation=speculation)
    alone = run_alone(built, requests, options=options)
    executor = open_native(built, monkeypatch, tmp_path).open()
    results = Generator(executor, options=options).generate(requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    drafted = [[one.statistics.accepted_tokens for one in given] for given in (results, alone)]
    assert drafted[0] == drafted[1] and (sum(drafted[0]) > 20) is speculation
    assert executor.runner.captured > 0


@pytest.mark.exhaustive
def test_engines_of_float16_give_the_cpus_logits(
    built: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The graphs as they are built, of one text: chunks, rejected rows, a slot that moves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = BuildOptions(engines=EngineOptions(find_arch("sm_120"), Precision.FLOAT16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        bundle = write_bundle(built.pair, tmp_path / "bundle", options, **LIMITS)
    stand_in(monkeypatch, bundle.folder, FakeCuda())
    check_logits(open_executor(bundle), built.open())


def check_logits(executor: Executor, cpu: Executor) -> None:
    """Holds the logits of one text to the CPU's: chunks, rejected rows, a slot that moves."""
    ids, at, slot = np.random.default_rng(1).integers(2, 62, (1, 190)), 0, 1
    hold_positions(executor, 190, slots=2)
    for count, kept in ((40, 40), (17, 17), (16, 1), (16, 16), (9, 2), (1, 1), (16, 5), (1, 1)):
        rows = np.arange(max(0, count - 16), count)[None]
        call = TargetCall("target", slot, ids[:, at : at + count], np.array([at]), rows)
        call = replace(call, scores=Scores.LOGITS)
        sampling = pack_sampling([SamplingParams()]) if executor.limits.draws else None
        got = executor.forward(replace(call, sampling=sampling))
        want = cpu.forward(call)
        assert got.logits is not None and want.logits is not None
        assert np.abs(got.logits - want.logits).max() <= 0.03 * np.abs(want.logits).max()
        at += kept
        for one in (executor, cpu):
            one.move_slot(slot, 1 - slot, at)
        slot = 1 - slot
    with pytest.raises(ValueError, match="can go on at") if cpu.limits.has_state else nullcontext():
        executor.forward(one_chunk(ids[:, :4], slot=slot, start=5, sampling=sampling))
