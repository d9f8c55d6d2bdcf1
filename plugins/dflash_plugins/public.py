"""Public pairs whose sizes kernels are compiled, tested and measured for."""

from __future__ import annotations

from functools import cache

from dflash_trt.config import PublishedPair, load_config

_PAIRS = {"qwen3-8b": "qwen3-8b", "gpt-oss": "gpt-oss-20b"}


@cache
def public_pairs() -> dict[str, PublishedPair]:
    """Sizes from `build_configs/`, by a pair's short name; Llama-3.1-8B has Qwen3-8B's heads."""
    shapes = {name: load_config(target)[0].shape for name, target in _PAIRS.items()}
    assert all(shapes.values())
    return {name: shape for name, shape in shapes.items() if shape is not None}
