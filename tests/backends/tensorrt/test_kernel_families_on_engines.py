"""Families that TensorRT has no kernel for, by ours, through its executor: the CPU's tokens.

The stand-in's engines are the graphs that `build --plugins` writes, in float32: where a kernel
stands, it runs the kernel's definition.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.registry import open_executor
from dflash_trt.backends.tensorrt.build.builder import EngineOptions
from dflash_trt.backends.tensorrt.library import TENSORRT, find_arch
from dflash_trt.bundle.build import BuildOptions
from dflash_trt.graph.caches import native
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.runtime import Generator, GeneratorOptions, Request, SamplingParams
from tests.backends.tensorrt.drawing import write_graphs
from tests.backends.tensorrt.machine import Machine, engine_form, make_machine, run_alone
from tests.backends.tensorrt.test_decomposed_on_engines import LIMITS, PROMPTS, check_logits
from tests.covering import exhaustive
from tests.lossless.runs import count_tokens, run_traffic
from tests.lossless.test_hybrids import PAIR, draw_prompt
from tests.pairs import PairFactory, TinyPair, write_bundle
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.plugin_tensorrt import stand_in_builder

LARGE = 128
"""Heads of the Gemma 4's full layers, which count as larger than any of TensorRT's kernels."""
TARGETS: dict[str, dict[str, Any]] = {
    "recurrent": {"family": "qwen3_5"},
    "wide recurrent": {
        "family": "qwen3_5",
        "target": {"vocab": 64, "num_layers": 4, "head_dim": 64},
        "draft": PAIR["draft"] | {"head_dim": 64},
    },
    "large heads": {
        "family": "gemma4",
        "target": {"vocab": 64, "num_layers": 4, "tie": True, "head_dim": LARGE // 2},
        "prefill_chunk": 40,
    },
}
SIZE = 8
POOL = {"page_size": SIZE, "pages": 192 // SIZE * 2}
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=4)


def make_requests(prompts: list[tuple[int, ...]]) -> list[Request]:
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


def make_native(built: TinyPair, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Machine:
    """A machine that runs what engines with kernels do in float32; the CPU's no longer opens."""
    monkeypatch.setattr(native, "FUSED_HEAD_DIMS", range(16, LARGE, 8))
    monkeypatch.setattr(GraphForm, "is_native", property(lambda form: True))
    monkeypatch.setattr(GraphForm, "has_kernel_caches", property(lambda form: form.is_paged))
    cpu = built.open()
    form = engine_form(192, cpu.limits, draws=True)
    cpu.close()
    graphs = write_graphs(built, folder / "graphs", form)
    return make_machine(built, folder, "tensorrt", graphs, draws=True, prefill_chunk=40)


@pytest.mark.parametrize("speculation", [True, exhaustive(False)])
@pytest.mark.parametrize("name", ["recurrent", exhaustive("large heads")])
def test_generations_are_the_cpus(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    speculation: bool,
) -> None:
    """Linear caches: chunks, rejected drafts, moved slots, idle sequences."""
    built, requests = make_pair(**PAIR | TARGETS[name]), make_requests([*PROMPTS])
    options = GeneratorOptions(speculation=speculation)
    alone = run_alone(built, requests, options=options)
    executor = make_native(built, monkeypatch, tmp_path).open()
    results = Generator(executor, options=options).generate(requests)
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    drafted = [[one.statistics.accepted_tokens for one in given] for given in (results, alone)]
    assert drafted[0] == drafted[1] and (sum(drafted[0]) > 20) is speculation
    assert executor.runner.captured > 0


@pytest.mark.parametrize(("name", "seed"), [("recurrent", 0), ("recurrent", 1), ("large heads", 0)])
@pytest.mark.exhaustive
def test_any_traffic_over_pages_keeps_every_token(
    make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, seed: int
) -> None:
    """Preempted, cancelled, moved; prefixes that are shared bring their states along.

    The windows of the Gemma 4 and of its draft have pages of their own.
    """
    built, stem = make_pair(**PAIR | TARGETS[name], paging=POOL), draw_prompt(40)
    assert bool(built.bundle.manifest.graph_form.windows) is (name == "large heads")
    tails = [(*stem, *draw_prompt(9, seed=each)) for each in range(2)]
    requests = make_requests([*tails, *PROMPTS[:2], stem])
    alone = run_alone(built, requests)
    executor = make_native(built, monkeypatch, tmp_path).open()
    generator = Generator(executor, options=GeneratorOptions(prefill_chunk=40))
    results = run_traffic(generator, requests, alone, random.Random(seed), cancels=0.03)
    assert count_tokens(results) > 250
    for statistic in ("preemptions", "cached_prompt_tokens"):
        assert any(getattr(result.statistics, statistic) for result in results), statistic
    assert executor.runner.captured > 0


@pytest.mark.parametrize("layout", [{}, POOL], ids=["linear", "paged"])
@pytest.mark.parametrize("name", ["wide recurrent", "large heads"])
@pytest.mark.exhaustive
def test_engines_of_float16_give_the_cpus_logits(
    make_pair: PairFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    layout: dict[str, int],
) -> None:
    """The bundles' own graphs, through the builder's checks."""
    monkeypatch.setattr(native, "FUSED_HEAD_DIMS", range(16, LARGE, 8))
    built, folder = make_pair(**PAIR | TARGETS[name]), tmp_path / "bundle"
    arch = find_arch("sm_120", TENSORRT)
    engines = EngineOptions(arch, Precision.FLOAT16, TENSORRT, plugins=True)
    with pytest.MonkeyPatch.context() as patch:
        version = stand_in_builder(patch, folder).__version__
        options = BuildOptions(engines=engines, **layout)  # type: ignore[arg-type]
        bundle = write_bundle(built.pair, folder, options, **LIMITS)
    cuda = FakeCuda()
    stand_in(monkeypatch, bundle.folder, cuda).version = version
    executor = open_executor(bundle)
    check_logits(executor, built.open())
    executor.close()
    assert cuda.is_clean
