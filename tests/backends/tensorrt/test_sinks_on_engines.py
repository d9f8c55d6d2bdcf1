"""gpt-oss through the TensorRT executor on a stand-in: caches with room for a sink."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.graph.form import Precision
from dflash_trt.runtime import Generator, GeneratorOptions, Request
from tests.backends.tensorrt.build.conftest import build
from tests.backends.tensorrt.machine import run_alone
from tests.pairs import PairFactory
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.stub_builder import StubBuilder

PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [31] * 40, [40], list(range(2, 60)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("speculation", [True, False])
def test_generations_are_the_cpus(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    speculation: bool,
) -> None:
    """float16, gathered experts; sequences end at different times, so that slots move."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = {"vocab": 64, "rope": "yarn", "mxfp4": True, "head_dim": 32, "num_layers": 4}
    built = make_pair("gpt_oss", target, fit_steps=150)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        bundle = build(tmp_path, built.pair, Precision.FLOAT16, max_batch=4, max_seq_len=127)
    assert bundle.manifest.engines is not None
    assert bundle.manifest.engines.cache_length == 128
    stand_in(monkeypatch, bundle.folder, FakeCuda())
    requests = [
        Request(prompt_ids=tuple(prompt), max_tokens=67 - 9 * index, ignore_eos=True)
        for index, prompt in enumerate(PROMPTS)
    ]
    options = GeneratorOptions(speculation=speculation)
    results = Generator(open_executor(bundle), options=options).generate(requests)
    alone = run_alone(built, requests, options=options)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
