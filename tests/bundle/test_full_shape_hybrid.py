"""Hybrids in their true shapes: what a build costs, and which tensors it refers to."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.graph.form import GraphForm
from dflash_trt.memory.caches import planned_state_bytes, state_bytes
from dflash_trt.synthetic.qwen3_5 import write_qwen3_5
from tests.bundle.measured_build import build_synthetic
from tests.covering import exhaustive

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6


@pytest.mark.parametrize(
    ("name", "billions", "linear", "full", "value_heads", "mlp"),
    [
        ("qwen3.5-27b", 27, 48, 16, 48, 3),
        # A router, two tensors of experts, the shared one's three and its gate.
        ("qwen3.6-35b-a3b", 35, 30, 10, 32, 7),
        exhaustive("qwen3.5-35b-a3b", 35, 30, 10, 32, 7),
    ],
)
def test_a_build_of_the_true_shapes(
    tmp_path: Path,
    name: str,
    billions: float,
    linear: int,
    full: int,
    value_heads: int,
    mlp: int,
) -> None:
    written = write_qwen3_5(tmp_path, name)
    bundle = tmp_path / "bundle"
    cost = build_synthetic(tmp_path, bundle, "--max-seq-len", "8192")
    print(f"{name}: {written:,} bytes of weights, {cost}")
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    manifest = open_bundle(bundle).manifest
    target = manifest.target
    assert target.parameters == pytest.approx(billions * 1e9, rel=0.03)
    used_bytes = 2 * (target.parameters + manifest.draft.parameters)
    assert used_bytes < written < 1.003 * used_bytes  # vision and MTP are there, and not read
    assert target.recurrent is not None and len(target.recurrent.layers) == linear
    assert target.sizes.has_state and list(target.eos_token_ids) == [248_044]
    states = linear * value_heads * 128 * 128 * 4  # 151 and 63 MB a sequence
    channels = (2 * 16 + value_heads) * 128
    rows = linear * (16 + 3) * (channels + 2 * value_heads) * 4  # 38 and 19 MB
    assert planned_state_bytes(target.sizes) == states
    assert state_bytes(target.sizes, GraphForm(replay=16)) == states + rows
    used = set[str]()
    for graph in ("target", "target_only", "draft"):
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        used |= {one.name for one in model.graph.initializer if one.external_data}
    layers = [name.split("/")[1] for name in used if name.startswith("target/layers.")]
    assert len(layers) == linear * (9 + 2 + mlp) + full * (6 + 2 + mlp)
