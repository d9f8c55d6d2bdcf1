"""Gemma 4 31B in its true shapes: what a build costs, and what it says of both kinds of heads."""

from __future__ import annotations

from pathlib import Path

import onnx
from dflash_perf.bench.process import build_synthetic

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.memory.caches import cache_bytes_per_token, kv_bytes
from dflash_trt.planning.known_pairs import find_pair
from dflash_trt.synthetic.gemma4 import EOS_TOKEN_IDS, write_gemma4_31b

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6


def test_a_build_of_the_true_shapes(tmp_path: Path) -> None:
    assert 63e9 < write_gemma4_31b(tmp_path) < 66e9
    bundle = tmp_path / "bundle"
    cost = build_synthetic(tmp_path, bundle, "--max-seq-len", "8192")
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    target = open_bundle(bundle).manifest.target
    assert 30.5e9 < target.parameters < 31e9
    assert list(target.eos_token_ids) == EOS_TOKEN_IDS
    assert target.sizes == find_pair("gemma-4-31b").target.sizes
    # 819,200 bytes of the 50 layers that slide and 81,920 of the others, in bf16.
    assert cache_bytes_per_token(target.sizes, GraphForm(Precision.BFLOAT16)) == 819_200 + 81_920
    assert cache_bytes_per_token(target.sizes, CPU_FORM) == 2 * (819_200 + 81_920)
    assert kv_bytes(target.sizes, 8192) == 1024 * 819_200 + 8192 * 81_920
    used = set[str]()
    for graph in ("target", "target_only", "draft"):
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        used |= {one.name for one in model.graph.initializer if one.external_data}
    layers = [name for name in used if name.startswith("target/layers.")]
    assert len(layers) == 60 * 5 + 60 * 3 + 50 * 6 + 10 * 5  # norms and scalar, MLP, attention
