"""Public pairs whose sizes kernels are compiled, tested and measured for."""

from __future__ import annotations

from functools import cache

from dflash_trt.config import PublishedPair, load_config

_PAIRS = {"qwen3-8b": "qwen3-8b", "gpt-oss": "gpt-oss-20b", "qwen3-coder": "qwen3-coder-30b-a3b"}


@cache
def public_pairs() -> dict[str, PublishedPair]:
    """Sizes from `build_configs/`, by a pair's short name: one for each set of heads.

    Qwen3-4B and Llama-3.1-8B have Qwen3-8B's heads, gpt-oss-120b those of gpt-oss-20b.
    """
    shapes = {name: load_config(target)[0].shape for name, target in _PAIRS.items()}
    assert all(shapes.values())
    return {name: shape for name, shape in shapes.items() if shape is not None}
