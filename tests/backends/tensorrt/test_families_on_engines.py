"""Families and chains through the TensorRT executor on a stand-in: the CPU's tokens.

Recurrent layers and heads larger than any of TensorRT's kernels, decomposed or by ours; gpt-oss's
sinks, and those that the steps of an EAGLE-3 chain are to each other. The stand-in runs the graphs
of engines, where a kernel stands its definition: in float32 to the token, in float16 near the CPU.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.base import Executor, Scores, TargetCall, hold_positions
from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import TENSORRT, TENSORRT_RTX, Library, find_arch
from dflash_trt.building.spec import BuildSpec, CacheOptions
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams
from dflash_trt.graph.caches import native
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.sampling.params import pack_sampling
from tests.backends.steps import one_chunk
from tests.backends.tensorrt.drawing import write_graphs
from tests.backends.tensorrt.machine import Machine, engine_form, make_machine, run_alone
from tests.covering import exhaustive
from tests.lossless.runs import count_tokens, make_requests, run_traffic, write_fitted_eagle
from tests.lossless.test_hybrids import PAIR, draw_prompt
from tests.pairs import FIT_PROMPTS, PairFactory, TinyPair, bundle_pair, caches, write_bundle
from tests.reference.dflash2 import write_dflash2
from tests.standins.cuda import FakeCuda
from tests.standins.plugin_tensorrt import stand_in_builder
from tests.standins.stub_builder import StubBuilder
from tests.standins.tensorrt import stand_in

VOCAB, SIZE, LARGE = 64, 8, 128
"""LARGE: heads of the Gemma 4's full layers, which count as larger than any of the kernels'."""
TARGETS: dict[str, dict[str, Any]] = {
    "recurrent": {"family": "qwen3_5"},
    "wide recurrent": {
        "family": "qwen3_5",
        "target": {"vocab": VOCAB, "num_layers": 4, "head_dim": 64},
        "draft": PAIR["draft"] | {"head_dim": 64},
    },
    "large heads": {
        "family": "gemma4",
        "target": {"vocab": VOCAB, "num_layers": 4, "tie": True, "head_dim": LARGE // 2},
        "prefill_chunk": 40,
    },
    "windows": {
        "family": "qwen3",
        "target": {"vocab": VOCAB, "num_layers": 3, "head_dim": 64},
        "draft": PAIR["draft"] | {"head_dim": 64, "target_layer_ids": [0, 2]},
        "kv_dtype": "fp8",
    },
    # All experts of every row: a router near a tie would choose others for float16's roundings.
    "sinks": {
        "family": "gpt_oss",
        "target": {"vocab": VOCAB, "num_layers": 2, "head_dim": 64, "experts": 4, "chosen": 4},
        "draft": {"head_dim": 64, "block_size": 16, "target_layer_ids": [0, 1]},
        "kv_dtype": "fp8",
    },
    "mixture": {
        "family": "qwen3_moe",
        "target": {"vocab": VOCAB, "num_layers": 2, "experts": 4, "chosen": 4, "dtype": "float16"},
        "draft": {"block_size": 16, "target_layer_ids": [0, 1]},
    },
}
POOL = {"page_size": SIZE, "pages": 192 // SIZE * 2}
LIMITS = {"max_batch": 4, "max_seq_len": 192, "prefill_chunk": 40}
PROMPTS = (*map(tuple, FIT_PROMPTS), (31,) * 45, (40,), tuple(range(2, 60)))
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=4)


def ask(prompts: list[tuple[int, ...]]) -> list[Request]:
    """The third and the sixth are drawn."""
    return [
        Request(
            prompt_ids=prompt,
            max_tokens=max(20, 67 - 9 * index),
            ignore_eos=True,
            sampling=SAMPLED if index % 3 == 2 else SamplingParams(),
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(autouse=True)
def largest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FUSED_HEAD_DIMS", range(16, LARGE, 8))


def make_native(
    built: TinyPair, monkeypatch: pytest.MonkeyPatch, folder: Path, *, kernels: bool
) -> Machine:
    """A machine that runs what engines do in float32; the CPU's no longer opens."""
    monkeypatch.setattr(GraphForm, "is_native", property(lambda form: True))
    if not kernels:
        bundle = write_bundle(built.pair, folder / "native", BuildSpec(), **LIMITS)
        pair = TinyPair(built.folder, built.pair, bundle)
        return make_machine(pair, folder, "tensorrt-rtx", bundle.folder, prefill_chunk=40)
    monkeypatch.setattr(GraphForm, "has_kernel_caches", property(lambda form: form.is_paged))
    cpu = built.open()
    form = engine_form(192, cpu.limits, draws=True)
    cpu.close()
    graphs = write_graphs(built, folder / "graphs", form)
    return make_machine(built, folder, "tensorrt", graphs, draws=True, prefill_chunk=40)


