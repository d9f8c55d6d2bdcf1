"""Large pairs in their true shapes, from sparse shards: what a build costs and refers to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from dflash_trt.building.synthetic import gpt_oss, qwen3
from dflash_trt.building.synthetic.checkpoint_writer import write_checkpoint
from dflash_trt.building.synthetic.qwen3_5 import write_hybrid
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.deploy.planning.known_pairs import find_pair
from dflash_trt.models.safetensors_header import read_header

MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 110e6
LENGTH = ("--max-seq-len", "131072")
MEASURED_BUILD = """
import os, re, sys
import subprocess
import sys
from pathlib import Path
from dflash_trt.cli.main import main

code = main(sys.argv[1:])
peak = re.search("VmHWM: *([0-9]+)", Path("/proc/self/status").read_text().replace("\\t", " "))
print("cost", sum(os.times()[:2]), 1024 * int(peak[1]))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """gpt-oss-120b in holes, whose build reads no weights."""
    folder = tmp_path_factory.mktemp("full")
    assert gpt_oss.write_gpt_oss(folder, find_pair("gpt-oss-120b"), random=False) > 65e9
    return build(folder)


def build(folder: Path, draft: str = "draft") -> Bundle:
    """The pair in `folder`, within bounds of time and memory."""
    (folder / "pair.yaml").write_text(f"target: target\ndraft: {draft}\n", encoding="utf-8")
    places = ["--target", str(folder / "pair.yaml"), "-o", str(folder / "bundle")]
    options = [*places, *LENGTH, "--overwrite"]
    command = [sys.executable, "-c", MEASURED_BUILD, "build", *options]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, peak = map(float, out.splitlines()[-1].split()[1:])
    assert seconds < MAX_SECONDS and peak < MAX_BYTES
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


def test_gpt_oss_120b(built: Bundle) -> None:
    own = [path.stat() for path in built.folder.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own) > 65e9
    assert built.manifest.target.parameters == 116_829_156_672
    assert list(built.manifest.target.eos_token_ids) == gpt_oss.EOS_TOKEN_IDS


def test_qwen3_8_27b(tmp_path: Path) -> None:
    assert write_hybrid(tmp_path, find_pair("qwen3.8-27b"), random=False) > 55e9
    bundle = build(tmp_path)
    assert bundle.manifest.draft.kind == "DFlash 2"
    assert bundle.manifest.draft.parameters == 1_924_404_480
    assert len(initializers(bundle)) > 500
    draft = build(tmp_path, "mtp").manifest.draft
    assert (draft.kind, draft.parameters, draft.target_layer_ids) == ("MTP", 424_699_392, [63])


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


def test_a_speculator_of_qwen3_8b(tmp_path: Path) -> None:
    """As RedHatAI's: a head of its own over 32,000 of the target's tokens."""
    pair, few = find_pair("qwen3-8b"), 32_000
    qwen3.write_pair(tmp_path, pair, random=False)
    layer = json.loads((tmp_path / "draft" / "config.json").read_text(encoding="utf-8"))
    ids, matrix = layer.pop("dflash_config")["target_layer_ids"], (pair.target.vocab_size, 4096)
    config = {"architectures": ["DFlashDraftModel"], "transformer_layer_config": layer}
    config |= {"speculators_model_type": "dflash", "mask_token_id": 151_669, "block_size": 8}
    config |= {"aux_hidden_state_layer_ids": [one + 1 for one in ids], "draft_vocab_size": few}
    shapes = {"embed_tokens.weight": matrix, "lm_head.weight": (few, 4096)}
    tensors = {one: ("BF16", at) for one, at in (qwen3.draft_shapes(pair.draft) | shapes).items()}
    tensors |= {"d2t": ("I64", (few,)), "t2d": ("BOOL", matrix[:1])}
    write_checkpoint(tmp_path / "own", config, tensors, random=False)
    words = ["--target-checkpoint", tmp_path / "target", "--draft-checkpoint", tmp_path / "own"]
    assert main(["build", *map(str, words), "-o", str(tmp_path / "bundle")]) == 0
    draft = open_bundle(tmp_path / "bundle").manifest.draft
    assert (draft.token_count, draft.owned, draft.target_layer_ids) == (few, ["lm_head"], ids)
