"""What an import writes: the checkpoint's own weights, or what the package gguf decodes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from dflash_trt.building.bundle_writer import BuildOptions
from dflash_trt.building.gguf.importer import Imported, import_gguf
from dflash_trt.core.progress import SilentProgress
from dflash_trt.graph.bindings import LOGITS
from tests.graph.runner import BOUND, GraphRunner, tokens
from tests.importing.files import VOCAB, Array, encode, read_arrays, turn, write_gguf
from tests.pairs import bundle_pair
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.compare import max_relative_error
from tests.reference.generate import load_target

LENGTH = 75
NOT_OF_THE_MODEL = {
    "_name_or_path",
    "architectures",
    "quantization_config",
    "dtype",
    "bos_token_id",
    "pad_token_id",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}


def llama3_factors(head_dim: int) -> Array:
    """What llama.cpp's converter writes for `LLAMA3`: a divisor for each pair's frequency."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * 10_000.0 ** (2 * pair / head_dim)
        turns = 8192 / wavelength
        blend = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        factors.append(1 / ((1 - blend) / 32.0 + blend))
    return np.array(factors, np.float32)


def make_source(
    folder: Path, family: Any, rope: dict[str, Any] | None = None, **sizes: Any
) -> Path:
    """A target in bf16, whose values all types from BF16 up hold."""
    options = {"num_layers": 4, "head_dim": 32} | sizes
    options |= {"experts": 4, "chosen": 2} if family == "qwen3_moe" else {}
    # llama.cpp's Qwen2 has no windows.
    options |= {"window": None, "hidden": 128} if family == "qwen2" else {}
    write_target(folder, family, "bfloat16", vocab=VOCAB, **options)
    if rope:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    return folder


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", None),
        ("qwen3", None),
        ("llama", LLAMA3),
        ("qwen3", YARN),
        ("qwen3_moe", None),
        ("qwen2", None),
    ],
    ids=["llama", "qwen3", "llama3 factors", "yarn", "qwen3_moe", "qwen2"],
)
def test_logits_of_a_bundle_equal_those_of_the_original_in_transformers(
    family: Any, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", family, rope)
    file = write_gguf(
        tmp_path / "model.gguf",
        source,
        Kind.BF16,
        keys={f"{family}.{key}": value for key, value in YARN_KEYS.items()} if rope is YARN else {},
        tensors={"rope_freqs.weight": llama3_factors(32)} if rope is LLAMA3 else {},
    )
    imported = import_gguf(file, tmp_path / "target", SilentProgress())
    assert not any(one.rounded for one in imported.stored.values())
    write_draft(tmp_path / "draft", tmp_path / "target", target_layer_ids=[0, 2])
    built = bundle_pair(tmp_path, BuildOptions())
    ids = tokens(VOCAB, 1, LENGTH)
    got = GraphRunner(built).target(ids, [0])[LOGITS]
    with torch.no_grad():
        want = load_target(source)(torch.tensor(ids)).logits
    assert max_relative_error(got, want) <= BOUND
    assert built.pair.target.eos_token_ids == imported.vocabulary.ends


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_weights_and_config_are_those_that_transformers_reads_from_the_same_file(
    family: Any, tmp_path: Path
) -> None:
    """transformers' own reader of GGUF, which knows nothing of ours, is the judge."""
    # transformers 5.23 leaves out these two sizes, and takes its own defaults.
    sizes = {"qwen3": {"head_dim": 128}, "qwen3_moe": {"intermediate": 768}}
    source = make_source(tmp_path / "source", family, **sizes.get(family, {}))
    file = write_gguf(tmp_path / "model.gguf", source, Kind.Q8_0)
    import_gguf(file, tmp_path / "target", SilentProgress(), dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32")
    ours = load_target(tmp_path / "target")
    want, got = theirs.state_dict(), ours.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name
    stated, read = theirs.config.to_dict(), ours.config.to_dict()
    assert stated.pop("rms_norm_eps") == pytest.approx(read["rms_norm_eps"], rel=1e-6)
    differ = {key for key, value in stated.items() if read.get(key) != value}
    assert differ <= NOT_OF_THE_MODEL


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
    assert sum(one.rounded for one in written.stored.values()) == (
        rounded if dtype == "bf16" else 0
    )


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
