"""The time of PyTorch's own attention over the shapes of a measurement."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from statistics import median

from dflash_plugins.operation import DType
from dflash_plugins.testing.gpu import FLUSHED_BYTES, TIMED_CALLS, WARM_UP_CALLS, Point


def sdpa_seconds(point: Point) -> float | None:
    """The median seconds of scaled_dot_product_attention over what a cache holds, L2 cold.

    None where it has no such caches (paged, FP8) or windows, or PyTorch has no GPU here.
    """
    case = point.cases[0]
    q, k = case.inputs["q"], case.inputs["k_cache"]
    is_plain = "page_table" not in case.inputs and k.dtype is not DType.FLOAT8
    if not is_plain or case.attributes["window"] or find_spec("torch") is None:
        return None
    torch = import_module("torch")
    if not torch.cuda.is_available():
        return None
    held, rows = int(point.inputs()["key_value_lengths"][0]), q.shape[2]
    shape = (*k.shape[:2], held, k.shape[3])
    given = {"dtype": torch.bfloat16, "device": "cuda"}
    query, keys, values = (torch.randn(one, **given) for one in (q.shape, shape, shape))
    mask = torch.ones(rows, held, dtype=torch.bool, device="cuda").tril(held - rows)
    mask = mask if case.attributes["is_causal"] else None
    flushed, times = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda"), list[float]()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(WARM_UP_CALLS + TIMED_CALLS):
        flushed.zero_()
        begin.record()
        torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, enable_gqa=True
        )
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[WARM_UP_CALLS:])
