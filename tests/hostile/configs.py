"""Configurations of targets and drafts, indexes of shards, and what names a pair."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tests.hostile.case import HostileCase, draw_readers
from tests.hostile.values import changed, encode, odd_value, spoil_json

COUNT = 260
_ROPE = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("attention_factor", "long_factor", "short_factor", "partial_rotary_factor", "truncate"),
)
_KINDS = ("llama3", "yarn", "linear", "dynamic", "longrope", "default", "none")
_TOP = (
    *("rope_scaling", "rope_parameters", "quantization_config", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "attention_bias", "tie_word_embeddings"),
    *("hidden_act", "eos_token_id", "bos_token_id", "pad_token_id", "num_experts", "model_type"),
    *("num_experts_per_tok", "moe_intermediate_size", "num_local_experts", "norm_topk_prob"),
    *("mlp_only_layers", "decoder_sparse_step", "swiglu_limit", "block_size", "num_target_layers"),
)
_INNER = ("causal", "use_swa", "swa_window_size", "projector_type", "attention_sink_bias")
_QUANTIZED = (
    {"quant_method": "fp8", "weight_block_size": [0, 0]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["(a+)+$"] * 50},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 0},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:(a+)+$"]}}},
    {"quant_method": "gptq", "bits": 10**30},
    {"quant_method": ["fp8"]},
)
_INDEX = "model.safetensors.index.json"
_FILES = (
    *("target/config.json", "draft/config.json") * 3,
    *("target/index", "target/hf_quant_config.json", "draft/hf_quant_config.json"),
)


def make(random: Random, number: int) -> HostileCase:
    """One file of JSON changed in its values, or in its text."""
    name = random.choice(_FILES)

    def damage(folder: Path) -> None:
        owner = folder / "pair" / name.split("/")[0]
        if name.endswith("/index"):
            _write_index(random, owner)
        elif name.endswith("hf_quant_config.json"):
            document = {"quantization": random.choice(_QUANTIZED), "producer": {"name": "modelopt"}}
            (owner / Path(name).name).write_bytes(encode(changed(random, document, ("x",))))
        else:
            path = folder / "pair" / name
            path.write_bytes(_damaged(random, path.read_bytes()))

    return HostileCase(name, ("pair",), damage, draw_readers(random))


def _damaged(random: Random, data: bytes) -> bytes:
    document = json.loads(data)
    way = random.randrange(8)
    if way == 0:
        return spoil_json(random, data)
    if way <= 2:
        scaling = {random.choice(_ROPE): odd_value(random, 1) for _ in range(4)}
        scaling |= {random.choice(("rope_type", "type")): random.choice(_KINDS), "factor": 8.0}
        scaling |= {random.choice(_ROPE): random.choice((1e-300, 5e-324, 1e300, 0, -1, 0.5))}
        document[random.choice(("rope_scaling", "rope_parameters"))] = scaling
        return encode(document)
    if way == 3:
        quantized = random.choice(_QUANTIZED)
        document["quantization_config"] = changed(random, quantized, ("weight_block_size", "x"))
        return encode(document)
    if way == 4 and "dflash_config" in document:
        inner = document["dflash_config"]
        document["dflash_config"] = changed(random, inner, _INNER)
        return encode(document)
    if way == 5:
        sizes = [key for key, value in document.items() if isinstance(value, int)]
        for key in random.sample(sizes, 2):
            document[key] = random.choice((1, 2, 4, 1024, 65_536, 2**20, 2**31 - 1, 2**31, 0))
        return encode(document)
    return encode(changed(random, document, _TOP))


def _write_index(random: Random, owner: Path) -> None:
    (owner / "model.safetensors").rename(owner / "part-1.safetensors")
    data = (owner / "part-1.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    shard = random.choice(("part-1.safetensors",) * 3 + ("../draft/model.safetensors", "", "\0"))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(header, shard)}
    document = encode(changed(random, index, ("weight_map",)))
    spoilt = spoil_json(random, document) if random.random() < 0.3 else document
    (owner / _INDEX).write_bytes(spoilt)
