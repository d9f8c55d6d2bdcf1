"""FP8 KV caches on the CPU hold what E4M3 makes of K and V; test_lossless.py has their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.backends.registry import open_executor
from dflash_trt.building.spec import BuildSpec
from dflash_trt.decoding import Generator, Request
from tests.inspection import arrays
from tests.lossless.runs import make_requests, run
from tests.pairs import TWO_KINDS, PairFactory, bundle_pair, caches
from tests.reference.eagle import write_eagle

PAIR: dict[str, Any] = {
    "target": {"vocab": 64, "num_layers": 4},
    "draft": {**TWO_KINDS, "target_layer_ids": [0, 1, 3]},
    "max_seq_len": 192,
}
SCALED = PAIR | {"quantize": {"target": {"algorithm": "FP8", "kv_cache": True}}}
"""Scales of 0.01 in the target's checkpoint, which clip its largest keys; the draft's are 1."""


def test_rounding_is_there(make_pair: PairFactory) -> None:
    """Promises of bits could hold of a build that did nothing."""
    prompt = Request(prompt_ids=tuple(range(2, 60)), max_tokens=1, ignore_eos=True)
    (plain,) = run(make_pair(**SCALED).open(), [prompt])
    (rounded,) = run(make_pair(**SCALED, kv_dtype="fp8").open(), [prompt])
    assert plain.logits is not None and rounded.logits is not None
    change = np.abs(rounded.logits - plain.logits).max() / np.abs(plain.logits).max()
    assert 1e-4 < change < 0.5


@pytest.mark.parametrize("has_scales", [True, False])
def test_caches_hold_what_codes_stand_for(make_pair: PairFactory, has_scales: bool) -> None:
    """float32 numbers on the grid of E4M3 times the scale, K, V and the draft's context alike."""
    opened = make_pair(**SCALED if has_scales else PAIR, kv_dtype="fp8").open()
    run(opened, make_requests(64, 3)[:2])
    for name, cache in arrays(opened).items():
        scale = np.float32(0.01 if has_scales and name.startswith("target") else 1)
        codes = (cache / scale).astype("float8_e4m3fn").astype(np.float32)
        assert np.abs(codes).max() <= 448
        np.testing.assert_array_equal(cache, codes * scale, name)


def test_an_eagle_heads_features_are_not_rounded(make_pair: PairFactory, tmp_path: Any) -> None:
    base = make_pair("qwen3", {"vocab": 64})
    (tmp_path / "target").symlink_to(base.folder / "target")
    write_eagle(tmp_path / "draft", base.folder / "target", taps=(1, 2, 4), draft_vocab=None)
    built = bundle_pair(tmp_path, BuildSpec(caches=caches(kv_dtype="fp8")), max_seq_len=192)
    executor = open_executor(built.bundle, threads=1)
    assert isinstance(executor, OnnxRuntimeExecutor)
    generator = Generator(executor)
    generator.submit(make_requests(64, 3)[2])
    for _ in range(4):  # slots that are free again hold nothing
        generator.step()
    off_grid = {
        name: (cache != cache.astype("float8_e4m3fn").astype(np.float32)).any()
        for name, cache in arrays(executor).items()
        if name.startswith("draft_")
    }
    assert off_grid == {
        name: name in ("draft_k_1", "draft_v_1")
        for name in (f"draft_{c}_{i}" for i in (0, 1) for c in "kv")
    }
