"""The weights that an import writes, what its target computes, and what it refuses by name."""

from __future__ import annotations

import json
import shutil
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

from dflash_trt.building.gguf import tokenizer
from dflash_trt.building.gguf.importer import Imported, import_gguf
from dflash_trt.core.progress import SilentProgress
from tests.importing.files import VOCAB, Array, encode, read_arrays, turn, write_gguf
from tests.models.helpers import refused
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


MATRIX = np.ones((32, 32), np.float32)
VECTOR = np.ones(32, np.float32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "hidden": 32, "heads": 2, "intermediate": 48, "vocab": VOCAB}
    return write_target(tmp_path_factory.mktemp("source") / "hf", "llama", **sizes)


def fails(source: Path, folder: Path, *pieces: str, **changes: Any) -> None:
    """An import of `source` with these changes is refused and leaves nothing."""
    path = write_gguf(folder / "m.gguf", source, **changes)
    with refused(str(path), *pieces):
        import_gguf(path, folder / "out", SilentProgress())
    assert [one.name for one in folder.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("keys", "piece"),
    [
        ({"general.type": "adapter"}, 'is of type "adapter", no language model'),
        ({"split.count": 3}, "is one of 3 parts of a model; join them first"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.factor": -8.0}, "llama.rope.scaling.factor is -8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama.expert_count": 8}, 'key "llama.expert_count" = 8 is not known'),
        ({"llama.logit_scale": 0.5}, 'key "llama.logit_scale" = 0.5 is not known'),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 1000}, "states 1000 layers and has"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing; "),
        ({"llama.block_count": 1}, "is not known"),
        ({"llama.attention.head_count": [2, 2]}, "llama.attention.head_count is"),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads"),
        ({"llama.attention.key_length": 8}, "attention.value_length = 16"),
        ({"llama.embedding_length": 64}, "token_embd.weight is [322, 32]"),
    ],
    ids=str,
)
def test_keys(source: Path, tmp_path: Path, keys: dict[str, Any], piece: str) -> None:
    fails(source, tmp_path, piece, keys=keys)


def test_a_tokenizer_that_panics(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried in a process of its own before this one makes it."""
    strips = {"type": "Strip", "content": "a", "start": 0, "stop": 1 << 40}
    monkeypatch.setattr(tokenizer, "_DECODER", strips)
    fails(source, tmp_path, "its tokenizer cannot be made: makes the tokenizers library panic")


@pytest.mark.parametrize(
    ("tensors", "piece"),
    [
        ({"blk.1.attn_q.weight": None}, "blk.1.attn_q.weight is missing"),
        ({"output_norm.weight": np.ones((1, 32), np.float32)}, "is [1, 32], not [32]"),
        ({"blk.0.attn_q.bias": VECTOR}, ".attn_q.bias is missing"),
        ({"blk.2.nextn.eh_proj.weight": MATRIX}, "blk.2.nextn.eh_proj.weight is not known"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), np.nan, np.float32)}, "holds NaN or infinities"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), 3.4e38, np.float32)}, "holds NaN or infinities"),
        ({"rope_freqs.weight": MATRIX}, "another way than Llama 3's"),
        ({"rope_freqs.weight": VECTOR * 2}, "another way than Llama 3's"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tensors(source: Path, tmp_path: Path, tensors: dict[str, Any], piece: str) -> None:
    fails(source, tmp_path, piece, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("gemma2", "architecture \"gemma2\" is not imported from GGUF (nearest: 'gemma3')"),
        ("qwen3next", "(nearest: 'qwen3')"),
    ],
)
def test_architectures(source: Path, tmp_path: Path, name: str, piece: str) -> None:
    config = json.loads((source / "config.json").read_text())
    shutil.copytree(source, tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"model_type": name}))
    path = write_gguf(tmp_path / "m.gguf", tmp_path / "hf")
    with refused(piece):
        import_gguf(path, tmp_path / "out", SilentProgress())


def test_a_folder_that_holds_the_file_is_not_replaced(source: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", source)
    import_gguf(path, tmp_path / "out", SilentProgress())
    inside = path.rename(tmp_path / "out" / "m.gguf")
    with refused("holds m.gguf, which would be gone with it"):
        import_gguf(inside, tmp_path / "out", SilentProgress(), overwrite=True)
    assert inside.exists()