def make_built(make_pair: PairFactory, name: str, folder: Path, **paging: Any) -> TinyPair:
    """A pair of TARGETS, or one whose fitted draft has DFlash 2's additions."""
    if name != "walk":
        return make_pair(**PAIR | TARGETS[name], **paging)
    fitted = make_pair("qwen3", {"vocab": VOCAB}, {}, fit_steps=60).folder
    write_dflash2(folder / "draft", fitted / "draft", gain=0.1)
    (folder / "target").symlink_to(fitted / "target")
    return bundle_pair(folder, BuildSpec(caches=caches(**paging)), max_seq_len=192, max_batch=8)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("recurrent", True),
        ("walk", False),
        exhaustive("walk", True),
        *(exhaustive(*one) for one in (("recurrent", False), ("large heads", True))),
        exhaustive("large heads", False),
    ],
)
@pytest.mark.parametrize("speculation", [True, exhaustive(False)])
def test_generations_are_the_cpus(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    kernels: bool,
    speculation: bool,
) -> None:
    """Linear caches: chunks, rejected drafts, moved slots, idle sequences."""
    built, requests = make_built(make_pair, name, tmp_path / "pair"), ask([*PROMPTS])
    options = GeneratorOptions(speculation=speculation)
    alone = run_alone(built, requests, options=options)
    executor = make_native(built, monkeypatch, tmp_path, kernels=kernels).open()
    results = Generator(executor, options=options).generate(requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    drafted = [[one.statistics.accepted_tokens for one in given] for given in (results, alone)]
    assert drafted[0] == drafted[1] and (sum(drafted[0]) > 20) is speculation
    assert executor.runner.captured > 0


@pytest.mark.parametrize(("name", "seed"), [("recurrent", 1), ("large heads", 0), ("walk", 0)])
@pytest.mark.exhaustive
def test_any_traffic_over_pages_keeps_every_token(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, seed: int
) -> None:
    """Preempted, cancelled, moved; prefixes that are shared bring their states along.

    The windows of the Gemma 4 and of its draft have pages of their own.
    """
    built = make_built(make_pair, name, tmp_path / "pair", paging=POOL)
    stem = draw_prompt(40)
    assert bool(built.bundle.manifest.graph_form.windows) is (name == "large heads")
    tails = [(*stem, *draw_prompt(9, seed=each)) for each in range(2)]
    requests = ask([*tails, *PROMPTS[:2], stem])
    alone = run_alone(built, requests)
    executor = make_native(built, monkeypatch, tmp_path, kernels=True).open()
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=40))
    results = run_traffic(generator, requests, alone, random.Random(seed), cancels=0.03)
    assert count_tokens(results) > 250
    for statistic in ("preemptions", "cached_prompt_tokens"):
        assert any(getattr(result.statistics, statistic) for result in results), statistic
    assert executor.runner.captured > 0


