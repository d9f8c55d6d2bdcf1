"""`dflash::decomposed_attention`: attention written out, for heads larger than any fused kernel's.

Gemma 4's layers that see everything have heads of 512 elements. Every position that a cache has
room for is read and weighed, whether it is held or not; the mask takes out the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.graph.functions import define
from dflash_trt.graph.model_builder import LayerBuilder

DECOMPOSED = "decomposed_attention"
"""The function's name."""

# Scores are float32, since one of 60 in bfloat16 may be off by 0.1. A score that is not seen is
# finite: an idle row sees nothing, and would be NaN.
_ATTENTION = """
{name} (q, k, v, mask) => (attended)
{{
    by_group = Constant <value_ints = [0, {kv_heads}, {groups}, -1, {head_dim}]> ()
    by_head = Constant <value_ints = [0, {heads}, -1, {head_dim}]> ()
    third = Constant <value_ints = [2]> ()
    unseen = Constant <value_float = -1e30> ()
    groups = Reshape (q, by_group)
    queries = Cast <to = 1> (groups)
    keys = Transpose <perm = [0, 1, 3, 2]> (k)
    wide_keys = Cast <to = 1> (keys)
    key_groups = Unsqueeze (wide_keys, third)
    all_scores = MatMul (queries, key_groups)
    seen = Unsqueeze (mask, third)
    scores = Where (seen, all_scores, unseen)
    wide_shares = Softmax <axis = -1> (scores)
    shares = Cast <to = {narrow}> (wide_shares)
    value_groups = Unsqueeze (v, third)
    grouped = MatMul (shares, value_groups)
    attended = Reshape (grouped, by_head)
}}
"""


def decomposed_attention(layer: LayerBuilder, q: str, caches: Sequence[str], mask: str) -> str:
    """Attention of q [B,heads,S,D], pre-scaled, over caches [B,kv heads,M,D]; mask [B,1,S,M].

    A model has one kind of heads that need it.
    """
    sizes = layer.sizes
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    text = _ATTENTION.format(
        name=DECOMPOSED,
        heads=heads,
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        head_dim=head_dim,
        narrow=int(layer.b.form.precision.onnx_type),
    )
    function = define(text, overload=f"{heads}_{kv_heads}_{head_dim}")
    return layer.b.call(function, [q, *caches, mask], "attend")[0]
