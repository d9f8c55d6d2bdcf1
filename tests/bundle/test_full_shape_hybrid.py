"""Qwen3.5-27B in its true shapes: what a build costs, and which tensors it refers to."""

from __future__ import annotations

from pathlib import Path

import onnx
from dflash_perf.bench.process import build_synthetic

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.form import GraphForm
from dflash_trt.memory.caches import planned_state_bytes, state_bytes
from dflash_trt.synthetic.qwen3_5 import write_qwen3_5_27b

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6


def test_a_build_of_the_true_shapes(tmp_path: Path) -> None:
    assert 55e9 < write_qwen3_5_27b(tmp_path) < 59e9
    bundle = tmp_path / "bundle"
    cost = build_synthetic(tmp_path, bundle, "--max-seq-len", "8192")
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    target = open_bundle(bundle).manifest.target
    assert 26e9 < target.parameters < 28e9
    assert target.recurrent is not None and len(target.recurrent.layers) == 48
    assert target.sizes.has_state and list(target.eos_token_ids) == [248_044]
    states = 48 * 48 * 128 * 128 * 4  # 151 MB a sequence, and 38 MB of rows at a block of 16
    rows = 48 * (16 + 3) * (10_240 + 2 * 48) * 4
    assert planned_state_bytes(target.sizes) == states
    assert state_bytes(target.sizes, GraphForm(replay=16)) == states + rows
    used = set[str]()
    for graph in ("target", "target_only", "draft"):
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        used |= {one.name for one in model.graph.initializer if one.external_data}
    layers = [name.split("/")[1] for name in used if name.startswith("target/layers.")]
    assert len(layers) == 48 * (9 + 5) + 16 * (6 + 5)
