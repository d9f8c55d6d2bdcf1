"""Engines whose caches only kernels read, on a stand-in: paged, FP8 and both.

The stand-in runs the bundle's own graphs, whose bodies are the kernels' definition, over FP8 codes
where caches hold them. float16, since ONNX Runtime has no bfloat16 on the CPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import hold_positions
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions as Engines
from dflash_trt.backends.tensorrt.library import TENSORRT, find_arch
from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from dflash_trt.building.bundle_writer import BuildOptions
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding import Generator, GeneratorOptions, Request
from dflash_trt.graph.form import CacheDtype, Precision
from tests.backends.steps import random_ids, run_chunks
from tests.covering import exhaustive
from tests.lossless.runs import count_tokens, run_traffic
from tests.pairs import TWO_KINDS, PairFactory, TinyPair, write_bundle
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.plugin_tensorrt import stand_in_builder

LENGTH, SIZE, SLOTS, VOCAB = 96, 8, 3, 64
PAGES = LENGTH // SIZE + 3
PAIRS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "target": {"vocab": VOCAB, "num_layers": 3, "head_dim": 64},
        "draft": {"head_dim": 64, "target_layer_ids": [0, 2], **TWO_KINDS},
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {"vocab": VOCAB, "num_layers": 2, "head_dim": 64, "rope": "yarn"},
        "draft": {"head_dim": 64, "num_layers": 1, "target_layer_ids": [0, 1]},
    },
}
FORMS: dict[str, dict[str, Any]] = {
    "paged": {"page_size": SIZE, "pages": PAGES},
    "fp8": {"cache_dtype": CacheDtype.FP8},
    "paged fp8": {"page_size": SIZE, "pages": PAGES, "cache_dtype": CacheDtype.FP8},
}


@pytest.fixture(scope="module", params=["qwen3", exhaustive("gpt_oss")])
def built(request: pytest.FixtureRequest, make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIRS[request.param], fit_steps=60, max_seq_len=LENGTH, max_batch=SLOTS)


def build(built: TinyPair, folder: Path, engines: Engines | None, form: dict[str, Any]) -> Bundle:
    options = BuildOptions(engines=engines, **form)
    limits = {"max_seq_len": LENGTH, "max_batch": SLOTS, "prefill_chunk": 16}
    return write_bundle(built.pair, folder, options, **limits)


def open_engines(
    built: TinyPair, folder: Path, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[TensorRtExecutor, FakeCuda]:
    """An executor over engines with plugins, on a device of its own."""
    trt, cuda = stand_in_builder(monkeypatch, folder), FakeCuda()
    options = Engines(find_arch("sm_120", TENSORRT), Precision.FLOAT16, TENSORRT, plugins=True)
    bundle = build(built, folder / "bundle", options, form)
    stand_in(monkeypatch, bundle.folder, cuda).version = trt.__version__
    executor = open_executor(bundle)
    assert isinstance(executor, TensorRtExecutor)
    return executor, cuda


def make_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(2, 60) for _ in range(20))
    return [
        Request(
            prompt_ids=(*shared[: rng.choice([0, 10, 20])], 3 + index, 5),
            max_tokens=rng.choice([9, 50, 70]),
            ignore_eos=True,
        )
        for index in range(7)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMS)
def test_any_traffic_keeps_every_token(
    built: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Preempted, shared, cancelled: what each request says alone, and nobody takes its pages.

    Alone in a generator of the same type, linear where there is one: float16 parts from the CPU at
    near ties, and at midpoints of FP8 codes; logits are held to the CPU's below.
    """
    form, requests = FORMS[name], make_requests(5)
    (tmp_path / "alone").mkdir()
    plain = FORMS["fp8"] if "cache_dtype" in form else {"page_size": 32}
    other, _ = open_engines(built, tmp_path / "alone", plain, monkeypatch)
    expected = [Generator(other).generate([request])[0] for request in requests]
    other.close()
    executor, cuda = open_engines(built, tmp_path, form, monkeypatch)
    alone = [Generator(executor).generate([request])[0] for request in requests[:3]]
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=13))
    results = run_traffic(generator, requests, expected, random.Random(2), cancels=0.04)
    assert count_tokens(results) > 150
    if "pages" in form:
        for statistic in ("preemptions", "cached_prompt_tokens"):
            assert any(getattr(result.statistics, statistic) for result in results), statistic
    for got, want in zip(alone, expected, strict=False):
        assert got.token_ids == want.token_ids
        assert got.statistics.acceptance_histogram == want.statistics.acceptance_histogram
    assert executor.runner.captured and executor.runner.capture_error is None
    executor.close()
    assert cuda.is_clean


@pytest.mark.parametrize("name", ["paged fp8", *map(exhaustive, ("paged", "fp8"))])
def test_logits_are_near_the_cpus_and_memory_is_that_of_pages_and_codes(
    built: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    form, ids = FORMS[name], random_ids(VOCAB, 40).tolist()
    dtype = {key: value for key, value in form.items() if key == "cache_dtype"}
    cpu = open_executor(build(built, tmp_path / "cpu", None, dtype), threads=1)
    executor, _ = open_engines(built, tmp_path, form, monkeypatch)
    hold_positions(executor, LENGTH, slots=2)
    want, got = (run_chunks(one, ids, (8, 3), slot=1) for one in (cpu, executor))
    assert np.abs(got - want).max() < (0.08 if dtype else 0.01) * np.abs(want).max()
    layers = [*built.pair.target.sizes.layers, *built.pair.draft.sizes.layers]
    pool, windows = executor.limits.page_pool, {layer.window for layer in layers}
    positions = dict.fromkeys(windows, SLOTS * LENGTH)
    if pool is not None:
        assert len(windows) > 1 and pool.kinds.keys() == windows
        positions = {window: (pages + 1) * SIZE for window, pages in pool.kinds.items()}
    elements = sum(2 * positions[layer.window] * layer.kv_heads * 64 for layer in layers)
    assert executor.caches.nbytes == elements * (1 if dtype else 2)
