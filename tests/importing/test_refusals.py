"""What an import refuses by name, and that nothing is left where it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.building.gguf import importer, tokenizer
from dflash_trt.building.gguf.gguf_file import GgufFile, read_gguf
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


def fails(source: Path, folder: Path, *pieces: str, name: str = "m.gguf", **changes: Any) -> None:
    """An import of `source` with these changes is refused and leaves nothing."""
    path = write_gguf(folder / name, source, **changes)
    with refused(str(path), *pieces):
        import_gguf(path, folder / "out", SilentProgress())
    assert [one.name for one in folder.iterdir()] == [name]


@pytest.mark.parametrize(
    ("keys", "piece"),
    [
        ({"general.type": "adapter"}, "is a LoRA adapter, not a model: merge it"),
        ({"general.type": "mmproj"}, "is a projector"),
        ({"general.type": "other"}, 'is of type "other"'),
        ({"split.count": 3}, "is one of 3 parts of a model; join them first"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"llama.expert_count": 8}, 'key "llama.expert_count" = 8 is not known'),
        ({"llama.logit_scale": 0.5}, 'key "llama.logit_scale" = 0.5 is not known'),
        ({"llama.nextn_predict_layers": 1}, '"llama.nextn_predict_layers" = 1 is not known'),
        ({"llama.attention.sliding_window": 64}, "it may change what the model computes"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 0}, "an integer from 1 to 1024"),
        ({"llama.block_count": 1000}, "states 1000 layers and has"),
        ({"llama.block_count": 3}, "9 missing (blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "9 not known (blk.1"),
        ({"llama.attention.head_count": [2, 2]}, "llama.attention.head_count is"),
        ({"llama.attention.head_count_kv": 3}, "num_attention_heads"),
        ({"llama.attention.key_length": 8}, "attention.value_length = 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
        ({"llama.embedding_length": 64}, "of another shape (token_embd.weight is [322, 32]"),
        ({"llama.feed_forward_length": 2**31 - 1}, "feed_forward_length"),
        ({"llama.context_length": True}, "llama.context_length is true"),
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


@pytest.mark.parametrize("key", ["llama.expert_count", "llama.nextn_predict_layers"])
def test_what_is_off_is_no_reason_to_refuse(source: Path, tmp_path: Path, key: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", source, keys={key: 0})
    import_gguf(path, tmp_path / "out", SilentProgress())


@pytest.mark.parametrize(
    ("tensors", "piece"),
    [
        ({"blk.1.attn_q.weight": None}, "1 missing (blk.1.attn_q.weight)"),
        ({"blk.1.attn_q.weight": np.ones((32, 64), np.float32)}, "1 of another shape"),
        ({"output_norm.weight": np.ones((1, 32), np.float32)}, "is [1, 32], not [32]"),
        ({"blk.0.attn_q.bias": VECTOR}, "7 missing (blk.1.attn_q.bias"),
        ({"blk.2.nextn.eh_proj.weight": MATRIX}, "1 not known (blk.2.nextn.eh_proj.weight)"),
        ({"blk.0.attn_q.weight.lora_a": MATRIX}, "1 not known"),
        ({"blk.0.attn_q_norm.weight": VECTOR}, "1 not known (blk.0.attn_q_norm.weight)"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), np.nan, np.float32)}, "holds NaN or infinities"),
        ({"blk.0.ffn_up.weight": np.full((48, 32), 3.4e38, np.float32)}, "holds NaN or infinities"),
        ({"rope_freqs.weight": MATRIX}, 'tensor "rope_freqs.weight" is [32, 32], not a vector'),
        ({"rope_freqs.weight": VECTOR * 2}, "another way than Llama 3's"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tensors(source: Path, tmp_path: Path, tensors: dict[str, Any], piece: str) -> None:
    fails(source, tmp_path, piece, tensors=tensors)


def test_a_part_of_a_model(source: Path, tmp_path: Path) -> None:
    name = "m-00002-of-00003.gguf"
    fails(source, tmp_path, "is part 2 of 3 of a model; join them first", name=name)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("gpt-oss", 'architecture "gpt-oss" is known to `build`, and not imported from GGUF; pass'),
        ("gemma3", "not imported from GGUF: its tokenizer is no byte-level BPE; pass its Hugging"),
        (
            "dflash",
            'architecture "dflash" is a DFlash draft, not a target: drafts are not imported',
        ),
        ("eagle3", "is an EAGLE-3 drafter, not a target"),
        ("qwen3next", "architecture \"qwen3next\" is not supported (nearest: 'qwen3')"),
        ("clip", "(known: llama, qwen2, qwen3, qwen3moe)"),
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


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    path = write_gguf(tmp_path / "m.gguf", source)
    with refused(str(tmp_path / "out"), "bytes, 1,000 are free; free some space"):
        import_gguf(path, tmp_path / "out", SilentProgress())
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_that_shrinks_while_it_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", source)

    def read(given: Path) -> GgufFile:
        file = read_gguf(given)
        path.write_bytes(path.read_bytes()[:-8000])
        return file

    monkeypatch.setattr(importer, "read_gguf", read)
    with refused("it changed while it was read"):
        import_gguf(path, tmp_path / "out", SilentProgress())
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]
