"""An MTP layer in plain PyTorch, all rows anew at every step, and the tensors of one.

Row i takes the embedding of token i + 1 and the target's output at position i, behind its last
norm; its own normed output predicts token i + 2 and is the next row's (arXiv 2412.19437, 2.2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu, softmax

from .draft import load_tensors


def write_mtp(folder: Path, seed: int = 5, *, separate: bool = False) -> Path:
    """Gives the Qwen3.5 in `folder`, of one file, a random layer; a mixture one with experts."""
    config = _text_config(folder)
    hidden, heads, size = (config[k] for k in ("hidden_size", "num_attention_heads", "head_dim"))
    keys = config["num_key_value_heads"] * size
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    def norm(width: int = hidden) -> Tensor:
        return torch.rand(width, generator=generator) - 0.5

    def mlp(width: int) -> dict[str, Tensor]:
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
        shapes["down_proj"] = (hidden, width)
        return {f"{name}.weight": matrix(*shape) for name, shape in shapes.items()}

    layer = {
        "input_layernorm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
        "self_attn.q_proj.weight": matrix(2 * heads * size, hidden),
        "self_attn.k_proj.weight": matrix(keys, hidden),
        "self_attn.v_proj.weight": matrix(keys, hidden),
        "self_attn.o_proj.weight": matrix(hidden, heads * size),
        "self_attn.q_norm.weight": norm(size),
        "self_attn.k_norm.weight": norm(size),
    }
    if "num_experts" not in config:
        layer |= {f"mlp.{name}": one for name, one in mlp(config["intermediate_size"]).items()}
    else:
        count, width = config["num_experts"], config["moe_intermediate_size"]
        shared = mlp(config["shared_expert_intermediate_size"])
        layer |= {f"mlp.shared_expert.{name}": one for name, one in shared.items()}
        layer["mlp.shared_expert_gate.weight"] = matrix(1, hidden)
        layer["mlp.gate.weight"] = matrix(count, hidden)
        experts = [mlp(width) for _ in range(count)]
        for at, expert in enumerate(experts if separate else ()):
            layer |= {f"mlp.experts.{at}.{name}": one for name, one in expert.items()}
        if not separate:
            both = [torch.cat([one["gate_proj.weight"], one["up_proj.weight"]]) for one in experts]
            layer["mlp.experts.gate_up_proj"] = torch.stack(both)
            down = [one["down_proj.weight"] for one in experts]
            layer["mlp.experts.down_proj"] = torch.stack(down)
    own = {f"layers.0.{name}": one for name, one in layer.items()} | {
        "fc.weight": matrix(hidden, 2 * hidden),
        "pre_fc_norm_embedding.weight": norm(),
        "pre_fc_norm_hidden.weight": norm(),
        "norm.weight": norm(),
    }
    _store(folder, own)
    return folder


@dataclass(frozen=True)
class ReferenceMtp:
    """A layer over its target's embedding and head [V,H]; weights by their names behind `mtp.`."""

    weights: dict[str, Tensor]
    embed: Tensor
    head: Tensor
    config: dict[str, Any]

    @classmethod
    def load(cls, folder: Path, target: Any) -> ReferenceMtp:
        weights = {
            name.removeprefix("mtp."): tensor.float()
            for name, tensor in load_tensors(folder).items()
            if name.startswith("mtp.")
        }
        embed, head = (
            one.weight.detach().float()
            for one in (target.get_input_embeddings(), target.get_output_embeddings())
        )
        return cls(weights, embed, head, _text_config(folder))

    @torch.no_grad()
    def drafts(self, ids: Tensor, outputs: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """`count` tokens behind ids [n], the last of which has no output yet, and each step's
        logits; outputs [n - 1,H] are the target's."""
        tokens, scores = ids[1:], []
        for _ in range(count):
            row = self.rows(tokens, outputs)[-1:]
            scores.append((row @ self.head.T)[0])
            tokens = torch.cat([tokens, scores[-1].argmax()[None]])
            outputs = torch.cat([outputs, row])
        return tokens[len(ids) - 1 :].tolist(), scores

    def rows(self, tokens: Tensor, outputs: Tensor) -> Tensor:
        """The normed outputs [n,H] of rows of tokens [n] and outputs [n,H] of the one before."""
        token = self._norm(self.embed[tokens], "pre_fc_norm_embedding")
        output = self._norm(outputs, "pre_fc_norm_hidden")
        x = torch.cat([token, output], -1) @ self.weights["fc.weight"].T
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        mixes = "num_experts" in self.config
        x = x + (self._mixture(normed) if mixes else self._mlp(normed, "mlp"))
        return self._norm(x, "norm")

    def _attention(self, x: Tensor) -> Tensor:
        size, heads = self.config["head_dim"], self.config["num_attention_heads"]
        both = self._linear(x, "self_attn.q_proj").reshape(len(x), heads, 2 * size)
        q, gate = both[..., :size], both[..., size:]
        k, v = (self._linear(x, f"self_attn.{one}_proj").reshape(len(x), -1, size) for one in "kv")
        q = self._turn(self._norm(q, "layers.0.self_attn.q_norm"))
        k = self._turn(self._norm(k, "layers.0.self_attn.k_norm"))
        k, v = (one.repeat_interleave(heads // one.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = softmax(scores.masked_fill(later, -math.inf), -1)
        attended = torch.einsum("hqk,khd->qhd", shares, v) * gate.sigmoid()
        return self._linear(attended.reshape(len(x), -1), "self_attn.o_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{one}_proj") for one in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{name}.down_proj")

    def _mixture(self, x: Tensor) -> Tensor:
        shares = softmax(self._linear(x, "mlp.gate"), -1)
        best = shares.topk(self.config["num_experts_per_tok"])
        shared = self._linear(x, "mlp.shared_expert_gate").sigmoid()
        mixed = []
        for row, ids, parts in zip(
            x, best.indices, best.values / best.values.sum(-1, True), strict=True
        ):
            mixed.append(
                sum(p * self._expert(row, int(e)) for e, p in zip(ids, parts, strict=True))
            )
        return torch.stack(mixed) + shared * self._mlp(x, "mlp.shared_expert")  # type: ignore[arg-type]

    def _expert(self, x: Tensor, number: int) -> Tensor:
        if f"layers.0.mlp.experts.{number}.gate_proj.weight" in self.weights:
            return self._mlp(x, f"mlp.experts.{number}")
        gate, up = (self.weights["layers.0.mlp.experts.gate_up_proj"][number] @ x).chunk(2)
        return self.weights["layers.0.mlp.experts.down_proj"][number] @ (silu(gate) * up)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"layers.0.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return (1 + self.weights[name + ".weight"]) * (x * scale)

    def _turn(self, x: Tensor) -> Tensor:
        """The first part of heads x [n,heads,D], turned by their rows' numbers."""
        rope = self.config["rope_parameters"]
        turned = int(x.shape[-1] * rope["partial_rotary_factor"])
        rates = rope["rope_theta"] ** (-torch.arange(0, turned, 2) / turned)
        angles = (torch.arange(len(x))[:, None] * rates)[:, None]
        first, second = x[..., : turned // 2], x[..., turned // 2 : turned]
        cos, sin = angles.cos(), angles.sin()
        parts = [first * cos - second * sin, second * cos + first * sin, x[..., turned:]]
        return torch.cat(parts, -1)


def fit_mtp(
    folder: Path, target: Any, examples: Sequence[tuple[Tensor, Tensor]], steps: int = 60
) -> None:
    """Fits the layer in `folder` to `examples`, ids [n] and the target's outputs [n,H] of each."""
    layer = ReferenceMtp.load(folder, target)
    for weight in layer.weights.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(layer.weights.values(), lr=6e-3)
    for _ in range(steps):
        losses = []
        for ids, outputs in examples:
            logits = layer.rows(ids[1:-1], outputs[:-2]) @ layer.head.T
            losses.append(cross_entropy(logits, ids[2:]))
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
    _store(folder, {name: one.detach() for name, one in layer.weights.items()})


def _store(folder: Path, own: dict[str, Tensor]) -> None:
    """Puts tensors `mtp.*` into the file of a checkpoint, in the type of its embedding."""
    tensors = {name: one for name, one in load_tensors(folder).items() if "mtp." not in name}
    (dtype,) = {one.dtype for name, one in tensors.items() if name.endswith("embed_tokens.weight")}
    tensors |= {f"mtp.{name}": one.to(dtype).contiguous() for name, one in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _text_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    return text