def build_engines(
    built: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    library: Library,
    limits: dict[str, int],
    own: CacheOptions,
) -> tuple[Bundle, FakeCuda]:
    """The bundle's own graphs in float16, through the builder's checks, on a stand-in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    arch, version = find_arch("sm_120", library), None
    engines = EngineOptions(arch, Precision.FLOAT16, library, plugins=not library.is_rtx)
    with pytest.MonkeyPatch.context() as patch:
        if library.is_rtx:
            patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        else:
            version = stand_in_builder(monkeypatch, folder).__version__
        spec = BuildSpec(caches=own)
        bundle = write_bundle(built.pair, folder / "bundle", spec, engines=engines, **limits)
    cuda = FakeCuda()
    trt = stand_in(monkeypatch, bundle.folder, cuda)
    trt.version = version or trt.version
    return bundle, cuda


@pytest.mark.parametrize(
    ("name", "library", "layout"),
    [
        ("windows", TENSORRT, POOL),
        ("mixture", TENSORRT_RTX, {}),
        exhaustive("windows", TENSORRT, {}),
        exhaustive("sinks", TENSORRT, POOL),
        exhaustive("recurrent", TENSORRT_RTX, {}),
        exhaustive("large heads", TENSORRT_RTX, {}),
        exhaustive("wide recurrent", TENSORRT, POOL),
        exhaustive("large heads", TENSORRT, {}),
        exhaustive("large heads", TENSORRT, POOL),
    ],
)
def test_engines_of_float16_give_the_cpus_logits(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    library: Library,
    layout: dict[str, Any],
) -> None:
    """Of one text: chunks, rejected rows, a slot that moves; FP8 codes where caches hold them."""
    built = make_pair(**PAIR | TARGETS[name])
    is_fp8 = built.bundle.manifest.kv_dtype == "fp8"
    own = caches(layout or None, "fp8" if is_fp8 else "auto")
    bundle, cuda = build_engines(built, monkeypatch, tmp_path, library, LIMITS, own)
    executor, cpu = open_executor(bundle), built.open()
    check_logits(executor, cpu, 0.08 if is_fp8 else 0.03)
    executor.close()
    assert cuda.is_clean


def check_logits(executor: Executor, cpu: Executor, bound: float) -> None:
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
        assert np.abs(got.logits - want.logits).max() <= bound * np.abs(want.logits).max()
        at += kept
        for one in (executor, cpu):
            one.move_slot(slot, 1 - slot, at)
        slot = 1 - slot
    with pytest.raises(ValueError, match="can go on at") if cpu.limits.has_state else nullcontext():
        executor.forward(one_chunk(ids[:, :4], slot=slot, start=5, sampling=sampling))


def gpt_oss(make_pair: PairFactory, folder: Path) -> TinyPair:
    target = {"vocab": VOCAB, "rope": "yarn", "mxfp4": True, "head_dim": 32, "num_layers": 4}
    return make_pair("gpt_oss", target, fit_steps=60)


def eagle(make_pair: PairFactory, folder: Path) -> TinyPair:
    base = make_pair("qwen3", {"vocab": VOCAB}, max_seq_len=192)
    folder.mkdir()
    return bundle_pair(write_fitted_eagle(folder, base, (1, 2, 4), 8), BuildSpec())


@pytest.mark.parametrize(
    ("make", "library"),
    [
        (eagle, TENSORRT_RTX),
        *(exhaustive(*one) for one in ((gpt_oss, TENSORRT_RTX), (eagle, TENSORRT))),
    ],
)
def test_caches_with_room_for_a_sink_give_the_cpus_tokens(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make: Any,
    library: Library,
) -> None:
    """float16, gathered experts; sequences end at different times, so that slots move."""
    built = make(make_pair, tmp_path / "pair")
    limits = {"max_batch": 4, "max_seq_len": 191, "prefill_chunk": 64}
    bundle, _ = build_engines(built, monkeypatch, tmp_path, library, limits, CacheOptions())
    assert bundle.manifest.engines is not None
    assert bundle.manifest.engines.cache_length == 192
    prompts = [(3, 1, 4, 1, 5), (2, 7, 1, 8, 2, 8), (31,) * 40, (40,), tuple(range(2, 60))]
    if make is eagle:  # the head was fitted on these
        prompts = [request.prompt_ids for request in make_requests(VOCAB, 8)]
    requests = [
        Request(prompt_ids=prompt, max_tokens=67 - 9 * index, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    results = Generator(open_executor(bundle)).generate(requests)
    alone = run_alone(built, requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    taken, wanted = (
        sum(one.statistics.accepted_tokens for one in given) for given in (results, alone)
    )
    assert abs(taken - wanted) <= 0.1 * wanted and taken > 20, "the same drafts, but for ties"
