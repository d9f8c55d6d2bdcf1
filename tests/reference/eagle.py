"""An EAGLE-3 head in plain PyTorch, row by row as published, and checkpoints of its layouts.

Row i takes the embedding of token i + 1 and the feature of position i, turns by position i and
predicts token i + 2 (arXiv 2503.01840).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from .draft import load_tensors

Layout = Literal["eagle", "modelopt", "speculators", "deepspec"]
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_eagle(
    folder: Path,
    target: Path,
    layout: Layout = "eagle",
    *,
    taps: Sequence[int] | None = (1, 2, 4),
    draft_vocab: int | None = 96,
    dtype: str = "float32",
    carries_norm: bool = False,
    layer: Literal["llama", "qwen3"] = "llama",
    norms: Literal["", "fc_norm", "norm_before_fc"] = "",
    rope_theta: float | None = None,
    heads: int = 4,
    seed: int = 7,
    **changes: Any,
) -> Path:
    """A random head for the target in folder `target`; `changes` go to config.json.

    `layer` is the kind of speculators' layer, `norms` what norms the taps before fc.
    """
    base = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, vocab = base["hidden_size"], base["vocab_size"]
    kv_heads, size, inner = heads // 2, 16, 96
    count = vocab if draft_vocab is None else draft_vocab
    torch.manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / math.sqrt(columns)

    def norm(width: int = hidden) -> Tensor:
        return torch.rand(width) + 0.5

    prefix = "midlayer." if layout == "eagle" else "layers.0."
    weights = {
        "input_layernorm.weight": norm(),
        "hidden_norm.weight": norm(),
        "post_attention_layernorm.weight": norm(),
        "self_attn.q_proj.weight": matrix(heads * size, 2 * hidden),
        "self_attn.k_proj.weight": matrix(kv_heads * size, 2 * hidden),
        "self_attn.v_proj.weight": matrix(kv_heads * size, 2 * hidden),
        "self_attn.o_proj.weight": matrix(hidden, heads * size),
        "mlp.gate_proj.weight": matrix(inner, hidden),
        "mlp.up_proj.weight": matrix(inner, hidden),
        "mlp.down_proj.weight": matrix(hidden, inner),
    }
    if layout == "deepspec" or layer == "qwen3":
        weights |= {f"self_attn.{kind}_norm.weight": norm(size) for kind in "qk"}
    tensors = {prefix + name: tensor for name, tensor in weights.items()}
    tapped = 3 if taps is None else len(taps)
    tensors["fc.weight"] = matrix(hidden, tapped * hidden)
    if norms == "fc_norm":
        tensors |= {f"fc_norm.{at}.weight": norm() for at in range(tapped)}
    elif norms:
        tensors["input_norm.weight"] = norm(tapped * hidden)
    tensors["norm.weight"] = norm()
    tensors["lm_head.weight"] = matrix(count, hidden)
    tensors = {name: tensor.to(STORED[dtype]) for name, tensor in tensors.items()}
    if draft_vocab is not None:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        tensors["t2d"][chosen] = True
    if layout in ("speculators", "deepspec"):
        embedding = load_tensors(target)["model.embed_tokens.weight"]
        own = torch.rand_like(embedding) if changes.get("embed_requires_grad") else 0
        tensors["embed_tokens.weight"] = embedding + own
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if rope_theta is not None or layout == "deepspec":
        sizes["rope_theta"] = rope_theta or 10_000.0
    config: dict[str, Any] = {"draft_vocab_size": count, "torch_dtype": dtype}
    shift = 0
    if layout == "speculators":
        shift = 1
        config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": sizes}
        config |= {"norm_before_residual": carries_norm, "speculators_model_type": "eagle3"}
        sizes |= {"model_type": layer, "layer_types": ["full_attention"]}
    elif layout == "deepspec":
        config |= {"architectures": ["Qwen3Eagle3Model"], "ttt_length": 7, **sizes}
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **sizes}
    if taps is not None and layout == "deepspec":
        config["target_layer_ids"] = list(taps)
    elif taps is not None and layout == "speculators":
        config["eagle_aux_hidden_state_layer_ids"] = [tap + shift for tap in taps]
    elif taps is not None:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "use_aux_hidden_state": True,
        }
    if norms:
        config[norms] = True
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class ReferenceEagle:
    """A head over a target's embedding [V,H]; weights by their names without the layer's prefix."""

    weights: dict[str, Tensor]
    embed: Tensor
    config: dict[str, Any]
    taps: tuple[int, ...]
    carries_norm: bool = False
    hands_normed: bool = False

    @classmethod
    def load(cls, folder: Path, target: Any, taps: Sequence[int]) -> ReferenceEagle:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {}
        for name, tensor in load_tensors(folder).items():
            plain = name.removeprefix("midlayer.").removeprefix("layers.0.")
            weights[plain] = tensor.float() if tensor.is_floating_point() else tensor
        module = target.get_input_embeddings()
        embed = module(torch.arange(module.num_embeddings)).detach().float()
        embed = weights.get("embed_tokens.weight", embed)
        sizes = config.get("transformer_layer_config", config)
        carries = bool(config.get("norm_before_residual"))
        hands = bool(config.get("norm_output"))
        return cls(weights, embed, sizes, tuple(taps), carries, hands)

    def drafts(self, ids: Tensor, features: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """`count` tokens behind ids [n], the last of which has no feature yet.

        features [n - 1,taps·H]. Returns the target's ids and each step's logits.
        """
        fused = self._fuse(features)
        x, tokens = fused, ids[1:]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[int] = []
        scores: list[Tensor] = []
        for row in range(len(tokens)):  # every row sees itself and those before it
            out = self._row(int(tokens[row]), x[row], row, keys, values)
        for step in range(count):
            logits = self._norm(out, "norm") @ self.weights["lm_head.weight"].T
            choice = int(logits.argmax())
            if "d2t" in self.weights:
                choice += int(self.weights["d2t"][choice])
            found.append(choice)
            scores.append(logits)
            if step + 1 < count:
                out = self._norm(out, "norm") if self.hands_normed else out
                out = self._row(choice, out, len(tokens) + step, keys, values)
        return found, scores

    def taught(self, ids: Tensor, features: Tensor, anchor: int) -> Tensor:
        """What `lm_head` reads of a chain from `anchor` on, whose tokens are those of `ids`."""
        fused = self._fuse(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states, state = [], fused[0]
        for row, token in enumerate(ids[1:]):
            state = fused[row] if row < anchor else state
            state = self._row(int(token), state, row, keys, values)
            if row >= anchor - 1:
                states.append(self._norm(state, "norm"))
        return torch.stack(states)

    def hidden(self, ids: Tensor, features: Tensor) -> Tensor:
        """What `lm_head` reads [n - 1,H] of every row of ids [n] over features [n - 1,taps·H]."""
        fused = self._fuse(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        rows = [
            self._row(int(token), fused[row], row, keys, values)
            for row, token in enumerate(ids[1:])
        ]
        return self._norm(torch.stack(rows), "norm")

    def _fuse(self, features: Tensor) -> Tensor:
        """[n,taps·H] to [n,H]."""
        taps = features.float().chunk(len(self.taps), -1)
        if "fc_norm.0.weight" in self.weights:
            taps = tuple(self._norm(tap, f"fc_norm.{at}") for at, tap in enumerate(taps))
        x = torch.cat(taps, -1)
        if "input_norm.weight" in self.weights:
            x = self._norm(x, "input_norm")
        return x @ self.weights["fc.weight"].T

    def _row(
        self, token: int, feature: Tensor, row: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        size, heads = self.config["head_dim"], self.config["num_attention_heads"]
        group = heads // self.config["num_key_value_heads"]
        normed = self._norm(feature, "hidden_norm")
        carried = normed if self.carries_norm else feature
        x = torch.cat([self._norm(self.embed[token], "input_layernorm"), normed])
        q, k, v = (
            (self.weights[f"self_attn.{one}_proj.weight"] @ x).reshape(-1, size) for one in "qkv"
        )
        if "self_attn.q_norm.weight" in self.weights:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        keys.append(self._turn(k, row))
        values.append(v)
        q = self._turn(q, row)
        out = []
        for head in range(heads):
            k_all = torch.stack([one[head // group] for one in keys])
            v_all = torch.stack([one[head // group] for one in values])
            out.append(torch.softmax(k_all @ q[head] / math.sqrt(size), 0) @ v_all)
        x = carried + self.weights["self_attn.o_proj.weight"] @ torch.cat(out)
        normed = self._norm(x, "post_attention_layernorm")
        gate = self.weights["mlp.gate_proj.weight"] @ normed
        up = self.weights["mlp.up_proj.weight"] @ normed
        return x + self.weights["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weights[name + ".weight"] * (x * scale)

    def _turn(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        theta = self.config.get("rope_theta", 10_000.0)
        angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
