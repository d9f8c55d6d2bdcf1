"""The weights that an import writes: the checkpoint's own, or what the package gguf decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from transformers import AutoConfig

from dflash_trt.building.gguf.importer import Imported, import_gguf
from dflash_trt.core.progress import SilentProgress
from tests.importing.files import VOCAB, Array, encode, read_arrays, turn, write_gguf
from tests.reference.checkpoints import write_target

# Rows of 256 hold one block of every type.
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 256,
    "vocab": VOCAB,
}
HEADS = {"q_proj": 4, "k_proj": 2}
DECODED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS)
REST = (Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.MXFP4, Kind.IQ4_NL, Kind.IQ3_S)
EACH_KIND = [*DECODED, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in REST)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("llama") / "hf", "llama", **SIZES)


def load(path: Path, folder: Path, **options: Any) -> Imported:
    return import_gguf(path, folder, SilentProgress(), **options)


def stored(folder: Path) -> dict[str, Any]:
    """Name → tensor as it lies in the files of a folder."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie": True, "kv_heads": 4}),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", {"experts": 4, "chosen": 2}),
    ],
    ids=str,
)
def test_what_lies_unrounded_comes_back_bit_for_bit(
    family: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    source = write_target(tmp_path / "hf", family, **SIZES | options)
    written = load(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out", dtype="fp32")
    assert not written.rounded
    want, got = read_arrays(source), read_arrays(tmp_path / "out")
    assert want.keys() == got.keys()
    for name, array in want.items():
        assert np.array_equal(array.view(np.uint32), got[name].view(np.uint32)), name
    folders = tmp_path / "out", source
    ours, theirs = (AutoConfig.from_pretrained(folder).to_dict() for folder in folders)
    differ = {key for key in theirs if ours.get(key) != theirs[key]}
    assert differ <= {"eos_token_id", "_name_or_path"}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, *EACH_KIND], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_are_decoded_as_the_package_does_and_rounded_once(
    kind: Kind, dtype: Any, llama: Path, tmp_path: Path
) -> None:
    written = load(write_gguf(tmp_path / "m.gguf", llama, kind), tmp_path / "out", dtype=dtype)
    got = stored(tmp_path / "out")
    rounded = 0
    for name, array in read_arrays(llama).items():
        want = array
        if array.ndim > 1:
            heads = next((n for one, n in HEADS.items() if one in name), None)
            rows = array if heads is None else turn(array, heads)
            want = gguf.dequantize(encode(rows, kind), kind)
            want = want if heads is None else unturn(want, heads)
        want = np.ascontiguousarray(want, np.float32)
        short = want.astype(ml_dtypes.bfloat16)
        rounded += int((short.astype(np.float32) != want).sum())
        if dtype == "bf16":
            assert got[name].dtype == torch.bfloat16
            assert np.array_equal(got[name].view(torch.int16).numpy(), short.view(np.int16)), name
        else:
            assert np.array_equal(got[name].numpy(), want), name
    assert written.rounded == (rounded if dtype == "bf16" else 0)


def unturn(array: Array, heads: int) -> Array:
    """What `turn` was given."""
    places = turn(np.arange(len(array)), heads)
    back = np.empty_like(array)
    back[places] = array
    return back


def test_pieces_of_any_size_are_whole_heads(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.building.gguf.importer.CHUNK_ELEMENTS", 700)
    load(write_gguf(tmp_path / "m.gguf", llama), tmp_path / "out", dtype="fp32")
    want, got = read_arrays(llama), read_arrays(tmp_path / "out")
    assert all(np.array_equal(want[name], got[name]) for name in want)
