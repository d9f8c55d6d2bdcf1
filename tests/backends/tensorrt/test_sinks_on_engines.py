"""Caches with room for a sink, through the TensorRT executor on a stand-in: gpt-oss's own sinks,
and those that the steps of an EAGLE-3 chain are to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import LIBRARIES, TENSORRT, TENSORRT_RTX, find_arch
from dflash_trt.bundle.build import BuildOptions
from dflash_trt.graph.form import Precision
from dflash_trt.runtime import Generator, GeneratorOptions, Request
from tests.backends.tensorrt.machine import run_alone
from tests.lossless.fitted_eagle import write_fitted_eagle
from tests.lossless.runs import make_requests
from tests.pairs import PairFactory, TinyPair, bundle_pair, write_bundle
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.plugin_tensorrt import stand_in_builder
from tests.standins.stub_builder import StubBuilder

VOCAB = 64
PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [31] * 40, [40], list(range(2, 60)))
LIMITS = {"max_batch": 4, "max_seq_len": 191, "prefill_chunk": 64}
FITTED = 8
"""Prompts that the head was fitted on, and drafts well behind."""


def gpt_oss(make_pair: PairFactory, folder: Path) -> TinyPair:
    target = {"vocab": VOCAB, "rope": "yarn", "mxfp4": True, "head_dim": 32, "num_layers": 4}
    return make_pair("gpt_oss", target, fit_steps=60)


def eagle(make_pair: PairFactory, folder: Path) -> TinyPair:
    base = make_pair("qwen3", {"vocab": VOCAB}, max_seq_len=192)
    folder.mkdir()
    return bundle_pair(write_fitted_eagle(folder, base, (1, 2, 4), FITTED), BuildOptions())


Case = tuple[Callable[[PairFactory, Path], TinyPair], str, bool]
CASES: dict[str, Case] = {
    "gpt-oss": (gpt_oss, TENSORRT_RTX.executor, True),
    "gpt-oss, no speculation": (gpt_oss, TENSORRT_RTX.executor, False),
    "EAGLE-3": (eagle, TENSORRT_RTX.executor, True),
    "EAGLE-3, plugins": (eagle, TENSORRT.executor, True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_generations_are_the_cpus(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """float16, gathered experts; sequences end at different times, so that slots move."""
    make, executor, speculation = CASES[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built, library = make(make_pair, tmp_path / "pair"), LIBRARIES[executor]
    engines = EngineOptions(find_arch("sm_120", library), Precision.FLOAT16, library)
    version = None
    with pytest.MonkeyPatch.context() as patch:
        if library.is_rtx:
            patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        else:
            engines = replace(engines, plugins=True)
            version = stand_in_builder(monkeypatch, tmp_path).__version__
        options = BuildOptions(engines=engines)
        bundle = write_bundle(built.pair, tmp_path / "bundle", options, **LIMITS)
    assert bundle.manifest.engines is not None
    assert bundle.manifest.engines.cache_length == 192
    trt = stand_in(monkeypatch, bundle.folder, FakeCuda())
    trt.version = version or trt.version
    prompts = [tuple(prompt) for prompt in PROMPTS]
    if make is eagle:
        prompts = [request.prompt_ids for request in make_requests(VOCAB, FITTED)]
    requests = [
        Request(prompt_ids=prompt, max_tokens=67 - 9 * index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    settings = GeneratorOptions(speculation=speculation)
    results = Generator(open_executor(bundle), options=settings).generate(requests)
    alone = run_alone(built, requests, options=settings)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    if speculation:
        taken, wanted = (
            sum(one.statistics.accepted_tokens for one in given) for given in (results, alone)
        )
        assert abs(taken - wanted) <= 0.1 * wanted and taken > 20, "the same drafts, but for ties"
