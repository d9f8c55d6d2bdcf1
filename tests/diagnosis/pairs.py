"""Good pairs with faults seeded into them, one each, as bundles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.decoding.replay.edits import find_node, load_graph
from dflash_trt.models.build_config import data_folder

GOOD = {"demo": ".", "gpt-oss": "gpt_oss"}
CONFIG = {"demo": "demo", "gpt-oss": "demo-gpt-oss"}


def build(
    folder: Path,
    pair: str,
    *options: str,
    draft: dict[str, Any] | None = None,
    dflash: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    draft_weights: str | None = None,
    target_bits: int | None = None,
) -> Bundle:
    """A bundle of the demo pair `pair` with keys changed in its configs.

    Args:
        options: further ones of `dflash-trt build`.
        draft, dflash: keys of the draft's config, and of its dflash_config.
        target: keys of the target's config.
        tokenizer: keys of the target's tokenizer_config.json.
        draft_weights: the pair whose draft's weights are taken.
        target_bits: what the target's linears are rounded to.
    """
    root = data_folder("demo_pair")
    source = root / GOOD[pair]
    shutil.copytree(source / "target", folder / "target")
    shutil.copytree(source / "draft", folder / "draft")
    if draft_weights is not None:
        weights = root / GOOD[draft_weights] / "draft" / "model.safetensors"
        shutil.copy(weights, folder / "draft" / weights.name)
    if target_bits is not None:
        round_target(folder / "target" / "model.safetensors", target_bits)
    _change(folder / "draft" / "config.json", draft or {})
    _change(folder / "draft" / "config.json", dflash or {}, "dflash_config")
    _change(folder / "target" / "config.json", target or {})
    _change(folder / "target" / "tokenizer_config.json", tokenizer or {})
    shutil.copy(source / "prompts.jsonl", folder / "prompts.jsonl")
    arguments = ["build", "--target", CONFIG[pair], "--output", str(folder / "bundle"), *options]
    for role in ("target", "draft"):
        arguments += [f"--{role}-checkpoint", str(folder / role)]
    assert main(arguments) == 0
    return open_bundle(folder / "bundle")


def edit_graph(
    good: Bundle, folder: Path, graph: str, edit: Callable[[onnx.ModelProto], None]
) -> Bundle:
    """A copy of a bundle, one of whose graphs was built otherwise."""
    shutil.copytree(good.folder, folder, copy_function=os.link)
    path = folder / f"{graph}.onnx"
    model = load_graph(path)
    edit(model)
    content = model.SerializeToString(deterministic=True)
    path.unlink()
    path.write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in manifest["files"]:
        if file["path"] == path.name:
            file["bytes"], file["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return open_bundle(folder)


def _change(path: Path, keys: dict[str, Any], below: str | None = None) -> None:
    config = json.loads(path.read_text())
    (config if below is None else config[below]).update(keys)
    path.write_text(json.dumps(config))


def round_target(path: Path, bits: int) -> None:
    """Rounds every linear of a checkpoint to so many bits, with a scale for each row."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name:
            scale = weight.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            weights[name] = ((weight.float() / scale).round() * scale).to(weight.dtype)
    save_file(weights, path)


def shift_slots(model: onnx.ModelProto) -> None:
    """Of draft.onnx: the draft of slot j is read one slot earlier."""
    for value in (0, -1):
        name = f"constant.list.{value}"
        if all(one.name != name for one in model.graph.initializer):
            tensor = onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
            model.graph.initializer.append(tensor)
    slots = find_node(model, "head/masked_slots")
    slots.input[1], slots.input[2] = "constant.list.0", "constant.list.-1"
