"""Random tiny checkpoints, written as Hugging Face folders.

Weights are normal with std = 1 / sqrt(fan_in), so activations keep their size at any width; norm
weights are uniform in [0.5, 1.5]; biases are non-zero. A folder depends on its arguments only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models.conftest import draft_shapes

from .families import (
    YARN_SCALING,
    make_gemma4,
    make_hybrid,
    make_moe,
    pack_experts,
    publish_gemma4,
    publish_hybrid,
    sighted_gemma3,
)

Family = Literal[
    "qwen3",
    "llama",
    "qwen2",
    "mistral",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
]
Storage = Literal["float32", "bfloat16", "float16"]
Rope = Literal["default", "linear", "llama3", "yarn", "yarn64"]
RopeStyle = Literal["rope_theta", "rope_parameters"]

# Llama 3.1's own factors, with an original context so short that tiny tests run past it.
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# A published draft's of Qwen3.5-35B-A3B, for which 4096 positions are the original context.
YARN64_SCALING: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[Rope, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},  # Gemma 3's from 4B on
    "llama3": LLAMA3_SCALING,
    "yarn": YARN_SCALING,
    "yarn64": YARN64_SCALING,
}


def write_target(
    folder: str | Path,
    family: Family = "qwen3",
    dtype: Storage = "float32",
    *,
    num_layers: int = 6,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = 256,
    tie: bool = False,
    attention_bias: bool = False,
    rope: Rope = "default",
    rope_style: RopeStyle = "rope_parameters",
    rope_theta: float = 10_000.0,
    max_positions: int = 2048,
    eos_token_id: int | list[int] | None = None,
    shards: int = 1,
    logit_gain: float = 3.0,
    seed: int = 0,
    experts: int = 8,
    chosen: int = 3,
    window: int | None = 24,
    normalized: bool = True,
    mxfp4: bool = False,
    linear: Sequence[int] = (2, 4, 16),
    vision: bool = False,
    shared: int = 48,
    separate: bool = False,
    keys_are_values: bool = True,
    alone: bool = False,
) -> Path:
    """Writes a random `family` target; returns its folder.

    `attention_bias` gives q, k, v and o_proj a bias. `rope_style` chooses between the keys of
    transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`,
    `dtype`). `shards` > 1 writes at least two files and an index. `logit_gain` scales the lm_head,
    which a tied embedding shares. `window` is that of gpt-oss, Mistral and the upper half of a
    Qwen2. The others are for mixtures of experts, whose MLPs are `intermediate` wide; `mxfp4`
    packs gpt-oss's experts. `linear` are a Qwen3.5's key heads, value heads and their size. Its
    experts lie in two tensors, as published, or `separate`, as transformers writes them again;
    `shared` is the width of the one that all rows share. With `vision` it lies as published, in a
    model that sees, beside tensors of that and of its MTP. `keys_are_values` is of a Gemma 4's
    full layers; of its mixtures `shared` is the MLP's width. `alone` is its text model, as
    transformers writes it. A Gemma 3 sees with `vision`.
    """
    folder = Path(folder)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "rope_parameters": _rope_parameters(rope, rope_theta),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    model: Any
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common))
    elif family == "qwen2":
        # Its configs state neither a head size nor whether there are biases.
        own = {key: common[key] for key in common.keys() - {"head_dim", "attention_bias"}}
        slides = {"sliding_window": window, "max_window_layers": num_layers // 2}
        model = Qwen2ForCausalLM(Qwen2Config(**own, **slides, use_sliding_window=bool(window)))
    elif family == "mistral":
        own = {key: common[key] for key in common.keys() - {"attention_bias"}}
        model = MistralForCausalLM(MistralConfig(**own, sliding_window=window))
    elif family == "gemma3":
        text = _gemma_config(common, window)
        model = sighted_gemma3(text) if vision else Gemma3ForCausalLM(text)
    elif family in ("gemma4", "gemma4_moe"):
        mixture = (experts, chosen, shared) if family == "gemma4_moe" else None
        model = make_gemma4(
            common, window, keys_are_values=keys_are_values, experts=mixture, alone=alone
        )
    elif family == "qwen3_5":
        model = make_hybrid(common, linear, vision=vision)
    elif family == "qwen3_5_moe":
        model = make_hybrid(common, linear, vision=vision, experts=(experts, chosen, shared))
    else:
        model = make_moe(family, common, experts, chosen, window=window, normalized=normalized)

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, parameter.shape, generator, logit_gain))
    model = model.to(getattr(torch, dtype))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(
        folder,
        max_shard_size=-(-total // shards) if shards > 1 else "5GB",
        save_original_format=family != "qwen3_5_moe" or separate,
    )
    assert shards == 1 or (folder / "model.safetensors.index.json").exists()

    config = _read_json(folder / "config.json")
    if family in ("qwen3_5", "qwen3_5_moe"):
        publish_hybrid(folder, config, dtype, generator)
        return folder
    if alone:
        return folder
    if family in ("gemma4", "gemma4_moe"):
        publish_gemma4(folder, config, dtype)
        return folder
    for key in ("rope_parameters", "rope_theta", "rope_scaling", "dtype", "torch_dtype"):
        config.get("text_config", config).pop(key, None)
    keys = _gemma_rope_keys if family == "gemma3" else _rope_keys
    config.get("text_config", config).update(keys(rope, rope_theta, rope_style))
    config["torch_dtype" if rope_style == "rope_theta" else "dtype"] = dtype
    _write_json(folder / "config.json", config)
    if mxfp4:
        pack_experts(folder)
    return folder


def write_draft(
    folder: str | Path,
    target: str | Path,
    *,
    num_layers: int = 2,
    block_size: int = 8,
    block_size_place: Literal["top", "dflash_config"] = "top",
    target_layer_ids: Sequence[int] | None = None,
    layer_types: Sequence[Literal["full_attention", "sliding_attention"]] | None = None,
    sliding_window: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate: int | None = None,
    rope: Rope = "default",
    rope_style: RopeStyle = "rope_theta",
    rope_theta: float = 10_000.0,
    dtype: Storage = "float32",
    mask_token_id: int | None = None,
    seed: int = 1,
) -> Path:
    """Writes a random DFlash draft in the z-lab format for the target in folder `target`.

    Hidden size, vocabulary and layer count are the target's; heads, head size and feed-forward
    width are too unless given. `target_layer_ids=None` leaves the key out (the reader applies
    the default formula). `mask_token_id` defaults to the vocabulary's last id.
    """
    folder = Path(folder)
    base = _read_json(Path(target) / "config.json")
    base |= base.get("text_config", {})
    hidden, vocab, depth = base["hidden_size"], base["vocab_size"], base["num_hidden_layers"]
    heads = heads or base["num_attention_heads"]
    kv_heads = kv_heads or base["num_key_value_heads"]
    head_dim = head_dim or base.get("head_dim") or hidden // base["num_attention_heads"]
    intermediate = intermediate or base.get("intermediate_size") or base["moe_intermediate_size"]
    types = list(layer_types) if layer_types is not None else ["full_attention"] * num_layers
    taps = num_layers if target_layer_ids is None else len(target_layer_ids)

    mask = vocab - 1 if mask_token_id is None else mask_token_id
    dflash: dict[str, Any] = {"mask_token_id": mask}
    if target_layer_ids is not None:
        dflash["target_layer_ids"] = [int(i) for i in target_layer_ids]
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": depth,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": base["max_position_embeddings"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": types,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "torch_dtype": dtype,
        "dflash_config": dflash,
    } | _rope_keys(rope, rope_theta, rope_style)
    (config if block_size_place == "top" else dflash)["block_size"] = block_size
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in draft_shapes(config, taps).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    return folder


def _random(
    name: str, shape: Sequence[int], generator: torch.Generator, logit_gain: float = 1.0
) -> torch.Tensor:
    """A float32 tensor for the parameter `name`: norms, biases and matrices differ."""
    if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "scale")):
        return torch.rand(list(shape), generator=generator) + 0.5
    values = torch.randn(list(shape), generator=generator)
    if name.endswith("bias"):
        return values * 0.2
    if name.endswith(("sinks", "A_log", "dt_bias")):
        return values
    # A tied embedding is the lm_head too, so it takes the lm_head's scale, tied or not.
    scale = logit_gain if "lm_head" in name or "embed_tokens" in name else 1.0
    return values * (scale / math.sqrt(shape[-1]))


def _gemma_config(common: dict[str, Any], window: int | None) -> Any:
    """Queries scaled by other than their head size, as the 27B's; every third layer is full."""
    own = {
        "sliding_window": window,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 21,
        "rope_parameters": _gemma_rope_keys("default", 10_000.0, "rope_parameters")[
            "rope_parameters"
        ],
    }
    return Gemma3TextConfig(**(common | own))


def _gemma_rope_keys(rope: Rope, theta: float, style: RopeStyle) -> dict[str, Any]:
    """The layers that slide turn faster; `rope` is of the others."""
    if style == "rope_theta":
        return {"rope_local_base_freq": theta / 100, **_rope_keys(rope, theta, style)}
    kinds = {
        "full_attention": _rope_parameters(rope, theta),
        "sliding_attention": _rope_parameters("default", theta / 100),
    }
    return {"rope_parameters": kinds}


def _rope_parameters(rope: Rope, theta: float) -> dict[str, Any]:
    """transformers 5's `rope_parameters` value."""
    return {"rope_theta": theta} | SCALINGS.get(rope, {"rope_type": "default"})


def _rope_keys(rope: Rope, theta: float, style: RopeStyle) -> dict[str, Any]:
    """The config.json keys that say `rope` in the given style."""
    if style == "rope_parameters":
        return {"rope_parameters": _rope_parameters(rope, theta)}
    return {"rope_theta": theta, "rope_scaling": SCALINGS.get(rope)}


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
