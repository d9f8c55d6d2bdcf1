"""The caches that `kv_cache_update` leaves."""

from __future__ import annotations

import numpy as np

from dflash_plugins.operation import DType
from dflash_plugins.testing.cache_writes import write_rows
from dflash_plugins.testing.numeric import Array
from dflash_trt.quantization.fp8 import quantize_fp8


def update(inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Both caches afterwards, of their own type: every bit is defined."""
    k_cache, v_cache = (
        write_rows(inputs, inputs[f"{name}_cache"], _stored(inputs, name, index).swapaxes(1, 2))
        for index, name in enumerate("kv")
    )
    return k_cache, v_cache


def _stored(inputs: dict[str, Array], name: str, index: int) -> Array:
    """Rows [B,H_kv,S,D] as the cache has them."""
    rows = inputs[name]
    if "kv_scales" not in inputs:
        return rows
    codes = quantize_fp8(rows.astype(np.float32), inputs["kv_scales"][index])
    return codes.view(DType.FLOAT8.numpy)
