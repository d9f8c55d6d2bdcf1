"""GGUF files of tiny models, written by the package gguf from Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from dflash_trt.models.safetensors_header import read_header
from tests.models.conftest import DTYPES
from tests.text.tokenizers import make_byte_level

VOCAB = make_byte_level().get_vocab_size()
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

# Written out apart from the importer's own table.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

Array = npt.NDArray[Any]


def read_arrays(checkpoint: Path) -> dict[str, Array]:
    """Every tensor of a checkpoint's one file, as float32."""
    arrays: dict[str, Array] = {}
    for name, entry in read_header(checkpoint / "model.safetensors").items():
        stored = np.frombuffer(b"".join(entry.pieces(1 << 24)), DTYPES[entry.dtype])
        arrays[name] = stored.reshape(entry.shape).astype(np.float32)
    return arrays


def gguf_tensors(arrays: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """A checkpoint's arrays under llama.cpp's names, in its order of rows."""
    tensors: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, array in sorted(arrays.items()):
        if config["model_type"] == "gemma3_text":
            array = array + np.float32("norm.weight" in name)
            name = name.replace("post_attention_layernorm", "post_attention_norm")
        if name in _NAMES:
            tensors[_NAMES[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        if part.startswith("mlp.experts."):
            matrix = part.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{matrix}_exps.{kind}", []).append(array)
            continue
        if config["model_type"] == "llama" and part[-6:] in ("q_proj", "k_proj"):
            array = turn(array, heads[part[-6]])
        tensors[f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"] = array
    return tensors | {name: np.stack(parts) for name, parts in experts.items()}


def turn(array: Array, heads: int) -> Array:
    """Rows of q or k as llama.cpp orders them: the halves of each head alternate."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json in llama.cpp's words, without the architecture before them."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    if rope is not ropes:
        keys |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": config["layer_types"].index("full_attention") + 1,
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        }
    if "moe_intermediate_size" in config:
        keys |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return keys


def tokenizer_keys(tokenizer: Tokenizer | None = None, pre: str = "gpt-2") -> dict[str, Any]:
    """The keys of a tokenizer, without "tokenizer." before them."""
    core = json.loads((tokenizer or make_byte_level()).to_str())
    ids = (tokenizer or make_byte_level()).get_vocab()
    kinds = dict.fromkeys(ids, 1)
    for added in core["added_tokens"]:
        kinds[added["content"]] = CONTROL if added["special"] else USER_DEFINED
    tokens = sorted(ids, key=lambda token: ids[token])
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [kinds[token] for token in tokens],
        "ggml.merges": [" ".join(merge) for merge in core["model"]["merges"]],
        "ggml.eos_token_id": ids["<|end|>"],
    }


def write_gguf(
    path: Path,
    checkpoint: Path,
    kind: Kind = Kind.F32,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
) -> Path:
    """Writes the model in the folder `checkpoint`; matrices as `kind`, vectors as F32.

    `keys` and `tensors` add to the file's or replace them; None drops one.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    name = config["model_type"].removesuffix("_text").replace("3_moe", "3moe")
    fields = {f"{name}.{key}": value for key, value in model_keys(config).items()}
    fields |= {f"tokenizer.{key}": value for key, value in tokenizer_keys().items()}
    fields |= dict(keys or {})
    arrays: dict[str, Array | None] = {**gguf_tensors(read_arrays(checkpoint), config)}
    arrays |= dict(tensors or {})
    writer = gguf.GGUFWriter(path, name)
    for key, value in fields.items():
        _add(writer, key, value)
    for tensor, array in arrays.items():
        if array is None:
            continue
        if array.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(tensor, array)
        else:
            writer.add_tensor(tensor, encode(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(array: Array, kind: Kind) -> Array:
    """An array's blocks; of types that the package does not write, others of random codes."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        pass
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 256, (array.size // elements, size), np.uint8)
    # Whatever two bytes are a half-precision scale, these are small and finite.
    blocks[:, 1::2] = blocks[:, 1::2] & 0x2F
    blocks[:, 0::2] = blocks[:, 0::2] & 0x2F
    return blocks.reshape(*array.shape[:-1], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        if key != "general.architecture":  # which the writer has written
            writer.add_string(key, value)
    else:
        writer.add_array(key, value)
