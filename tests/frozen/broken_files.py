"""Files that nobody can use, by what is wrong with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.conftest import safetensors_bytes

PAIR = "description: d\ntarget: {checkpoint: t}\ndraft: {checkpoint: d}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DEPLOYED = (
    "description: own\ntarget: {{checkpoint: Qwen/Qwen3-8B}}\n"
    "draft: {{checkpoint: z-lab/Qwen3-8B-DFlash-b16}}\nprofiles:\n  own: {{{profile}}}\n"
)
PROFILES: Mapping[str, str] = {
    "of a GPU that nobody knows": "gpu: h2000",
    "that splits heads unevenly": "gpu: b200, gpus: 3, tensor_parallel: 3",
    "of experts that there are none of": "gpu: b200, gpus: 2, tensor_parallel: 2, "
    "expert_parallel: 2",
    "of a precision that the GPU lacks": "gpu: h100, precision: nvfp4",
    "of more than the GPU holds": "gpu: rtx-5090, max_seq_len: 40000, max_batch: 64",
    "of GPUs that are left over": "gpu: b200, gpus: 4",
    "of nodes that do not divide": "gpu: b200, gpus: 2, tensor_parallel: 2, nodes: 3",
    "without a GPU": "max_batch: 4",
}

YAML: Mapping[str, str] = {
    "an unknown key": PAIR + "max_sequence: 4\n",
    "an unknown key within": PAIR.replace("{checkpoint: t}", "{checkpoint: t, revison: x}"),
    "no draft": "description: d\ntarget: {checkpoint: t}\n",
    "a target that is text": PAIR.replace("{checkpoint: t}", "t"),
    "a batch that is text": PAIR + 'max_batch: "4"\n',
    "a batch that is true": PAIR + "max_batch: true\n",
    "a batch of 0": PAIR + "max_batch: 0\n",
    "a length that is infinite": PAIR + "max_seq_len: .inf\n",
    "a length beyond bounds": PAIR + "max_seq_len: 99999999999999999999\n",
    "a block of 1": PAIR + "block_size: 1\n",
    "a key twice": PAIR + "max_batch: 4\nmax_batch: 8\n",
    "an unknown precision": PAIR + "precision: int4\n",
    "an exclusion without precision": PAIR + "exclude: [x]\n",
    "two mistakes": PAIR + "max_batch: 0\nmax_seq_len: -1\n",
    "a Python object": PAIR + "prompts: !!python/object/apply:os.system [id]\n",
    "an open bracket": PAIR + "max_batch: [\n",
    "deep nesting": PAIR + "prompts: " + "[" * 5_000,
    "a bomb of aliases": BOMB + PAIR.replace("description: d", "description: *i"),
    "nothing": "",
    "a list": "- a\n- b\n",
    "too much": "# " + "x" * (1 << 20),
    "bytes that are no text": "\udcff\udcfe",
    "checkpoints that are not there": PAIR.replace("checkpoint: ", "checkpoint: ./"),
    "a profile with an unknown key": PAIR + "profiles:\n  own: {gpu: b200, tensor_paralel: 1}\n",
    "a profile that does not add up": PAIR + "profiles:\n  own: {gpu: b200, gpus: 4}\n",
    "experts that no GPUs share": PAIR
    + "profiles:\n  own: {gpu: b200, gpus: 4, tensor_parallel: 4, expert_parallel: 3}\n",
}
PROMPTS: Mapping[str, bytes] = {
    "empty.jsonl": b"",
    "object.jsonl": b'{"text": "a"}\n',
    "number.jsonl": b'{"prompt": 3}\n',
    "blank.jsonl": b'{"prompt": "a"}\n{"prompt": ""}\n',
    "cut.jsonl": b'{"prompt": "a"}\nnot json',
    "surrogate.jsonl": b'{"prompt": "a\\ud800"}\n',
    "deep.jsonl": b"[" * 100_000,
    "binary.jsonl": b"\x80\x04K\x01.",
    "binary.txt": b"\xff",
}


def _schedule(*blocks: tuple[int, int], **fields: Any) -> dict[str, Any]:
    listed = [{"max_batch": batch, "block_size": block} for batch, block in blocks]
    return {"schema_version": 1, "blocks": listed, "executor": "cpu", **fields}


SCHEDULES: Mapping[str, Any] = {
    "of another executor": _schedule((4, 2), executor="tensorrt-rtx"),
    "of another bundle": _schedule((4, 2), bundle="0" * 64),
    "that ends too early": _schedule((2, 2)),
    "of larger blocks": _schedule((4, 17)),
    "of descending batches": _schedule((8, 2), (4, 2)),
    "without blocks": _schedule(),
    "of another version": _schedule((4, 2), schema_version=7),
    "that is a list": [],
}
DEPLOYED_SCHEDULES: Mapping[str, Any] = {
    "without speculation": _schedule((4, 1), (64, 1)),
    "of a smaller first block": _schedule((4, 8), (64, 1)),
    "of larger blocks": _schedule((4, 17), (64, 1)),
    "of another version": _schedule((4, 2), schema_version=7),
}


TARGET = "target/model.safetensors"


def _with(file: str, data: bytes | str | None) -> Callable[[Path], object]:
    """Writes a file of a pair or a bundle anew; None: lets it be gone."""
    if data is None:
        return lambda folder: (folder / file).unlink()
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return lambda folder: (folder / file).write_bytes(raw)


def _zeros(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(b"\0" * (folder / file).stat().st_size)


def _indexed(index: object) -> Callable[[Path], object]:
    """Puts an index beside weights that it may or may not be about."""

    def damage(pair: Path) -> None:
        (pair / TARGET).rename(pair / "target" / "part-1.safetensors")
        _with("target/model.safetensors.index.json", json.dumps(index))(pair)

    return damage


def _swapped(pair: Path) -> None:
    shutil.move(pair / "target", pair / "x")
    shutil.move(pair / "draft", pair / "target")
    shutil.move(pair / "x", pair / "draft")


BROKEN_PAIRS: Mapping[str, Callable[[Path], object]] = {
    "config.json: no JSON": _with("target/config.json", "{'a': 1}"),
    "config.json: an infinity": _with("target/config.json", '{"a": {"b": [1, -Infinity]}}'),
    "config.json: a key twice": _with("target/config.json", '{"a": 1, "a": 1}'),
    "config.json: deep nesting": _with("target/config.json", "[" * 100_000),
    "config.json: bytes that are no text": _with("target/config.json", "\udcff"),
    "weights: no tensors": _with(TARGET, safetensors_bytes({})),
    "weights: a header that is cut": _with(TARGET, safetensors_bytes(b"{")),
    "weights: a length that lies": _with(TARGET, safetensors_bytes(b"{}", length=2**64 - 1)),
    "weights: cut short": lambda pair: os.truncate(pair / TARGET, 5000),
    "weights: a pickle": lambda pair: (pair / TARGET).rename(pair / "target/pytorch_model.bin"),
    "weights: none": _with(TARGET, None),
    "weights: no config": _with("draft/config.json", None),
    "weights: a shard that is not there": _indexed({"weight_map": {"a": "part-9.safetensors"}}),
    "weights: a shard elsewhere": _indexed({"weight_map": {"a": "../part-1.safetensors"}}),
    "weights: an index of others": _indexed({"weight_map": {"a": "part-1.safetensors"}}),
    "weights: an index that is a list": _indexed([]),
    "weights: an empty index": _indexed({"weight_map": {}}),
    "weights: target and draft changed places": _swapped,
    "weights: prompts that are not there": _with("prompts.jsonl", None),
    "weights: prompts that are none": _with("prompts.jsonl", '{"prompt": 1}'),
    "weights: a tokenizer that is none": _with("target/tokenizer.json", "{}"),
    "weights: an end that is no token": _with(
        "target/generation_config.json", '{"eos_token_id": [1, 1000000]}'
    ),
}


def _with_nan(pair: Path) -> None:
    tensors = load_file(pair / TARGET)
    save_file({name: np.full_like(value, np.nan) for name, value in tensors.items()}, pair / TARGET)


DAMAGED_PAIRS: Mapping[str, Callable[[Path], object]] = {
    "NO_TEXT": _with("target/tokenizer.json", None),
    "NAN": _with_nan,
}
"""Pairs that can be built, and then do not run."""

DAMAGED_BUNDLES: Mapping[str, Callable[[Path], object]] = {
    "BROKEN_GRAPH": _zeros("draft.onnx"),
    "BROKEN_TEXT": _zeros("tokenizer/tokenizer.json"),
}


def write_odd_files(folder: Path) -> dict[str, Path]:
    """Files and folders that are not what a command takes, by name; NONE is not there."""
    names = ("NONE", "FILE", "FOLDER", "MINE", "EMPTY", "SHORT", "REPOSITORY", "DAMAGED")
    files = {name: folder / name.lower() for name in names}
    files["FILE"].touch()
    files["FOLDER"].with_suffix(".yaml").mkdir()
    files["MINE"].mkdir()
    (files["MINE"] / "thesis.tex").touch()
    files["EMPTY"].touch()
    files["SHORT"].write_text("a")
    (files["REPOSITORY"] / "model").mkdir(parents=True)
    (files["REPOSITORY"] / "model" / "config.pbtxt").touch()
    files["DAMAGED"].mkdir()
    (files["DAMAGED"] / "manifest.json").write_text("{}")
    return files
