"""Operations that are more than one of PyTorch's: attention, norms, recurrences, FP4.

B sequences, H heads, S rows, M positions of a cache, D head size, as in graph/bindings.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from dflash_trt.backends.torch.operations import Arguments

E2M1_MOST, FP4_BLOCK = 6.0, 16


def rms_norm(a: Arguments) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) over the last axis, in float32, times a scale."""
    wide = a[0].float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + a.get("epsilon", 1e-5))
    return (normed * a[1].float()).to(a[0].dtype)


def rotate(a: Arguments) -> Tensor:
    """Rotary embedding of x [B,H,S,D], or [B,S,H·D], by rows of tables [P,D/2] at positions."""
    x, cos, sin = a[0], a[1], a[2]
    if a.has(3):
        cos, sin = F.embedding(a[3], cos), F.embedding(a[3], sin)
    is_flat = x.ndim == 3
    if is_flat:
        x = x.unflatten(2, (a.get("num_heads"), -1)).transpose(1, 2)
    size = a.get("rotary_embedding_dim", 0) or x.shape[-1]
    near, far = x[..., :size].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([near * cos - far * sin, far * cos + near * sin, x[..., size:]], -1)
    return turned.transpose(1, 2).flatten(2) if is_flat else turned


def attend_natively(a: Arguments) -> Tensor:
    """`trt::TRT_Attention` (graph/functions.py): with lengths, a mask, or both; q is scaled."""
    causal = a.get("causal_kind", "none") == "lower_right"
    return _attend(a[0], a[1], a[2], a.maybe(3), a.maybe(5), causal, 1.0)


def attend(a: Arguments) -> Tensor:
    """ONNX's Attention over whole caches."""
    scale = a.get("scale") or 1 / math.sqrt(a[0].shape[-1])
    return _attend(a[0], a[1], a[2], a.maybe(3), a.maybe(6), bool(a.get("is_causal", 0)), scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """q [B,H,S,D] over k, v [B,H_kv,M,D]; causality counts back from the length, or M."""
    rows, held = q.shape[2], k.shape[2]
    keys = torch.arange(held, device=q.device)
    ends = torch.tensor(held, device=q.device) if lengths is None else lengths.long()
    ends = ends.reshape(-1, 1, 1, 1)
    seen = keys < ends
    if causal:
        seen = seen & (keys <= ends - rows + torch.arange(rows, device=q.device)[:, None])
    if mask is not None:
        seen = seen & mask
    seen = seen.expand(q.shape[0], seen.shape[1], rows, held)
    # A row that sees nothing is idle: nobody reads it, but NaN would spread through its caches.
    seen = seen | (~seen.any(-1, keepdim=True) & (keys == 0))
    if q.dtype is not torch.float32:
        return F.scaled_dot_product_attention(
            q, k, v, seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    # Behind its length a page may hold an earlier owner's NaN, which no weight of 0 takes away.
    is_held = (keys < ends).transpose(2, 3)
    k, v = (torch.where(is_held, one, 0.0).unsqueeze(2) for one in (k, v))
    grouped = q.unflatten(1, (k.shape[1], -1)) * scale
    scores = (grouped @ k.transpose(-1, -2)).masked_fill(~seen.unsqueeze(1), -torch.inf)
    return (scores.softmax(-1) @ v).flatten(1, 2)


def convolve(a: Arguments) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel of [B,S,C] by [C,1,taps], behind earlier rows; SiLU."""
    taps = a[1].shape[-1]
    rows = torch.cat([a[3], a[0]], 1)
    count = a[0].shape[1]
    total = sum(
        (rows[:, at : at + count] * a[1][:, 0, at] for at in range(taps)), rows.new_zeros(())
    )
    return F.silu(total), rows[:, rows.shape[1] - taps + 1 :]


def gate(a: Arguments) -> tuple[Tensor, Tensor]:
    """Decay and update rate of rows: softplus(a + bias) · decay, sigmoid(b)."""
    return F.softplus(a[0] + a[1]) * a[2], a[3].sigmoid()


def recur(a: Arguments) -> tuple[Tensor, Tensor]:
    """The gated delta rule row by row (arXiv 2412.06464); states are [B,H,D,D]."""
    heads, key_heads = a.get("kv_num_heads"), a.get("q_num_heads")
    q, k = (a[at].unflatten(2, (key_heads, -1)) for at in range(2))
    q, k = (one.repeat_interleave(heads // key_heads, 2) for one in (q, k))
    v, state, g, beta = a[2].unflatten(2, (heads, -1)), a[3], a[4], a[5]
    q, decay, results = q / math.sqrt(q.shape[-1]), g.exp(), []
    for at in range(q.shape[1]):
        state = state * decay[:, at, :, None, None]
        known = (k[:, at, :, None] @ state).squeeze(2)
        update = (v[:, at] - known) * beta[:, at, :, None]
        state = state + k[:, at, :, :, None] * update[:, :, None]
        results.append((q[:, at, :, None] @ state).squeeze(2))
    y = torch.stack(results, 1).flatten(2) if results else torch.zeros_like(a[2])
    return y, state


def quantize_fp4(a: Arguments) -> tuple[Tensor, Tensor]:
    """E2M1 values of blocks of 16, and their E4M3 scales over the input's own (NVFP4)."""
    blocks, scale = a[0].float().unflatten(-1, (-1, FP4_BLOCK)), a[1].float()
    largest = blocks.abs().amax(-1) / (E2M1_MOST * scale)
    scales = largest.clamp(max=448.0).to(torch.float8_e4m3fn)
    steps = (scales.float() * scale)[..., None]
    values = (blocks / torch.where(steps == 0, 1.0, steps)).clamp(-E2M1_MOST, E2M1_MOST)
    size = values.abs()
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((values / unit).round() * unit).flatten(-2), scales
