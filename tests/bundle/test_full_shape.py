"""Public targets in their true shapes, from sparse shards: what a build costs and refers to."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dflash_trt.building.synthetic import gpt_oss
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.memory.cache_bytes import (
    cache_bytes_per_token,
    kv_bytes,
    planned_state_bytes,
    state_bytes,
)
from dflash_trt.cli.main import main
from dflash_trt.deploy.planning.known_pairs import find_pair
from dflash_trt.graph.form import CPU_FORM, GraphForm, Precision
from dflash_trt.models.safetensors_header import read_header
from tests.bundle import gemma4_checkpoints as gemma4
from tests.bundle.measured_build import build_synthetic
from tests.bundle.qwen3_5_checkpoints import write_qwen3_5
from tests.covering import exhaustive

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6
LENGTH = ("--max-seq-len", "131072")
NORMS_AND_SCALAR, MLP, EXPERTS, SLIDES, FULL = 5, 3, 8, 6, 5
"""Weights of one of Gemma 4's layers: what each has, and what its attention has."""


def build_within_bounds(folder: Path, length: str = "8192") -> Bundle:
    """A bundle of the synthetic pair in `folder`, whose build reads no weights."""
    cost = build_synthetic(folder, folder / "bundle", "--max-seq-len", length)
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in (folder / "bundle").rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    return open_bundle(folder / "bundle")


def initializers(bundle: Bundle) -> dict[str, dict[str, str]]:
    """Where each tensor lies that any graph takes from a file, by name."""
    found: dict[str, dict[str, str]] = {}
    for graph in ("target", "draft", "target_only"):
        model = onnx.load(bundle.folder / f"{graph}.onnx", load_external_data=False)
        for one in model.graph.initializer:
            if one.external_data:
                found[one.name] = {item.key: item.value for item in one.external_data}
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """gpt-oss-120b."""
    folder = tmp_path_factory.mktemp("full")
    assert gpt_oss.write_gpt_oss(folder, find_pair("gpt-oss-120b"), random=False) > 65e9
    return build_within_bounds(folder, LENGTH[1])


def test_gpt_oss_120b(built: Bundle) -> None:
    own = [path.stat() for path in built.folder.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own) > 65e9
    assert built.manifest.target.parameters == 116_829_156_672
    assert list(built.manifest.target.eos_token_ids) == gpt_oss.EOS_TOKEN_IDS


def test_engines_of_it_are_for_several_gpus(
    built: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    pair = built.folder.with_name("pair.yaml")
    command = ["build", "--target", str(pair), *LENGTH, "--max-batch", "1"]
    output = built.folder.with_name("engines")
    assert main([*command, "--executor", "tensorrt-rtx", "-o", str(output)]) == 2
    assert "or several GPUs with --executor trtllm" in capfd.readouterr().err
    assert not output.exists()


def test_graphs_refer_to_every_tensor_where_its_header_says(built: Bundle) -> None:
    known = {
        (path.relative_to(built.folder).as_posix(), entry.offset, entry.length)
        for path in (built.folder / "weights").rglob("*.safetensors")
        for entry in read_header(path).values()
    }
    places = initializers(built).values()
    used = {(one["location"], int(one["offset"]), int(one["length"])) for one in places}
    assert used == known


@pytest.mark.parametrize(
    ("name", "parameters", "slides", "full", "weights"),
    [
        # Bytes of a token in bf16: of all layers that slide, and of the others.
        ("gemma-4-31b", 30.7e9, 819_200, 81_920, NORMS_AND_SCALAR + MLP),
        ("gemma-4-26b-a4b", 25.2e9, 204_800, 20_480, NORMS_AND_SCALAR + MLP + EXPERTS),
    ],
)
def test_gemma_4(
    tmp_path: Path, name: str, parameters: float, slides: int, full: int, weights: int
) -> None:
    assert 2 * parameters < gemma4.write_gemma4(tmp_path, name) < 2.15 * parameters
    bundle = build_within_bounds(tmp_path)
    target = bundle.manifest.target
    assert target.parameters == pytest.approx(parameters, rel=0.01)
    assert list(target.eos_token_ids) == gemma4.EOS_TOKEN_IDS
    known = find_pair(name).target.sizes
    assert (target.sizes.layers, target.sizes.experts) == (known.layers, known.experts)
    narrow = GraphForm(Precision.BFLOAT16)
    assert cache_bytes_per_token(target.sizes, narrow) == slides + full
    assert cache_bytes_per_token(target.sizes, CPU_FORM) == 2 * (slides + full)
    assert kv_bytes(target.sizes, 8192) == 1024 * slides + 8192 * full
    layers = [one for one in initializers(bundle) if one.startswith("target/layers.")]
    assert len(layers) == target.layers * weights + target.layers // 6 * (5 * SLIDES + FULL)


@pytest.mark.parametrize(
    ("name", "billions", "linear", "full", "value_heads", "mlp"),
    [
        ("qwen3.5-27b", 27, 48, 16, 48, 3),
        # A router, two tensors of experts, the shared one's three and its gate.
        ("qwen3.6-35b-a3b", 35, 30, 10, 32, 7),
        exhaustive("qwen3.5-35b-a3b", 35, 30, 10, 32, 7),
    ],
)
def test_hybrids(
    tmp_path: Path,
    name: str,
    billions: float,
    linear: int,
    full: int,
    value_heads: int,
    mlp: int,
) -> None:
    written = write_qwen3_5(tmp_path, name)
    bundle = build_within_bounds(tmp_path)
    target = bundle.manifest.target
    assert target.parameters == pytest.approx(billions * 1e9, rel=0.03)
    used_bytes = 2 * (target.parameters + bundle.manifest.draft.parameters)
    assert used_bytes < written < 1.003 * used_bytes  # vision and MTP are there, and not read
    assert target.recurrent is not None and len(target.recurrent.layers) == linear
    assert target.sizes.has_state and list(target.eos_token_ids) == [248_044]
    states = linear * value_heads * 128 * 128 * 4  # 151 and 63 MB a sequence
    channels = (2 * 16 + value_heads) * 128
    rows = linear * (16 + 3) * (channels + 2 * value_heads) * 4  # 38 and 19 MB
    assert planned_state_bytes(target.sizes) == states
    assert state_bytes(target.sizes, GraphForm(replay=16)) == states + rows
    layers = [one for one in initializers(bundle) if one.startswith("target/layers.")]
    assert len(layers) == linear * (9 + 2 + mlp) + full * (6 + 2 + mlp)
