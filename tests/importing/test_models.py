"""An imported target computes what the original does in transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from dflash_trt.building.gguf.config import make_config
from dflash_trt.building.gguf.gguf_file import read_gguf
from dflash_trt.building.gguf.importer import import_gguf
from dflash_trt.building.spec import BuildSpec
from dflash_trt.core.progress import SilentProgress
from dflash_trt.graph.bindings import LOGITS
from tests.graph.runner import BOUND, GraphRunner, tokens
from tests.importing.files import VOCAB, Array, write_gguf
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
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}
BY_KIND = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
KEYS = [(YARN, YARN_KEYS), (BY_KIND, LINEAR_KEYS), (LINEAR, {"rope.scaling.factor": 8.0})]
"""What llama.cpp takes for linear where a file names no type."""


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
    own = {"query_pre_attn_scalar": options["head_dim"]}  # which no GGUF file says
    own |= {"rope_parameters": rope} if rope else {}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | own))
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
        ("gemma3", None),
        ("gemma3", BY_KIND),
        ("llama", LINEAR),
    ],
    ids="llama qwen3 llama3-factors yarn qwen3_moe qwen2 gemma3 gemma3-linear linear".split(),
)
def test_logits_of_a_bundle_equal_those_of_the_original_in_transformers(
    family: Any, rope: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", family, rope)
    file = write_gguf(
        tmp_path / "model.gguf",
        source,
        Kind.BF16,
        keys={
            f"{family}.{key}": value
            for stated, keys in KEYS
            if rope is stated
            for key, value in keys.items()
        },
        tensors={"rope_freqs.weight": llama3_factors(32)} if rope is LLAMA3 else {},
    )
    imported = import_gguf(file, tmp_path / "target", SilentProgress())
    assert not imported.rounded
    write_draft(tmp_path / "draft", tmp_path / "target", target_layer_ids=[0, 2])
    built = bundle_pair(tmp_path, BuildSpec())
    ids = tokens(VOCAB, 1, LENGTH)
    got = GraphRunner(built).target(ids, [0])[LOGITS]
    with torch.no_grad():
        want = load_target(source)(torch.tensor(ids)).logits
    assert max_relative_error(got, want) <= BOUND
    assert built.pair.target.eos_token_ids == imported.vocabulary.ends


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3"])
def test_weights_and_config_are_those_that_transformers_reads_from_the_same_file(
    family: Any, tmp_path: Path
) -> None:
    """transformers' own reader of GGUF, which knows nothing of ours, is the judge."""
    # transformers 5.23 leaves out these sizes, and takes its own defaults.
    sizes = {"qwen3": {"head_dim": 128}, "qwen3_moe": {"intermediate": 768}}
    sizes["gemma3"] = dict.fromkeys(("head_dim", "hidden", "intermediate"), 256)
    source = make_source(tmp_path / "source", family, **sizes.get(family, {}))
    kind = Kind.Q4_K if family == "gemma3" else Kind.Q8_0
    file = write_gguf(tmp_path / "model.gguf", source, kind)
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
    # Neither what slides nor the second RoPE, which newer files state.
    own = {"layer_types", "rope_parameters"} if family == "gemma3" else set()
    assert differ <= NOT_OF_THE_MODEL | own


def test_queries_of_a_27b_have_a_scale_of_their_own(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "gemma3", hidden=64)
    file = write_gguf(tmp_path / "m.gguf", source, keys={"gemma3.block_count": 62})
    assert make_config(read_gguf(file), "float32").values["query_pre_attn_scalar"] == 64 // 4
