"""An EAGLE-3 head in PyTorch, for training: chains from every anchor, each step on the last one's.

EAGLE-3, arXiv 2503.01840: a head is trained on what it will be given, its own states behind the
first step. Parameters are named as in EAGLE's checkpoints. Row j takes token j and the feature of
position j - 1. Shapes: R rows, T tokens, A anchors, S rows of a verify step, H hidden.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_trt.training.draft_model import MLP, UNSEEN, RMSNorm, rotate, write_checkpoint
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.target import TargetEnds

ChainRows = tuple[Tensor, Tensor]
"""K and V [R, A, kv, s, D] of a chain's rows so far."""


class ChainAttention(nn.Module):
    """Queries see the context before their anchor, and the chain's own rows up to themselves."""

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        hidden, size = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, size
        self.theta = shape.rope_theta
        self.q_proj = nn.Linear(2 * hidden, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, hidden, bias=False)

    def context(self, x: Tensor) -> ChainRows:
        """K and V [R, kv, T, D] of rows x [R, T, 2H] at positions 0 … T - 1."""
        places = torch.arange(x.shape[1], device=x.device)
        k = self._turn(self.k_proj(x).view(*x.shape[:-1], self.kv_heads, self.size), places)
        v = self.v_proj(x).view(*x.shape[:-1], self.kv_heads, self.size)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, places: Tensor, context: ChainRows, seen: Tensor, own: ChainRows | None
    ) -> tuple[Tensor, ChainRows]:
        """A step's rows x [R, A, 2H] at `places` [R, A]: what is added to the stream, own rows.

        `seen` [R, A, T] is added to scores of the context.
        """
        rows, anchors, _ = x.shape
        group = self.heads // self.kv_heads
        q = self._turn(self.q_proj(x).view(*x.shape[:-1], self.heads, self.size), places)
        k = self._turn(self.k_proj(x).view(*x.shape[:-1], self.kv_heads, self.size), places)
        v = self.v_proj(x).view(*x.shape[:-1], self.kv_heads, self.size)
        k, v = k[..., None, :], v[..., None, :]
        if own is not None:
            k, v = torch.cat([own[0], k], -2), torch.cat([own[1], v], -2)
        q = q.view(rows, anchors, self.kv_heads, group, self.size) * self.size**-0.5
        wide = q.transpose(1, 2).flatten(2, 3)  # [R, kv, A · group, D]
        split = (rows, self.kv_heads, anchors, group, -1)
        far = (wide @ context[0].transpose(-1, -2)).view(split)
        far = far.transpose(1, 2) + seen[:, :, None, None].to(far.dtype)
        near = q @ k.transpose(-1, -2)
        with torch.autocast(x.device.type, enabled=False):  # which would widen them
            weights = torch.cat([far, near], -1).softmax(-1)
        over_context, over_own = torch.split(weights, [far.shape[-1], near.shape[-1]], -1)
        out = over_own @ v
        over_context = over_context.transpose(1, 2).flatten(2, 3)
        out = out + (over_context @ context[1]).view(split).transpose(1, 2)
        mixed: Tensor = self.o_proj(out.reshape(rows, anchors, -1))
        return mixed, (k, v)

    def _turn(self, x: Tensor, places: Tensor) -> Tensor:
        """RoPE of x [..., heads, D] at `places`, which have the axes before the heads."""
        half = torch.arange(0, self.size, 2, device=x.device, dtype=torch.float32)
        angles = places[..., None, None].float() * self.theta ** -(half / self.size)
        return rotate(x, angles.cos(), angles.sin())


class ChainLayer(nn.Module):
    """The one layer of a head."""

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = ChainAttention(shape)
        self.mlp = MLP(shape)

    def joined(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """What q, k and v are made of [..., 2H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1)


class EagleModel(nn.Module):
    """The head without embedding and output head, which are the target's."""

    markov_head = candidate_selector = None

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(hidden * len(shape.target_layer_ids), hidden, bias=False)
        self.midlayer = ChainLayer(shape)
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)

    def forward(self, features: Tensor, anchors: Tensor, blocks: Tensor, context: Tensor) -> Tensor:
        """Hidden states for the output head, [R, A, S - 1, H].

        Args:
            features: [R, T, taps · H], the target's.
            anchors: [R, A] int64, at least 1.
            blocks: [R, A, S - 1, H], embeddings of the anchor's token and of those behind it.
            context: [R, T, H], embeddings of the row's tokens.
        """
        layer = self.midlayer
        fused = self.fc(features)
        before = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], 1)
        rows = layer.self_attn.context(layer.joined(context, before))
        places = torch.arange(features.shape[1], device=features.device)
        is_seen = (places < anchors[..., None]) & (places > 0)  # row 0 has no feature
        seen = torch.where(is_seen, 0.0, UNSEEN)
        feature = before[torch.arange(len(before), device=before.device)[:, None], anchors]
        own: ChainRows | None = None
        states = []
        for step in range(blocks.shape[2]):
            x = layer.joined(blocks[:, :, step], feature)
            mixed, own = layer.self_attn(x, anchors + step, rows, seen, own)
            feature = feature + mixed
            feature = feature + layer.mlp(layer.post_attention_layernorm(feature))
            states.append(self.norm(feature))
        return torch.stack(states, 2)

    def save(self, folder: Path, ends: TargetEnds, tokens: Tensor | None = None) -> None:
        """Writes a checkpoint in EAGLE's layout.

        The head's own vocabulary are `tokens`, ascending, with the target's rows for them; None is
        all.
        """
        count = self.shape.vocab_size
        rows = ends.head if tokens is None else ends.head[tokens]
        more: dict[str, Tensor] = {}
        if tokens is not None:
            more["d2t"] = tokens - torch.arange(len(tokens))
            more["t2d"] = torch.zeros(count, dtype=torch.bool).index_fill(0, tokens, True)
            count = len(tokens)
        weights = dict(self.state_dict()) | {"lm_head.weight": rows}
        write_checkpoint(folder, self.shape.config() | {"draft_vocab_size": count}, weights, more)
