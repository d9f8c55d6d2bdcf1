"""What an import refuses by name, and that nothing is left where it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.building.gguf import tokenizer
from dflash_trt.building.gguf.importer import import_gguf
from dflash_trt.core.progress import SilentProgress
from tests.importing.files import VOCAB, write_gguf
from tests.models.helpers import refused
from tests.reference.checkpoints import write_target

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
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama.expert_count": 8}, 'key "llama.expert_count" = 8 is not known'),
        ({"llama.logit_scale": 0.5}, 'key "llama.logit_scale" = 0.5 is not known'),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 1000}, "states 1000 layers and has"),
        ({"llama.block_count": 3}, "9 missing (blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "9 not known (blk.1"),
        ({"llama.attention.head_count": [2, 2]}, "llama.attention.head_count is"),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads"),
        ({"llama.attention.key_length": 8}, "attention.value_length = 16"),
        ({"llama.embedding_length": 64}, "of another shape (token_embd.weight is [322, 32]"),
        ({"llama.vocab_size": 321}, "llama.vocab_size is 321, and there are 322 tokens"),
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
        ({"blk.1.attn_q.weight": None}, "1 missing (blk.1.attn_q.weight)"),
        ({"output_norm.weight": np.ones((1, 32), np.float32)}, "is [1, 32], not [32]"),
        ({"blk.0.attn_q.bias": VECTOR}, "7 missing ("),
        ({"blk.2.nextn.eh_proj.weight": MATRIX}, "1 not known (blk.2.nextn.eh_proj.weight)"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), np.nan, np.float32)}, "holds NaN or infinities"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), 3.4e38, np.float32)}, "holds NaN or infinities"),
        ({"rope_freqs.weight": MATRIX}, 'tensor "rope_freqs.weight" is [32, 32], not a vector'),
        ({"rope_freqs.weight": VECTOR * 2}, "another way than Llama 3's"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tensors(source: Path, tmp_path: Path, tensors: dict[str, Any], piece: str) -> None:
    fails(source, tmp_path, piece, tensors=tensors)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("gemma3", 'architecture "gemma3" is not imported from GGUF'),
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
