"""An output head above 1 GiB in float32, where ONNX Runtime's constant folding stops by default.

Unfolded, its bfloat16 weights are widened in every run, and the product then takes kernels
whose rounding depends on the number of rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.base import Executor, FloatArray, Scores, TargetCall
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import BuildConfig
from tests.pairs import SilentProgress
from tests.reference.checkpoints import write_draft
from tests.reference.compare import assert_bitwise_equal

VOCAB, HIDDEN, HEAD_DIM, INTERMEDIATE = 131_200, 2048, 64, 32
ROWS, BATCH = 8, 3
CHUNK = 2**24
NEEDED_GIB = 8


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) / 2**20


def write_target(folder: Path) -> None:
    """A Qwen3 of one thin layer, its tied embedding VOCAB × HIDDEN of random bfloat16."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEAD_DIM),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    } | {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    folder.mkdir()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            for left in range(math.prod(shape), 0, -CHUNK):
                bits = generator.integers(0, 2**16, min(left, CHUNK), np.uint16)
                # Random sign and mantissa, magnitudes from 2^-7 to 2^-5; norms are 1.
                bits = bits & 0x80FF | 0x3C00 if len(shape) == 2 else np.full_like(bits, 0x3F80)
                file.write(bits.astype("<u2").tobytes())
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of free memory, {available_gib():.1f} are there")
    write_target(tmp_path / "target")
    try:
        write_draft(
            tmp_path / "draft",
            tmp_path / "target",
            num_layers=1,
            target_layer_ids=[0],
            block_size=ROWS,
            dtype="bfloat16",
        )
        pair = check_pair(read_target(tmp_path / "target"), read_draft(tmp_path / "draft"))
        config = BuildConfig.model_validate(
            {
                "description": "a large head",
                "target": {"checkpoint": "target"},
                "draft": {"checkpoint": "draft"},
                "max_seq_len": 128,
                "max_batch": BATCH,
            }
        )
        folder = tmp_path / "bundle"
        build_bundle(pair, config, "large", folder, BuildOptions(), SilentProgress())
        opened = open_executor(open_bundle(folder), threads=1)
        yield opened
        opened.close()
    finally:
        (tmp_path / "target" / "model.safetensors").unlink()


def forward(executor: Executor, ids: np.ndarray, start: int, picked: list[int]) -> FloatArray:
    """Logits [B,R,V] after the rows `picked` of ids [B,S]."""
    rows = np.tile(picked, (len(ids), 1))
    starts = np.full(len(ids), start)
    logits = executor.forward(TargetCall("target_only", 0, ids, starts, rows, Scores.LOGITS)).logits
    assert logits is not None
    return logits.copy()


def test_a_heads_logits_keep_their_bits_above_1_gib(executor: Executor) -> None:
    """At 1 and 8 rows, alone and between neighbours."""
    assert VOCAB * HIDDEN * 4 > 2**30
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, ROWS))
    alone, every, last = ids[:1], list(range(ROWS)), ROWS - 1
    expected = np.stack([forward(executor, alone[:, [row]], row, [0])[0, 0] for row in every])
    assert expected.std() > 0.1
    assert_bitwise_equal(forward(executor, alone, 0, every)[0], expected, "8 rows")
    assert_bitwise_equal(forward(executor, alone, 0, [last])[0, 0], expected[last], "the last of 8")
    assert_bitwise_equal(forward(executor, ids, 0, [last])[0, 0], expected[last], "3 sequences")
    one = forward(executor, ids[:, [last]], last, [0])[0, 0]
    assert_bitwise_equal(one, expected[last], "1 row of 3 sequences")
