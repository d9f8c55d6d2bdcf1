"""Hybrids and Gemma 4 on the command line: what is shown of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dflash_trt.backends.tensorrt.build import builder
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.main import main
from dflash_trt.graph.caches import native
from dflash_trt.models.draft import read_draft
from dflash_trt.models.quantized_weights import quantized_linears, read_scalar
from dflash_trt.models.target import read_target
from dflash_trt.quantization.linears import ALL_EXPERTS, LAYER_LINEARS
from tests.cli.bigram import write_tokenizer
from tests.covering import exhaustive
from tests.models.helpers import edit_json, edit_tensors, refused
from tests.pairs import PairFactory, TinyPair
from tests.reference.checkpoints import write_target
from tests.reference.mtp import write_mtp

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
    """In every layer of a target: TensorRT has no kernel for its heads of 32, or for pages."""
    found = build_with_kernels(gemma, tmp_path, "--kv-layout", layout, largest=16)
    kernel = "block_attention" + "_paged" * (layout == "paged")
    for graph in ("target", "target_only"):
        assert found[graph][kernel] == "plugin"
        assert "native" not in found[graph].values()
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


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target that has an MTP layer, and a YAML file that names both."""
    folder = tmp_path_factory.mktemp("own")
    write_mtp(write_target(folder / "target", "qwen3_5", vocab=300, num_layers=4, vision=True))
    write_tokenizer(folder / "target")
    (folder / "own.yaml").write_text("target: target\ndraft: mtp\n")
    (folder / "texts.jsonl").write_text('{"prompt": "a"}\n')
    return folder


DEMO = Path(__file__).parents[2] / "demo_pair" / "target"
BY_WORD = ["--target-checkpoint", "{}/target", "--draft-checkpoint", "mtp"]
QUANTIZED = ["--precision", "fp8", "--calibration", "{}/texts.jsonl"]
BY_YAML = ["--target", "{}/own.yaml"]


@pytest.mark.parametrize("words", [BY_WORD, BY_YAML, ["--target", "{}/target", *BY_WORD[2:]]])
def test_a_targets_own_layer_drafts(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    output, text = str(tmp_path / "b"), str(own / "texts.jsonl")
    assert main(["build", *(one.format(own) for one in words), "-o", output]) == 0
    assert "MTP draft of 1 (" in capsys.readouterr().out
    assert main(["inspect", output]) == 0
    shown = capsys.readouterr().out
    assert "target with an MTP layer, for executor cpu" in shown
    assert "taps the target's output; sliding" in shown
    assert main(["diagnose", output]) == 2  # before it looks for texts, and asks the target
    assert "whose chain nothing can be changed yet" in capsys.readouterr().err
    assert main(["tune", output, "--prompts", text, "--block-size", "2,8", "--batch", "1"]) == 0
    capsys.readouterr()
    plan = ["plan", "--target", str(own / "own.yaml"), "--gpu", "h100", "--acceptance", "4"]
    assert main([*plan, "--json", "--input-tokens", "64", "--output-tokens", "64"]) == 0
    assert set(json.loads(capsys.readouterr().out)["fronts"]) == {"autoregressive", "MTP"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--executor", "tensorrt-rtx"], "an MTP layer, for which engines cannot be built yet"),
        ([*QUANTIZED, "--executor", "trtllm", "--profile", "h100x1"], "without its MTP layer here"),
        (["--target-checkpoint", f"{DEMO}"], "has no MTP layer: it is of the family qwen3"),
        (["--target-layer-ids", "1"], "the draft takes layers 3 ("),
        (["--kv-dtype", "fp8"], "for which FP8 KV caches cannot be built yet"),
        (QUANTIZED, "an MTP layer, for which quantising the pair cannot be built yet"),
    ],
)
def test_what_no_own_layer_can(
    own: Path, capsys: pytest.CaptureFixture[str], options: list[str], what: str
) -> None:
    output = own / "refused"
    words = [*BY_WORD, "-o", "{}/refused", *options]
    assert main(["build", *(one.format(own) for one in words)]) == 2
    assert what in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"mtp_num_hidden_layers": None}, "has no MTP layer (no mtp_num_hidden_layers)"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2 is not supported; one layer is"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = true is not"),
        ({"intermediate_size": 80}, '"mtp.layers.0.mlp.gate_proj.weight" is [96, 64], not [80'),
        ({}, "has no MTP layer (no tensor mtp.*)"),
    ],
)
def test_layers_that_are_not_read(own: Path, changes: dict[str, Any], what: str) -> None:
    folder = own / "changed"
    shutil.copytree(own / "target", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", text_config=config["text_config"] | changes)
    if not changes:
        held = load_file(folder / "model.safetensors")
        edit_tensors(folder / "model.safetensors", {one: None for one in held if "mtp." in one})
    with refused(what):
        read_draft(folder)
