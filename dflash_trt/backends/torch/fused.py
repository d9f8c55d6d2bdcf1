"""Operations that are more than one of PyTorch's: attention, norms, recurrences, FP4.

B sequences, H heads, S rows, M positions of a cache, D head size, as in graph/bindings.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.quantization.codecs import E2M1_MAX, E4M3_MAX


def rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x²) + epsilon) over the last axis, in float32, times a scale."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed * scale.float()).to(x.dtype)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """Rotary embedding of x [B,H,S,D] by rows of tables [P,D/2] at positions [B,S]."""
    if positions is not None:
        cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
    size, (cos, sin) = rotary_embedding_dim or x.shape[-1], (cos[:, None], sin[:, None])
    near, far = x[..., :size].chunk(2, -1)
    return torch.cat([near * cos - far * sin, far * cos + near * sin, x[..., size:]], -1)


def attend_natively(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    query_lengths: Tensor | None = None,
    lengths: Tensor | None = None,
    causal_kind: str = "none",
) -> Tensor:
    """`trt::TRT_Attention` (graph/functions.py): with lengths, a mask, or both; q is scaled."""
    return _attend(q, k, v, mask, lengths, causal_kind == "lower_right")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    lengths: Tensor | None = None,
    scale: float | None = None,
    is_causal: int = 0,
) -> Tensor:
    """ONNX's Attention over whole caches."""
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _attend(q, k, v, mask, lengths, is_causal > 0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths: Tensor | None, causal: bool
) -> Tensor:
    """q [B,H,S,D] over k, v [B,H_kv,M,D]; causality counts back from the length, or M."""
    rows, held = q.shape[2], k.shape[2]
    keys = torch.arange(held, device=q.device)
    ends = torch.full((1,), held, device=q.device) if lengths is None else lengths.long()
    ends = ends.reshape(-1, 1, 1, 1)
    seen = keys < ends
    if causal:
        seen = seen & (keys <= ends - rows + torch.arange(rows, device=q.device)[:, None])
    if mask is not None:
        seen = seen & mask
    # A row that sees nothing is idle: nobody reads it, but NaN would spread through its caches.
    seen = seen | (~seen.any(-1, keepdim=True) & (keys == 0))
    if q.dtype is not torch.float32:
        return F.scaled_dot_product_attention(
            q, k, v, seen.expand(-1, -1, rows, -1), scale=1.0, enable_gqa=q.shape[1] != k.shape[1]
        )
    # Behind its length a page may hold an earlier owner's NaN, which no weight of 0 takes away.
    is_held = (keys < ends).transpose(2, 3)
    k, v = (torch.where(is_held, one, 0.0).unsqueeze(2) for one in (k, v))
    scores = q.reshape(len(q), k.shape[1], -1, rows, q.shape[3]) @ k.transpose(-1, -2)
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    return (weights @ v).flatten(1, 2)


def convolve(
    x: Tensor, kernel: Tensor, bias: None, history: Tensor, activation: str, channels_last: int
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel of [B,S,C] by [C,1,taps], behind earlier rows; SiLU."""
    rows, taps = torch.cat([history, x], 1), kernel.shape[-1]
    parts = [rows[:, at : at + x.shape[1]] * kernel[:, 0, at] for at in range(taps)]
    return F.silu(torch.stack(parts).sum(0)), rows[:, rows.shape[1] - taps + 1 :]


def gate(a: Tensor, bias: Tensor, decay: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and update rate of rows: softplus(a + bias) · decay, sigmoid(b)."""
    return F.softplus(a + bias) * decay, b.sigmoid()


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor,
    beta: Tensor,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule row by row (arXiv 2412.06464); states are [B,H,D,D]."""
    rows, share, size = q.shape[:2], kv_num_heads // q_num_heads, state.shape[-1]
    q, k = (one.reshape(*rows, q_num_heads, size).repeat_interleave(share, 2) for one in (q, k))
    values, decay, results = v.reshape(*rows, kv_num_heads, size), g.exp(), []
    q = q / math.sqrt(size)
    for at in range(q.shape[1]):
        state = state * decay[:, at, :, None, None]
        known = (k[:, at, :, None] @ state).squeeze(2)
        update = (values[:, at] - known) * beta[:, at, :, None]
        state = state + k[:, at, :, :, None] * update[:, :, None]
        results.append((q[:, at, :, None] @ state).squeeze(2))
    return torch.stack(results, 1).flatten(2) if results else torch.zeros_like(v), state


def quantize_fp4(
    x: Tensor, scale: Tensor, axis: int, block_size: int, scale_type: int
) -> tuple[Tensor, Tensor]:
    """E2M1 values of blocks of 16, and their E4M3 scales over the input's own (NVFP4)."""
    blocks = x.float().reshape(*x.shape[:-1], -1, block_size)
    largest = blocks.abs().amax(-1) / (E2M1_MAX * scale.float())
    scales = largest.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    steps = (scales.float() * scale.float())[..., None]
    values = (blocks / torch.where(steps == 0, 1.0, steps)).clamp(-E2M1_MAX, E2M1_MAX)
    size = values.abs()
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((values / unit).round() * unit).flatten(-2), scales
