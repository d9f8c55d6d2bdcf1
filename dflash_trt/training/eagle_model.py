"""Chains in PyTorch, for training: from every anchor, each step on the last one's state.

EAGLE-3, arXiv 2503.01840: a head is trained on what it will be given, its own states behind the
first step. Parameters are named as in EAGLE's checkpoints; an MTP layer's are in mtp_model.py. Row
j takes token j and the feature of position j - 1. Shapes: R rows, T tokens, A anchors, S rows of a
verify step, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_trt.training.draft_model import MLP, UNSEEN, RMSNorm, rotate, write_checkpoint
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.target import TargetEnds

ChainRows = tuple[Tensor, Tensor]
"""K and V [R, A, kv, s, D] of a chain's rows so far."""


class ChainAttention(nn.Module):
    """Queries see the context before their anchor, and the chain's own rows up to themselves.

    Rows are `width` W numbers. That of an MTP layer has norms of q and k, and a gate beside q.
    """

    def __init__(self, shape: DraftDesign, width: int) -> None:
        super().__init__()
        size, own = shape.head_dim, shape.own_layer
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, size
        self.theta = shape.rope_theta
        self.turned, self.is_gated = (size, False) if own is None else (own.rotary_dim, True)
        queries = shape.heads * size
        self.q_proj = nn.Linear(width, queries * (1 + self.is_gated), bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.Identity() if own is None else make_norm(shape, size) for _ in range(2)
        )

    def context(self, x: Tensor) -> ChainRows:
        """K and V [R, kv, T, D] of rows x [R, T, W] at positions 0 … T - 1."""
        k, v = self._keys_and_values(x, torch.arange(x.shape[1], device=x.device))
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x: Tensor, places: Tensor, context: ChainRows, seen: Tensor, own: ChainRows | None
    ) -> tuple[Tensor, ChainRows]:
        """A step's rows x [R, A, W] at `places` [R, A]: what is added to the stream, own rows.

        `seen` [R, A, T] is added to scores of the context.
        """
        rows, anchors, _ = x.shape
        group = self.heads // self.kv_heads
        q = self.q_proj(x).view(*x.shape[:-1], self.heads, -1)
        q, gate = q.split([self.size, q.shape[-1] - self.size], -1)
        q = self._turn(self.q_norm(q), places)
        k, v = (one[..., None, :] for one in self._keys_and_values(x, places))
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
        out = out.reshape(rows, anchors, -1)
        if self.is_gated:
            out = out * gate.flatten(2).sigmoid()
        mixed: Tensor = self.o_proj(out)
        return mixed, (k, v)

    def _keys_and_values(self, x: Tensor, places: Tensor) -> ChainRows:
        k = self.k_norm(self.k_proj(x).view(*x.shape[:-1], self.kv_heads, self.size))
        v = self.v_proj(x).view(*x.shape[:-1], self.kv_heads, self.size)
        return self._turn(k, places), v

    def _turn(self, x: Tensor, places: Tensor) -> Tensor:
        """RoPE of x [..., heads, D] at `places`, which have the axes before the heads."""
        half = torch.arange(0, self.turned, 2, device=x.device, dtype=torch.float32)
        angles = places[..., None, None].float() * self.theta ** -(half / self.turned)
        turned = rotate(x[..., : self.turned], angles.cos(), angles.sin())
        return torch.cat([turned, x[..., self.turned :]], -1)


def make_norm(shape: DraftDesign, size: int) -> RMSNorm:
    """A fresh norm over `size` numbers, stored as a draft of this shape stores it."""
    offset = 0.0 if shape.own_layer is None else shape.own_layer.norm_offset
    return RMSNorm(size, shape.rms_norm_eps, offset)


class ChainLayer(nn.Module):
    """The one layer of a chain, over rows of `width` numbers; `hidden_norm` is EAGLE-3's."""

    def __init__(self, shape: DraftDesign, width: int) -> None:
        super().__init__()
        hidden, is_head = shape.hidden_size, shape.own_layer is None
        self.input_layernorm = make_norm(shape, hidden)
        self.hidden_norm = make_norm(shape, hidden) if is_head else nn.Identity()
        self.post_attention_layernorm = make_norm(shape, hidden)
        self.self_attn = ChainAttention(shape, width)
        self.mlp = MLP(shape)


class ChainModel(nn.Module, ABC):
    """A chain's draft without embedding and output head, which are the target's.

    `hands_normed`: a step's normed output is the next one's feature, not what the norm takes.
    """

    markov_head = candidate_selector = None
    hands_normed = False
    norm: RMSNorm

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        self.shape = shape

    @property
    def layer(self) -> ChainLayer:
        """Its one layer."""
        return next(one for one in self.modules() if isinstance(one, ChainLayer))

    def fuse(self, features: Tensor) -> Tensor:
        """What rows take [R, T, H] of the target's features."""
        return features

    @abstractmethod
    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """What q, k and v are made of [..., W], and what the layer adds to [..., H]."""

    def forward(self, features: Tensor, anchors: Tensor, blocks: Tensor, context: Tensor) -> Tensor:
        """Hidden states for the output head, [R, A, S - 1, H].

        Args:
            features: [R, T, n], the target's.
            anchors: [R, A] int64, at least 1.
            blocks: [R, A, S - 1, H], embeddings of the anchor's token and of those behind it.
            context: [R, T, H], embeddings of the row's tokens.
        """
        layer, fused = self.layer, self.fuse(features)
        before = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], 1)
        rows = layer.self_attn.context(self.enter(context, before)[0])
        places = torch.arange(features.shape[1], device=features.device)
        is_seen = (places < anchors[..., None]) & (places > 0)  # row 0 has no feature
        seen = torch.where(is_seen, 0.0, UNSEEN)
        feature = before[torch.arange(len(before), device=before.device)[:, None], anchors]
        own: ChainRows | None = None
        states = []
        for step in range(blocks.shape[2]):
            x, feature = self.enter(blocks[:, :, step], feature)
            mixed, own = layer.self_attn(x, anchors + step, rows, seen, own)
            feature = feature + mixed
            feature = feature + layer.mlp(layer.post_attention_layernorm(feature))
            states.append(self.norm(feature))
            feature = states[-1] if self.hands_normed else feature
        return torch.stack(states, 2)


class EagleModel(ChainModel):
    """An EAGLE-3 head."""

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__(shape)
        hidden = shape.hidden_size
        self.fc = nn.Linear(hidden * len(shape.target_layer_ids), hidden, bias=False)
        self.midlayer = ChainLayer(shape, 2 * hidden)
        self.norm = make_norm(shape, hidden)

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        token = self.midlayer.input_layernorm(embedded)
        return torch.cat([token, self.midlayer.hidden_norm(feature)], -1), feature

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
