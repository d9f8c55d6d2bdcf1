"""One metric and one exact comparison for every numeric test.

Nothing in this folder imports `dflash_trt`: it is an independent reference of transformers targets
and a plain PyTorch drafter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dflash_plugins.testing.numeric import epsilon, sum_error
from numpy.typing import NDArray


def _array(value: Any) -> NDArray[Any]:
    """`value` as a NumPy array; torch tensors are detached, bfloat16 ones widened to float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        value = value.numpy()
    return np.asarray(value)


def max_relative_error(actual: Any, expected: Any) -> float:
    """max |actual - expected| / max |expected|, in float64, over arrays of one shape.

    0.0 for two empty or two all-zero arrays; inf where only `expected` is all zero; NaN where
    either holds a NaN or an infinity, so that `error <= bound` fails.
    """
    a, e = _array(actual), _array(expected)
    if a.shape != e.shape:
        raise AssertionError(f"shape {a.shape}, expected {e.shape}")
    if a.size == 0:
        return 0.0
    a, e = a.astype(np.float64), e.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return float("nan")
    difference, scale = float(np.abs(a - e).max()), float(np.abs(e).max())
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def stack_error(layers: int, additions: int = 400) -> float:
    """`max_relative_error` that float32 may make of what a stack of tiny layers gives.

    A layer has about 400 additions in a row: sums over 64 hidden elements three times, 16 of a
    head, 75 keys and 96 of the MLP. Each rounds a sum about as large as its result. Norms and
    softmax may enlarge an error a few times; the largest element, by which it is divided, is a
    few times as large as a typical one.
    """
    return float(sum_error(layers * additions, 1.0, epsilon(np.float32)))


def narrow_error(layers: int, dtype: Any, *, recurrent: bool = False) -> float:
    """Share of the largest logit that a graph in `dtype` may be off, whose sums are in float32.

    A layer stores about 20 results, one after another, or rounds a product's weights: two norms, q
    or k with its norm and RoPE, scores, weights, values, their product, gate, activation, its
    product, the way down, two residual sums. Embedding, last norm and head are one layer more. A
    recurrent layer divides keys and queries by their lengths, and its state carries on what that
    makes of every rounding: four times as many.
    """
    roundings = 80 if recurrent else 20
    return float(sum_error((layers + 1) * roundings, 1.0, epsilon(dtype)))


def assert_bitwise_equal(a: Any, b: Any, name: str) -> None:
    """Fails unless `a` and `b` have one shape, one dtype and the same bits.

    Bits, not values: -0.0 differs from 0.0, and a NaN equals the same NaN. The message gives
    the number of differing elements, the first one's coordinate and both values.
    """
    x, y = _array(a), _array(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise AssertionError(f"{name}: {x.dtype}{list(x.shape)} versus {y.dtype}{list(y.shape)}")
    if x.size == 0:
        return
    x_bytes, y_bytes = (
        np.ascontiguousarray(one).reshape(-1, 1).view(np.uint8).reshape(x.size, -1)
        for one in (x, y)
    )
    differs = (x_bytes != y_bytes).any(axis=1)
    if differs.any():
        first = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), x.shape))
        what = f"{int(differs.sum())} of {x.size} elements differ; first at {list(first)}"
        raise AssertionError(f"{name}: {what}: {x[first]!r} versus {y[first]!r}")
