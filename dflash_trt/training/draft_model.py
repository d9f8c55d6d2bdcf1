"""A draft in PyTorch, for training: every block of a row in one pass.

DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036; DSpark, arXiv 2607.05147.
Parameters are named as in z-lab's and DeepSpec's checkpoints. Shapes: R rows,
T tokens, A anchors, S slots, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from dflash_trt.models.deepspec import COPIES
from dflash_trt.models.draft_tokens import write_draft_tokens
from dflash_trt.training.dflash2_model import BlockConvolution, CandidateSelector, start_additions
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.target import TargetEnds

WEIGHTS_NAME = "model.safetensors"
UNSEEN = -1e30


class RMSNorm(nn.Module):
    """Statistics in float32; multiplies by `offset` + weight; the output has the input's type."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., D] in halves, with cos and sin [..., D/2] that fit it."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class SlotAttention(nn.Module):
    """Slots see the context before their anchor, and all slots of their own block."""

    def __init__(self, shape: DraftDesign, window: int | None) -> None:
        super().__init__()
        hidden, size = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, size
        self.window = window
        self.q_proj = nn.Linear(hidden, shape.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, shape.rms_norm_eps)
        self.k_norm = RMSNorm(size, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, masks: Masks) -> Tensor:
        """x [R, A, S, H] and context features [R, T, H] to [R, A, S, H]."""
        rows, anchors, slots, _ = x.shape
        group = self.heads // self.kv_heads
        shape = (rows, anchors, slots, self.kv_heads)
        cos, sin = masks.block_rope
        q = self.q_norm(self.q_proj(x).view(*shape, group, self.size))
        q = rotate(q, cos[..., None, None, :], sin[..., None, None, :])
        k = self.k_norm(self.k_proj(x).view(*shape, self.size))
        k = rotate(k, cos[..., None, :], sin[..., None, :])
        v = self.v_proj(x).view(*shape, self.size)
        q = q.permute(0, 3, 1, 4, 2, 5)  # [R, kv, A, group, S, D]
        k, v = (one.permute(0, 3, 1, 2, 4) for one in (k, v))  # [R, kv, A, S, D]

        cos, sin = masks.context_rope
        seen = (rows, context.shape[1], self.kv_heads, self.size)
        context_k = self.k_norm(self.k_proj(context).view(seen))
        context_k = rotate(context_k, cos[:, None], sin[:, None]).transpose(1, 2)
        context_v = self.v_proj(context).view(seen).transpose(1, 2)  # [R, kv, T, D]

        # Of all that a step holds scores are the most, so they keep the type of the products.
        q = q.reshape(rows, self.kv_heads, anchors, group * slots, self.size) * self.size**-0.5
        flat = q.view(rows, self.kv_heads, anchors * group * slots, self.size)
        far = (flat @ context_k.transpose(-1, -2)).view(*q.shape[:-1], -1)
        far = far + masks.context(self.window, group)[:, None].to(far.dtype)
        near = q @ k.transpose(-1, -2)
        if self.window is not None and self.window < slots:
            near = near + masks.near(self.window).repeat(group, 1).to(near.dtype)
        with torch.autocast(x.device.type, enabled=False):  # which would widen them
            weights = torch.cat([far, near], -1).softmax(-1)
        over_context, over_block = torch.split(weights, [context.shape[1], slots], -1)
        out = over_block @ v
        over_context = over_context.reshape(rows, self.kv_heads, anchors * group * slots, -1)
        out = out + (over_context @ context_v).view_as(out)
        out = out.view(rows, self.kv_heads, anchors, group, slots, self.size)
        out = out.permute(0, 2, 4, 1, 3, 5).reshape(rows, anchors, slots, -1)
        mixed: Tensor = self.o_proj(out)
        return mixed


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        hidden, wide = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Layer(nn.Module):
    def __init__(self, shape: DraftDesign, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SlotAttention(shape, window)
        self.mlp = MLP(shape)
        group = None if shape.dflash2 is None else shape.dflash2.group
        self.attention_conv, self.mlp_conv = (
            None if group is None else BlockConvolution(shape.hidden_size, group) for _ in range(2)
        )

    def forward(self, x: Tensor, context: Tensor, masks: Masks) -> Tensor:
        def attend(rows: Tensor) -> Tensor:
            mixed: Tensor = self.self_attn(rows, context, masks)
            return mixed

        x = x + _through(self.attention_conv, self.input_layernorm(x), attend)
        return x + _through(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _through(
    convolution: BlockConvolution | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    mixed: Tensor = sublayer(x) if convolution is None else convolution(x, sublayer)
    return mixed


class Masks:
    """Who sees whom, and rotary tables, for blocks at `anchors` [R, A] over T tokens of context.

    What is added to scores is 0 where a slot sees a key, else very low.
    """

    def __init__(self, anchors: Tensor, tokens: int, shape: DraftDesign) -> None:
        device = anchors.device
        slots = torch.arange(shape.slots, device=device)
        self.positions = anchors[..., None] + slots  # [R, A, S]
        self._anchors = anchors
        self._keys = torch.arange(tokens, device=device)
        half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
        self._inverse = shape.rope_theta ** -(half / shape.head_dim)
        self.block_rope = self._rope(self.positions)
        self.context_rope = self._rope(self._keys)
        self._added: dict[int | None, Tensor] = {}

    def context(self, window: int | None, group: int) -> Tensor:
        """[R, A, 1, T], or with a window [R, A, group · S, T], for a group of query heads."""
        if window not in self._added:
            seen = (self._keys < self._anchors[..., None])[:, :, None]
            if window is not None:
                near = self.positions[..., None] - self._keys < window
                seen = (seen & near).repeat(1, 1, group, 1)
            self._added[window] = torch.where(seen, 0.0, UNSEEN)
        return self._added[window]

    def near(self, window: int) -> Tensor:
        """[S, S]: slots farther from each other than a window's reach do not see each other."""
        slots = torch.arange(self.positions.shape[-1], device=self._keys.device)
        return torch.where((slots[:, None] - slots).abs() < window, 0.0, UNSEEN)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self._inverse
        return angles.cos(), angles.sin()


class MarkovHead(nn.Module):
    """What the token before adds to a slot's logits: W2 W1[token]."""

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.markov_rank)
        self.markov_w2 = nn.Linear(shape.markov_rank, shape.vocab_size, bias=False)

    def forward(self, before: Tensor, tokens: Tensor | slice) -> Tensor:
        """Of tokens before [n], for the logits of some `tokens` [K]: [n, K]."""
        moved: Tensor = functional.linear(self.markov_w1(before), self.markov_w2.weight[tokens])
        return moved


class DraftModel(nn.Module):
    """The draft without embedding and head, which are the target's."""

    markov_head: MarkovHead | None
    candidate_selector: CandidateSelector | None

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(hidden * len(shape.target_layer_ids), hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, window) for window in shape.windows)
        self.markov_head = MarkovHead(shape) if shape.markov_rank else None
        self.candidate_selector = None
        if shape.dflash2 is not None:
            sizes = shape.dflash2
            self.candidate_selector = CandidateSelector(hidden, shape.vocab_size, sizes)

    def forward(self, features: Tensor, anchors: Tensor, blocks: Tensor) -> Tensor:
        """Hidden states for the target's head [R, A, S - 1, H], of the slots that draft: DFlash's
        masks, and all of DSpark's.

        Args:
            features: [R, T, taps · H], the target's.
            anchors: [R, A] int64; a block sees features of positions below its anchor.
            blocks: [R, A, `shape.slots`, H], embeddings of the anchor's token and of masks.
        """
        context = self.hidden_norm(self.fc(features))
        masks = Masks(anchors, features.shape[1], self.shape)
        for layer in self.layers:
            blocks = layer(blocks, context, masks)
        hidden: Tensor = self.norm(blocks[:, :, 1 + blocks.shape[2] - self.shape.block_size :])
        return hidden

    def save(self, folder: Path, ends: TargetEnds, tokens: Tensor | None = None) -> None:
        """Writes a checkpoint in its kind's layout; `tokens` are those it chooses among.

        A DSpark draft repeats the target's embedding and head, as DeepSpec's loader wants.
        """
        held: dict[str, Tensor] = dict(self.state_dict())
        if self.markov_head is not None:
            held |= {
                COPIES["embed_tokens"]: ends.embedding / ends.embedding_scale,
                COPIES["lm_head"]: ends.head,
            }
        write_checkpoint(folder, self.shape.config(), held)
        if tokens is not None:
            write_draft_tokens(tokens.tolist(), folder)


def initialise(model: nn.Module, layers: int, seed: int) -> None:
    """Normal matrices, of a width that keeps a unit input at unit scale; those that add to the
    stream are narrower, as all `layers` do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * layers) ** -0.5)
            if name.endswith("markov_w2.weight"):
                weight.zero_()  # at first nothing depends on the token before
            start_additions(name, weight, generator)


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    more: dict[str, Tensor] | None = None,
) -> None:
    """Writes config.json, `weights` in bfloat16, and `more` tensors as they are."""
    tensors = {
        name: weight.detach().to("cpu", torch.bfloat16).clone().contiguous()
        for name, weight in weights.items()
    }
    save_file(tensors | (more or {}), folder / WEIGHTS_NAME, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(f"{text}\n")
