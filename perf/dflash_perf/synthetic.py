"""Checkpoints of any shape without trained weights, for measuring cost alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
_CHUNK = 1 << 24
_EXCLUDED = ("lm_head", "model.embed_tokens", "fc")
_SCALE = 0.01

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name → (safetensors code, shape)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 target and its draft; both share hidden size, heads and head size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_layers: int
    taps: tuple[int, ...]
    block_size: int
    max_positions: int


def write_pair(
    folder: Path, shape: Shape, *, dtype: str, random: bool, is_nvfp4: bool = False
) -> int:
    """Writes `folder`/target and `folder`/draft; returns the bytes of weights.

    Args:
        dtype: safetensors code, "F32" or "BF16".
        random: False leaves the data as a hole in the file, which takes no disk; True writes
            small random weights of that type.
        is_nvfp4: store the layers' linears as ModelOpt does in NVFP4, the rest in `dtype`.
    """
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    decoder = {
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "self_attn.q_proj": (heads, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, heads),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    target = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocab, shape.hidden),
    } | _layers("model.layers", shape.layers, decoder)
    draft = {
        "fc.weight": (shape.hidden, shape.hidden * len(shape.taps)),
        "hidden_norm.weight": (shape.hidden,),
        "norm.weight": (shape.hidden,),
    } | _layers("layers", shape.draft_layers, decoder)
    common = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": shape.max_positions,
    }
    target_config = common | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": shape.layers,
        "tie_word_embeddings": False,
    }
    draft_config = common | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": shape.draft_layers,
        "num_target_layers": shape.layers,
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.vocab - 1, "target_layer_ids": list(shape.taps)},
    }
    if is_nvfp4:
        stated = {"quant_algo": "NVFP4", "group_size": 16, "ignore": list(_EXCLUDED)}
        common = {"quantization_config": {"quant_method": "modelopt", **stated}}
    else:
        common = {}
    size = 0
    for name, shapes, config in (
        ("target", target, target_config),
        ("draft", draft, draft_config),
    ):
        tensors = {key: (dtype, one) for key, one in shapes.items()}
        tensors = _quantize(tensors) if is_nvfp4 else tensors
        size += _write(folder / name, tensors, config | common, random)
    return size


def _layers(
    prefix: str, count: int, decoder: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{layer}.{name}.weight": shape
        for layer in range(count)
        for name, shape in decoder.items()
    }


def _quantize(tensors: Tensors) -> Tensors:
    """ModelOpt's NVFP4 layout of the same weights."""
    quantized: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if len(shape) == 1 or module in _EXCLUDED:
            quantized[name] = dtype, shape
            continue
        rows, columns = shape
        quantized[name] = "U8", (rows, columns // 2)
        quantized[f"{module}.weight_scale"] = "F8_E4M3", (rows, columns // 16)
        quantized[f"{module}.weight_scale_2"] = quantized[f"{module}.input_scale"] = "F32", ()
    return quantized


def encode_header(tensors: Tensors) -> tuple[bytes, int]:
    """What a .safetensors file of `tensors` begins with, and how many bytes of data follow."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        length = math.prod(shape) * _ITEM_BYTES[dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, offset


def _write(folder: Path, tensors: Tensors, config: dict[str, object], random: bool) -> int:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    encoded, size = encode_header(tensors)
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(encoded)
        # Scales are read when a checkpoint is opened; they have their value in a hole as well.
        for dtype, shape in tensors.values():
            if random or not shape:
                for left in range(math.prod(shape), 0, -_CHUNK):
                    file.write(_random_bytes(generator, dtype, shape, min(left, _CHUNK)))
            else:
                file.seek(math.prod(shape) * _ITEM_BYTES[dtype], 1)
        file.truncate(len(encoded) + size)
    return size


def _random_bytes(
    generator: np.random.Generator, dtype: str, shape: tuple[int, ...], count: int
) -> bytes:
    """`count` elements of a tensor: small weights, norms about 1, one value for every scale."""
    if not shape:
        return np.float32(_SCALE).tobytes()
    if dtype == "U8":  # any byte is two codes
        return generator.bytes(count)
    if dtype == "F8_E4M3":  # from 1/16 to 7.5
        return generator.integers(0x18, 0x50, count, np.uint8).tobytes()
    values = generator.standard_normal(count, np.float32) * np.float32(0.1)
    return _encode(values + np.float32(len(shape) == 1), dtype)


def _encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Finite `values` as `dtype` stores them; BF16 rounds to the nearest, ties to even."""
    if dtype == "F32":
        return values.tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
