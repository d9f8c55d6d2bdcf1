"""`--kv-layout paged`, `--kv-dtype fp8`: built, inspected, run and verified.

Pools that cannot be, and manifests that state them, are refused in tests/frozen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from dflash_trt.cli.main import main
from tests.cli.conftest import Build, Run

OPTIONS = ("--kv-layout", "paged", "--page-size", "8", "--kv-pages", "12")


@pytest.fixture(scope="module")
def paged(bigram_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pages of 8, for up to four sequences of 64."""
    folder = tmp_path_factory.mktemp("paged") / "bundle"
    assert main(["build", "--target", str(bigram_config), "-o", str(folder), *OPTIONS]) == 0
    return folder


def test_inspect_tells_the_layout(run: Run, paged: Path, bundle: Path) -> None:
    answer = run("inspect", paged, "--json").json
    bytes_of_a_page = 8 * sum(answer["cache_bytes_per_token"].values())
    text = run("inspect", paged).out
    assert f"12 pages of 8 tokens, {bytes_of_a_page:,} bytes each" in text
    assert f"at most 96 tokens in {12 * bytes_of_a_page:,} bytes" in text
    memory = run("inspect", paged, "--json").json["memory_bytes"]
    assert memory["target_cache"] + memory["draft_cache"] == 12 * bytes_of_a_page
    assert "bytes per token (target + draft), linear" in run("inspect", bundle).out
    run.well("inspect", paged, "--verify")


@pytest.fixture(scope="module", params=["linear", "paged"])
def fp8(
    request: pytest.FixtureRequest, bigram_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "bundle"
    layout = OPTIONS if request.param == "paged" else ()
    options = ["--kv-dtype", "fp8", *layout, "-o", str(folder)]
    assert main(["build", "--target", str(bigram_config), *options]) == 0
    return folder


def test_fp8_caches_are_told_and_verified(run: Run, fp8: Path, bundle: Path) -> None:
    kept = run("inspect", fp8, "--json").json["cache_bytes_per_token"]
    of_engines = f"{kept['target'] // 4:,} + {kept['draft'] // 4:,} bytes per token, scales of 1"
    text = run("inspect", fp8).out
    assert "FP8 (E4M3) values kept as float32; engines' codes take " + of_engines in text
    assert "FP8" not in run("inspect", bundle).out
    run.well("verify", fp8, "--prompt", "a b c d e f g h", "--max-tokens", 30, "--repeats", 0)


def add_scales(folder: Path, algorithm: str | None, **scales: float) -> None:
    """Scales of a KV cache for the first layer of the target in `folder`, and what they are of."""
    path = folder / "model.safetensors"
    attention = "model.layers.0.self_attn."
    added = {f"{attention}{kind}_proj.{kind}_scale": scales[kind] for kind in scales}
    values = {name: np.array(value, np.float32) for name, value in added.items()}
    save_file(load_file(path) | values, path)
    stated = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
    (folder / "hf_quant_config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize(
    ("algorithm", "cache", "target"),
    [
        ("FP8", "2 of 16 scales from the checkpoints, else 1", "no linear quantised"),
        ("NVFP4", "scales of 1", "no linear quantised; NVFP4 KV cache not used (2 scales)"),
    ],
)
def test_whose_scales_are_used_is_told(
    run: Run, build: Build, own_pair: Path, algorithm: str, cache: str, target: str
) -> None:
    add_scales(own_pair.parent / "target", algorithm, k=0.5, v=0.25)
    built = build.well(own_pair, "--kv-dtype", "fp8")
    *_, about_target, caches = built.out.splitlines()
    assert about_target == f"quantised target: {target}"
    assert caches.startswith("KV caches: linear; FP8") and caches.endswith(f", {cache}")
    shown = run("inspect", build.folder).out
    assert cache in shown and target in shown
    model = onnx.load(build.folder / "target.onnx", load_external_data=False)
    fixed = {
        one.name: onnx.numpy_helper.to_array(one).tolist()
        for one in model.graph.initializer
        if "kv_scales" in one.name
    }
    assert fixed["target_kv_scales_0"] == ([0.5, 0.25] if algorithm == "FP8" else [1, 1])
    assert fixed["target_kv_scales_1"] == [1, 1]
