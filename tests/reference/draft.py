"""The DFlash drafter in plain PyTorch, written from the checkpoint contract alone.

Shapes: B sequences, T context rows, S block slots, H hidden, Hq/Hkv heads, D head size,
V vocabulary, n tapped layers. Everything runs in one compute dtype (float32 unless asked),
whatever the storage dtype. Attention is dense: softmax(Q K^T / sqrt(D) + mask) V.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What the drafter's config.json says, defaults resolved."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    rope: dict[str, Any]

    @classmethod
    def read(cls, folder: str | Path) -> DraftConfig:
        """From `folder`/config.json of a draft without causality, `use_swa` and sinks."""
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        dflash = raw["dflash_config"]
        layers = raw["num_hidden_layers"]
        ids = dflash.get("target_layer_ids")
        types = raw.get("layer_types") or ["full_attention"] * layers
        window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
        rope = raw.get("rope_parameters")
        if rope is None:
            scaling = raw.get("rope_scaling") or {"rope_type": "default"}
            rope = {"rope_theta": raw["rope_theta"]} | scaling
        return cls(
            layers=layers,
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            eps=raw["rms_norm_eps"],
            block_size=(dflash | raw)["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(
                ids if ids is not None else default_layer_ids(raw["num_target_layers"], layers)
            ),
            windows=tuple(window if t == "sliding_attention" else None for t in types),
            rope=rope,
        )


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One block through the drafter.

    ids [B, S]: column 0 the anchor, then the argmax of slots 1..S-1.
    logits [B, S, V]: row j predicts the token at position start + j; row 0 is unused.
    block_kv: each layer's own key (normed, rotated) and value of the block, [B, Hkv, S, D].
    final_hidden [B, S, H]: after `norm`, before the lm_head.
    """

    ids: Tensor
    logits: Tensor
    block_kv: list[KeyValue]
    final_hidden: Tensor


