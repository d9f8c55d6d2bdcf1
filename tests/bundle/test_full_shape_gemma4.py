"""Gemma 4 in true shapes: what a build costs, and what it says of both kinds of heads."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.memory.caches import cache_bytes_per_token, kv_bytes
from dflash_trt.planning.known_pairs import find_pair
from dflash_trt.synthetic.gemma4 import EOS_TOKEN_IDS, write_gemma4
from tests.bundle.measured_build import build_synthetic

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6
NORMS_AND_SCALAR, MLP, EXPERTS, SLIDES, FULL = 5, 3, 8, 6, 5
"""Weights of a layer: what each has, and what its attention has."""


@pytest.mark.parametrize(
    ("name", "parameters", "slides", "full", "weights"),
    [
        # Bytes of a token in bf16: of all layers that slide, and of the others.
        ("gemma-4-31b", 30.7e9, 819_200, 81_920, NORMS_AND_SCALAR + MLP),
        ("gemma-4-26b-a4b", 25.2e9, 204_800, 20_480, NORMS_AND_SCALAR + MLP + EXPERTS),
    ],
)
def test_a_build_of_the_true_shapes(
    tmp_path: Path, name: str, parameters: float, slides: int, full: int, weights: int
) -> None:
    assert 2 * parameters < write_gemma4(tmp_path, name) < 2.15 * parameters
    bundle = tmp_path / "bundle"
    cost = build_synthetic(tmp_path, bundle, "--max-seq-len", "8192")
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    target = open_bundle(bundle).manifest.target
    assert target.parameters == pytest.approx(parameters, rel=0.01)
    assert list(target.eos_token_ids) == EOS_TOKEN_IDS
    known = find_pair(name).target.sizes
    assert (target.sizes.layers, target.sizes.experts) == (known.layers, known.experts)
    narrow = GraphForm(Precision.BFLOAT16)
    assert cache_bytes_per_token(target.sizes, narrow) == slides + full
    assert cache_bytes_per_token(target.sizes, CPU_FORM) == 2 * (slides + full)
    assert kv_bytes(target.sizes, 8192) == 1024 * slides + 8192 * full
    used = set[str]()
    for graph in ("target", "target_only", "draft"):
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        used |= {one.name for one in model.graph.initializer if one.external_data}
    layers = [one for one in used if one.startswith("target/layers.")]
    depth = target.layers
    assert len(layers) == depth * weights + depth // 6 * (5 * SLIDES + FULL)
