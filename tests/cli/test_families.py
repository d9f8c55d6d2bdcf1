"""Hybrids and Gemma 4 on the command line: what is shown of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build import builder
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.main import main
from dflash_trt.graph.caches import native
from dflash_trt.models.quantized_weights import quantized_linears, read_scalar
from dflash_trt.models.target import read_target
from dflash_trt.quantization.linears import ALL_EXPERTS, LAYER_LINEARS
from tests.cli.bigram import write_tokenizer
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair

KERNELS = ("--executor", "tensorrt", "--precision", "bf16", "--plugins")


def build_with_kernels(
    pair: TinyPair, folder: Path, *options: str, largest: int = 256
) -> dict[str, dict[str, str]]:
    """A bundle of stub engines with kernels, in `folder`/bundle; by graph, how operations run.

    No kernel of TensorRT's has heads of more than `largest`, ours have any.
    """
    from tests.standins.plugin_tensorrt import stand_in_builder

    output = folder / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        stand_in_builder(patch, folder)
        patch.setattr(native, "FUSED_HEAD_DIMS", range(16, largest + 1, 8))
        for module in (native, builder):
            patch.setattr(module, "HEAD_DIMS", (16, 32))
        command = ["build", *_checkpoints(pair), *KERNELS, "--max-seq-len", "128", *options]
        assert main([*command, "-o", str(output)]) == 0
    engines = open_bundle(output).manifest.engines
    assert engines is not None
    return {str(one.graph): dict(one.operations) for one in engines.files}


def _checkpoints(pair: TinyPair) -> list[str]:
    folders = ("target", "draft")
    return [part for one in folders for part in (f"--{one}-checkpoint", str(pair.folder / one))]


@pytest.fixture(scope="module")
def pair(make_pair: PairFactory) -> TinyPair:
    target = {"vocab": 300, "num_layers": 4, "head_dim": 32, "vision": True}
    return make_pair("qwen3_5", target, {"target_layer_ids": [0, 3]}, max_seq_len=128)


def test_inspect_counts_the_states(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pair.bundle.folder)]) == 0
    shown = capsys.readouterr().out
    row = 2 * 2 * 16 + 4 * 16 + 2 * 4  # q, k, v and both gates
    held = 3 * 4 * (4 * 16 * 16 + (8 + 3) * row)
    assert f"3 of 4 layers are Gated DeltaNet, 2/4 heads × 16: {held:,} bytes of state" in shown
    assert ", states " in shown
    token = 2 * 2 * 32 * 4  # of the one layer that has K and V
    assert f"cache   {token:,} + " in shown


@pytest.mark.parametrize("layout", ["paged", exhaustive("linear")])
def test_engines_with_kernels_step_by_ours(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """What it writes in place is told apart; rows are there twice."""
    found = build_with_kernels(pair, tmp_path, "--kv-layout", layout)
    for graph in ("target", "target_only"):
        assert found[graph]["gated_delta_step"] == "plugin"
        assert "gated_delta_groups" not in found[graph]
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.manifest.engines is not None
    written = bundle.manifest.engines.files[0].plugin_caches
    states = {f"target_{kind}_{layer}" for kind in ("state", "rows") for layer in range(3)}
    assert states <= set(written)
    assert ("target_k_3" in written) == (layout == "paged")
    assert main(["inspect", str(bundle.folder)]) == 0
    shown = capsys.readouterr().out
    held = 3 * 4 * (4 * 16 * 16 + 2 * (8 + 8) * (2 * 2 * 16 + 4 * 16 + 2 * 4))
    assert f"{held:,} bytes of state and rows a sequence" in shown
    assert "; gated_delta_step, a kernel of ours, which has the rows twice" in shown


def test_quantize_leaves_the_gates_of_the_recurrence(pair: TinyPair) -> None:
    """They, and what lies beside the text model, are named as what stayed as it was."""
    output = pair.folder / "quantised"
    texts = pair.folder / "texts.jsonl"
    texts.write_text('{"prompt": "calibrate"}\n')
    write_tokenizer(pair.folder / "target")
    command = ["quantize", "--checkpoint", str(pair.folder / "target"), "--precision", "nvfp4"]
    assert main([*command, "--calibration", str(texts), "-o", str(output)]) == 0
    target = read_target(output)
    found = {role.rpartition(".")[2] for role in quantized_linears(target.weights)}
    assert found == set(LAYER_LINEARS)
    layer = "model.language_model.layers.0.linear_attn"
    assert target.quantization is not None
    excluded = set(target.quantization.excluded)
    assert {f"{layer}.in_proj_a", f"{layer}.in_proj_b", "model.visual*", "mtp*"} <= excluded
    scales = [target.weights[f"layers.0.in_proj_{one}.input_scale"] for one in ("qkv", "z")]
    assert len({read_scalar(one) for one in scales}) == 1


def test_experts_stay_as_they_are_where_that_is_said(
    make_pair: PairFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    target = {"vocab": 300, "num_layers": 4, "head_dim": 32, "experts": 4}
    pair = make_pair("qwen3_5_moe", target, {"target_layer_ids": [0, 3]}, max_seq_len=128)
    texts = pair.folder / "texts.jsonl"
    texts.write_text('{"prompt": "calibrate"}\n')
    command = ["quantize", "--checkpoint", str(pair.folder / "target"), "--precision", "nvfp4"]
    output = pair.folder / "refused"
    assert main([*command, "--calibration", str(texts), "-o", str(output)]) == 1
    refusal = capfd.readouterr().err
    assert "has experts in floating point, which are not quantized here" in refusal
    assert "exclude '*.experts.*' to quantize the linears beside them" in refusal
    assert not output.exists()
    write_tokenizer(pair.folder / "target")
    some = ["--calibration", str(texts), "-o", str(output), "--exclude"]
    assert main([*command, *some, "*.layers.0.mlp.experts.*"]) == 1
    assert main([*command, *some, ALL_EXPERTS]) == 0
    spec = read_target(output)
    found = {role.partition(".")[2].partition(".")[2] for role in quantized_linears(spec.weights)}
    assert {f"shared_expert.{one}_proj" for one in ("gate", "up", "down")} <= found
    assert not any("experts" in one for one in found)
    assert spec.quantization is not None
    layer = "model.layers.0.mlp"
    stay = {f"{layer}.gate", f"{layer}.shared_expert_gate", ALL_EXPERTS}
    assert stay <= {*spec.quantization.excluded}


@pytest.fixture(scope="module")
def gemma(make_pair: PairFactory) -> TinyPair:
    target = {"vocab": 300, "num_layers": 3, "tie": True}
    return make_pair("gemma4", target, {"target_layer_ids": [0, 2]}, max_seq_len=128)


@pytest.mark.parametrize("layout", ["linear", exhaustive("paged")])
def test_engines_with_kernels_attend_by_ours(
    gemma: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Where TensorRT has no kernel for heads of 32; over pages in every layer."""
    found = build_with_kernels(gemma, tmp_path, "--kv-layout", layout, largest=16)
    kernel = "block_attention" + "_paged" * (layout == "paged")
    for graph in ("target", "target_only"):
        assert found[graph][kernel] == "plugin"
        is_native = "native" in found[graph].values()
        assert is_native == (layout == "linear")
    assert main(["inspect", str(tmp_path / "bundle")]) == 0
    assert "one projection, their attention by a kernel of ours" in capsys.readouterr().out


def test_quantize_takes_every_linear(gemma: TinyPair, capfd: pytest.CaptureFixture[str]) -> None:
    """What K and V share is one; an FP8 cache of it has no scales."""
    output, texts = gemma.folder / "quantised", gemma.folder / "texts.jsonl"
    texts.write_text('{"prompt": "calibrate"}\n')
    write_tokenizer(gemma.folder / "target")
    command = ["quantize", "--checkpoint", str(gemma.folder / "target"), "--precision", "fp8"]
    command += ["--calibration", str(texts), "-o", str(output)]
    assert main([*command, "--kv-scales"]) == 2
    assert "K and V of some layers are one projection" in capfd.readouterr().err
    assert main(command) == 0
    found = quantized_linears(read_target(output).weights)
    assert len(found) == 3 * 7 - 1 and "layers.2.v_proj" not in found
