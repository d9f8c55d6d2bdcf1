"""Rung 2 for EAGLE-3: chains change no bit of any logit, and pages that are shared hold a head's
context too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy's float8_e4m3fn
import numpy as np
import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.build import BuildOptions
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.form import CacheDtype
from dflash_trt.replay import Answer, Replay
from dflash_trt.runtime import Generator, GeneratorOptions, SamplingParams
from tests.inspection import arrays, poison_all_free_pages
from tests.lossless.fitted_eagle import write_fitted_eagle
from tests.lossless.runs import (
    check_copied_prefix,
    check_groups,
    check_shared_prefix,
    finish,
    make_requests,
    run,
    run_baseline,
)
from tests.pairs import PairFactory, bundle_pair

VOCAB, SLOTS, TAPS, SIZE = 64, 8, (1, 2, 4), 8
SAMPLED = SamplingParams(temperature=0.8, seed=5)
PAGING = {"page_size": SIZE, "pages": 61}
FORMS: dict[str, dict[str, Any]] = {"linear": {}, "paged": PAGING}
FP8_FORMS: dict[str, dict[str, Any]] = {
    f"fp8-{name}": {**form, "cache_dtype": CacheDtype.FP8} for name, form in FORMS.items()
}
ALL_FORMS = FORMS | FP8_FORMS
SEVERAL = [
    *FORMS,
    "fp8-paged",
    pytest.param("fp8-linear", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def checkpoints(make_pair: PairFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose head was fitted to the target's own answers, by least squares."""
    base = make_pair("qwen3", {"vocab": VOCAB}, max_seq_len=192)
    folder = tmp_path_factory.mktemp("eagle")
    return write_fitted_eagle(folder, base, TAPS, SLOTS)


def build(folder: Path, form: str) -> Executor:
    place = folder / form
    if not place.exists():
        place.mkdir()
        for owner in ("target", "draft"):
            (place / owner).symlink_to(folder / owner)
    options = BuildOptions(overwrite=True, **ALL_FORMS[form])
    pair = bundle_pair(place, options, max_batch=SLOTS, max_seq_len=192)
    return open_executor(pair.bundle, threads=1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "drawn"])
def test_a_chain_keeps_every_bit(form: str, sampling: SamplingParams, checkpoints: Path) -> None:
    executor = build(checkpoints, form)
    asked = make_requests(VOCAB, SLOTS, sampling)
    expected = run_baseline(executor, asked)
    for batch, live in ((1, False), (SLOTS, False), (SLOTS, True)):
        check_groups(executor, asked, expected, batch, live=live)
    if not sampling.temperature:
        statistics = [one.statistics for one in run(executor, asked)]
        accepted = sum(one.accepted_tokens for one in statistics)
        assert 2 * accepted > sum(one.steps for one in statistics), "drafts are taken"


def test_a_shared_page_holds_the_heads_context(checkpoints: Path) -> None:
    """Prompts part right behind a page: its last row depends on no token behind it."""
    linear, paged = build(checkpoints, "linear"), build(checkpoints, "paged")

    def poison(generator: Generator) -> None:
        poison_all_free_pages(generator, paged)

    check_shared_prefix(linear, paged, (1, 3, 8, 9, 20), poison)
    check_copied_prefix(linear)


def test_fp8_caches_round_k_and_v_but_no_feature(checkpoints: Path) -> None:
    """And a shared page holds the same context: the same bits, the same acceptance."""
    linear, paged = build(checkpoints, "fp8-linear"), build(checkpoints, "fp8-paged")
    assert isinstance(linear, OnnxRuntimeExecutor)
    generator = Generator(linear, options=GeneratorOptions())
    generator.submit(make_requests(VOCAB, 3)[2])
    for _ in range(4):  # slots that are free again hold nothing
        generator.step()
    off_grid = {
        name: (cache != cache.astype("float8_e4m3fn").astype(np.float32)).any()
        for name, cache in arrays(linear).items()
        if name.startswith("draft_")
    }
    assert off_grid == {
        name: name in ("draft_k_1", "draft_v_1")
        for name in (f"draft_{c}_{i}" for i in (0, 1) for c in "kv")
    }
    finish(generator, lambda generator: None)
    check_shared_prefix(linear, paged, (1, 8))


def test_a_replay_counts_what_the_loop_counted(checkpoints: Path) -> None:
    for form in FORMS:
        executor = build(checkpoints, form)
        asked = make_requests(VOCAB, SLOTS)
        found = run(executor, asked)
        answers = [Answer(a.prompt_ids, b.token_ids) for a, b in zip(asked, found, strict=True)]
        with Replay(open_bundle(checkpoints / form / "bundle")) as replay:
            result = replay.measure(answers)
        counts = [one.statistics.acceptance_histogram for one in found]
        assert [one.acceptance_histogram for one in result.per_answer] == counts
        table = result.table
        pairs = zip(table.rank, table.accepted, strict=True)
        taken = [int(rank) for ranks, accepted in pairs for rank in ranks[:accepted]]
        assert taken and set(taken) == {0}
