"""`block_attention` at given shapes: what is compiled, tested and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_plugins.block_attention.launch import MERGE, OPERATIONS
from dflash_plugins.kv_caches import cache_specs
from dflash_plugins.operation import Case, DType, TensorSpec
from dflash_plugins.public import public_pairs, wide_targets
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.hardware.kernels import ONE_LAUNCH, most_splits, needs_split
from dflash_trt.models.build_config import PublishedPair

LENGTH = 131_072
"""Positions of the longest cache that kernels are compiled for."""

SHORT = ONE_LAUNCH - 1
"""Positions of the longest cache that one launch reads."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer: its heads, mask and cache.

    `length` is the most positions of a sequence, `block_size` the rows of a verify step, `window`
    0 for none; `page_size` makes the cache paged.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    length: int
    block_size: int = 8
    window: int = 0
    is_causal: bool = False
    page_size: int | None = None
    compute: DType = DType.BFLOAT16
    cache: DType = DType.BFLOAT16

    @property
    def is_split(self) -> bool:
        return needs_split(self.length, self.block_size, self.window)


def draft_shape(pair: PublishedPair, length: int) -> AttentionShape:
    """Of a pair's draft, whose heads are the target's too, over caches of `length` positions."""
    draft = pair.draft
    return AttentionShape(
        draft.heads, draft.kv_heads, draft.head_dim, length, block_size=draft.block_size
    )


def wide_shapes(length: int) -> dict[str, AttentionShape]:
    """Attentions of targets with heads of 256 and 512, over caches of `length` positions.

    Gemma 4 has two kinds of layers: heads of 256 within a window, and of 512 for all positions.
    """
    found = {}
    for name, target in wide_targets().items():
        shape = AttentionShape(
            target.heads,
            target.kv_heads,
            target.head_dim,
            length,
            block_size=16,
            window=max(target.windows, default=0),
            is_causal=True,
        )
        found[f"{name} target{' window' if shape.window else ''}"] = shape
        if (full := target.full) is not None:
            found[f"{name} target"] = replace(
                shape, window=0, kv_heads=full.kv_heads, head_dim=full.head_dim
            )
    return found


def make_cases(
    name: str, shape: AttentionShape, *, batch: int, rows: int | None = None
) -> list[Case]:
    """One case, or the split's and the merge's; None for `rows` is block_size rows a sequence."""
    rows = rows or shape.block_size
    q = TensorSpec(shape.compute, (batch, shape.query_heads, rows, shape.head_dim))
    lengths = {"key_value_lengths": TensorSpec(DType.INT32, (batch,))}
    sinks = {"sinks": TensorSpec(DType.FLOAT32, (shape.query_heads,))}
    sizes = (batch, shape.kv_heads, shape.length, shape.head_dim)
    inputs = {"q": q, **cache_specs(shape.cache, sizes, shape.page_size), **lengths}
    inputs |= {} if shape.is_split else sinks
    attributes = {
        "block_size": shape.block_size,
        "is_causal": int(shape.is_causal),
        "window": shape.window,
        "most_splits": most_splits(shape.length),
    }
    operation = next(one for one in OPERATIONS if set(one.inputs) == set(inputs))
    own = {name: attributes[name] for name in operation.attributes}
    first = Case(name, operation, inputs, own)
    if not shape.is_split:
        return [first]
    own = {name: attributes[name] for name in MERGE.attributes}
    return [first, Case(name, MERGE, {"q": q, **first.outputs, **lengths, **sinks}, own)]


def main_cases() -> list[Case]:
    """Each operation with the heads of public pairs.

    Targets are causal, in verify steps and prefill alike. First are Qwen3-Coder's, whose groups of
    8 heads of 128 make the largest programs.
    """
    pairs = {name: draft_shape(pair, LENGTH) for name, pair in public_pairs().items()}
    draft, small, coder = pairs["qwen3-8b"], pairs["gpt-oss"], pairs["qwen3-coder"]
    window = max(public_pairs()["gpt-oss"].target.windows)
    paged: dict[str, Any] = {"page_size": PAGE_SIZE}
    float8: dict[str, Any] = {"cache": DType.FLOAT8}
    targets = {
        "qwen3-coder target": replace(coder, is_causal=True),
        "qwen3-8b target": replace(draft, is_causal=True),
        "gpt-oss target": replace(small, is_causal=True),
        "gpt-oss target window": replace(small, is_causal=True, window=window),
    }
    forms = {"paged": paged, "fp8": float8, "paged fp8": paged | float8}
    shapes = {"qwen3-coder draft": coder} | {
        f"{name} {form}": replace(shape, **changes)
        for name, shape in targets.items()
        for form, changes in forms.items()
    }
    shapes |= {
        "qwen3-8b draft paged fp8": replace(draft, **forms["paged fp8"]),
        "gpt-oss draft window": replace(small, window=window),
    }
    wide = wide_shapes(LENGTH)
    for name in ("qwen3.5-27b target", "gemma-4-31b target window", "gemma-4-31b target"):
        shapes |= {name: wide[name]} | {
            f"{name} {form}": replace(wide[name], **changes) for form, changes in forms.items()
        }
    for name in ("qwen3.5-27b target", "gemma-4-31b target"):
        shapes[f"{name} of {SHORT} positions"] = replace(wide[name], length=SHORT)
    shapes[f"qwen3-8b draft of {SHORT} positions"] = replace(draft, length=SHORT)
    firsts = [make_cases(name, shape, batch=8)[0] for name, shape in shapes.items()]
    of_merge = {"gpt-oss target": targets["gpt-oss target"]}
    of_merge["gemma-4-31b target"] = wide["gemma-4-31b target"]
    merges = [make_cases(name, shape, batch=8)[1] for name, shape in of_merge.items()]
    return [*firsts, *merges, *make_cases("qwen3-8b draft", draft, batch=8)]
