"""Public pairs whose sizes kernels are compiled, tested and measured for."""

from __future__ import annotations

from functools import cache

from dflash_trt.models.build_config import PublishedPair, PublishedTarget, load_config
from dflash_trt.models.sizes import RecurrentSizes

_PAIRS = {"qwen3-8b": "qwen3-8b", "gpt-oss": "gpt-oss-20b", "qwen3-coder": "qwen3-coder-30b-a3b"}


@cache
def public_pairs() -> dict[str, PublishedPair]:
    """Sizes from `build_configs/`, by a pair's short name: one for each set of heads.

    Qwen3-4B and Llama-3.1-8B have Qwen3-8B's heads, gpt-oss-120b those of gpt-oss-20b.
    """
    shapes = {name: load_config(target)[0].shape for name, target in _PAIRS.items()}
    assert all(shapes.values())
    return {name: shape for name, shape in shapes.items() if shape is not None}


_WIDE_TARGETS = (
    "qwen3.5-27b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "qwen3.5-122b-a10b",
    "gemma-4-31b",
    "gemma-4-26b-a4b",
)


@cache
def wide_targets() -> dict[str, PublishedTarget]:
    """Targets whose heads are wider than their drafts', by the name of their configuration.

    Qwen3.5-4B has Qwen3.5-9B's heads, Qwen3.6 has Qwen3.5's. Their drafts have heads of
    `public_pairs`, but Gemma 4 31B's, whose groups of 8 are Qwen3-Coder's.
    """
    shapes = {name: load_config(name)[0].shape for name in _WIDE_TARGETS}
    return {name: shape.target for name, shape in shapes.items() if shape is not None}


@cache
def recurrences() -> dict[str, RecurrentSizes]:
    """Gated DeltaNet layers of public hybrids, by the name of their configuration."""
    found = {name: target.recurrent for name, target in wide_targets().items()}
    return {
        name: RecurrentSizes(one.key_heads, one.value_heads, one.head_dim, one.kernel)
        for name, one in found.items()
        if one is not None
    }