class ReferenceDraft:
    """A loaded drafter with the embedding and lm_head of its target."""

    def __init__(
        self, config: DraftConfig, weights: dict[str, Tensor], embed: Tensor, lm_head: Tensor
    ) -> None:
        """`embed` and `lm_head` [V, H]; all tensors in the compute dtype."""
        self.config = config
        self.weights = weights
        self.embed = embed
        self.lm_head = lm_head
        self.inv_freq = inverse_frequencies(config.rope, config.head_dim)
        is_yarn = config.rope.get("rope_type") == "yarn"
        self.gain = 0.1 * math.log(config.rope["factor"]) + 1 if is_yarn else 1.0

    @classmethod
    def load(
        cls, folder: str | Path, target: Any, dtype: torch.dtype = torch.float32
    ) -> ReferenceDraft:
        """From a draft folder; `target` is a transformers causal LM. Computes in `dtype`."""
        config = DraftConfig.read(folder)
        weights = {name: tensor.to(dtype) for name, tensor in load_tensors(folder).items()}
        # Looked up: a Gemma's table is scaled on the way.
        module = target.get_input_embeddings()
        embed = module(torch.arange(module.num_embeddings)).detach().to(dtype)
        lm_head = target.get_output_embeddings().weight.detach().to(dtype)
        return cls(config, weights, embed, lm_head)

    def project(self, features: Tensor) -> list[KeyValue]:
        """Context key and value of every layer from tapped features.

        features [B, T, n*H], the rows of positions 0..T-1, taps in the order of
        `target_layer_ids`. Returns per layer k [B, Hkv, T, D] (normed, rotated) and v, same.
        """
        fused = self._norm(self._linear(features.to(self.embed.dtype), "fc"), "hidden_norm")
        return [self._key_value(i, fused, 0) for i in range(self.config.layers)]

    def draft(
        self,
        anchors: Tensor,
        start: int,
        context: Sequence[KeyValue],
        block_size: int | None = None,
    ) -> DraftOutput:
        """Drafts one block per sequence: slots at positions start..start+S-1.

        anchors [B]: each sequence's clean token at position `start`. context: per layer k, v
        [B, Hkv, start, D], the rows of positions 0..start-1. S is `block_size` or the trained.
        """
        slots = self.config.block_size if block_size is None else block_size
        block = torch.full((anchors.shape[0], slots), self.config.mask_token_id)
        block[:, 0] = anchors
        x = self.embed[block]
        block_kv: list[KeyValue] = []
        for i in range(self.config.layers):
            assert context[i][0].shape[2] == start
            prefix = f"layers.{i}."
            normed = self._norm(x, prefix + "input_layernorm")
            normed, finish = self._around(normed, prefix + "attention_conv")
            query = self._heads(self._linear(normed, prefix + "self_attn.q_proj"))
            query = self._rotate(self._norm(query, prefix + "self_attn.q_norm"), start)
            block_kv.append(self._key_value(i, normed, start))
            key = torch.cat([context[i][0], block_kv[i][0]], dim=2)
            value = torch.cat([context[i][1], block_kv[i][1]], dim=2)
            attended = self._attend(query, key, value, start, self.config.windows[i])
            x = x + finish(self._linear(attended, prefix + "self_attn.o_proj"))
            normed = self._norm(x, prefix + "post_attention_layernorm")
            normed, finish = self._around(normed, prefix + "mlp_conv")
            gate = self._linear(normed, prefix + "mlp.gate_proj")
            up = self._linear(normed, prefix + "mlp.up_proj")
            x = x + finish(self._linear(gate * torch.sigmoid(gate) * up, prefix + "mlp.down_proj"))
        final_hidden = self._norm(x, "norm")
        logits = final_hidden @ self.lm_head.T
        ids = logits.argmax(-1)
        ids[:, 0] = anchors
        return DraftOutput(ids, logits, block_kv, final_hidden)

    def _around(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What a sublayer reads of x [B, S, H], and what becomes of its output."""
        return x, lambda output: output

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last axis."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps)
        return self.weights[name + ".weight"] * (x * scale)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, heads*D] to [B, heads, T, D]."""
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim).transpose(1, 2)

    def _key_value(self, layer: int, x: Tensor, start: int) -> KeyValue:
        """Key (normed, rotated) and value [B, Hkv, T, D] of rows x [B, T, H] at `start`."""
        prefix = f"layers.{layer}.self_attn."
        key = self._norm(self._heads(self._linear(x, prefix + "k_proj")), prefix + "k_norm")
        return self._rotate(key, start), self._heads(self._linear(x, prefix + "v_proj"))

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """RoPE, halves convention, of x [B, heads, T, D] whose first row is at `start`."""
        positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq).repeat(1, 2)
        cos, sin = (self.gain * turned.to(x.dtype) for turned in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, window: int | None
    ) -> Tensor:
        """Non-causal attention; query [B, Hq, S, D], key and value [B, Hkv, start+S, D].

        Query head h reads key head h // (Hq // Hkv). With a window w, the query at position p
        sees the keys j with |p - j| < w, context and block alike. Returns [B, S, Hq*D].
        """
        group = self.config.heads // self.config.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(2, 3) / math.sqrt(self.config.head_dim)
        if window is not None:
            p = torch.arange(start, start + query.shape[2])[:, None]
            j = torch.arange(key.shape[2])[None, :]
            mask = torch.zeros(p.shape[0], j.shape[1], dtype=scores.dtype)
            scores = scores + mask.masked_fill((p - j).abs() >= window, -torch.inf)
        return (torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(2)


def load_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by name."""
    return {
        name: tensor
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """`target_layer_ids` of a config that leaves them out: round(1 + i*(N-4)/(L-1))."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """RoPE inverse frequencies [D/2], float32, for rope types default, llama3 and yarn."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base: Tensor = 1.0 / rope["rope_theta"] ** exponents
    if kind == "default":
        return base
    if kind == "yarn":
        return _yarn(rope, head_dim, base)
    assert kind == "llama3"
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    # Turns over the original context: few turns are slowed down by `factor`, many are kept,
    # those between are blended linearly.
    turns = rope["original_max_position_embeddings"] * base / (2 * math.pi)
    blend: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    slowed: Tensor = (1.0 - blend) * base / factor
    return slowed + blend * base


def _yarn(rope: dict[str, Any], head_dim: int, base: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn often in the original context keep their pace.

    The ramp between `beta_fast` and `beta_slow` turns goes over pairs, its ends whole ones.
    """
    original = rope["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        """Where a pair that turns so often in the original context would lie."""
        wavelength = original / (turns * 2 * math.pi)
        return head_dim / 2 * math.log(wavelength) / math.log(rope["rope_theta"])

    low = max(math.floor(pair_of(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_of(rope["beta_slow"])), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return base * (1.0 - slowed) + base / rope["factor"] * slowed
