"""`kv_feature_injection` on a GPU: verify steps and prefill chunks of public drafts."""

from __future__ import annotations

import math
from typing import Any

from dflash_plugins.kv_feature_injection.launch import make_case
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.gpu import TorchRunner, to_torch

HEAD_DIMS = {"qwen3-8b": 128, "gpt-oss": 64}
KV_HEADS, LENGTH, PAGE_SIZE = 8, 4096, 32
ROWS = ((1, 16), (8, 16), (64, 16), (1, 2048))
"""Sequences and rows of each: three verify steps, and a chunk of a prompt."""


def points() -> list[Case]:
    """Both drafts, types of cache and layouts."""
    return [
        make_case(
            f"{pair} {cache.kernel_name}{' paged' if page_size else ''}, {batch} × {rows} rows",
            compute=DType.BFLOAT16,
            cache=cache,
            batch=batch,
            rows=rows,
            kv_heads=KV_HEADS,
            head_dim=head_dim,
            length=LENGTH,
            page_size=page_size,
        )
        for pair, head_dim in HEAD_DIMS.items()
        for cache in (DType.BFLOAT16, DType.FLOAT8)
        for page_size in (None, PAGE_SIZE)
        for batch, rows in ROWS
    ]


def required_bytes(case: Case) -> int:
    """k and v read and written once, and each row's half of both RoPE tables."""
    k, cache = case.inputs["k"], case.inputs["k_cache"]
    elements = 2 * int(math.prod(k.shape))
    tables = int(k.shape[0] * k.shape[1] * k.shape[3]) * k.dtype.numpy.itemsize
    return elements * (k.dtype.numpy.itemsize + cache.dtype.numpy.itemsize) + tables


def measure(torch: Any, case: Case, runner: TorchRunner) -> dict[str, Any]:
    """The kernel's time, and PyTorch's operation by operation where it has the layout."""
    batch, rows = case.inputs["k"].shape[:2]
    tensors = to_torch(torch, make_inputs(case, [LENGTH - rows] * batch))
    work, _ = runner.prepare(case, tensors)
    seconds = runner.seconds(work)
    rivals = {}
    if case.operation.name == "kv_feature_injection":
        rivals["operation by operation"] = runner.seconds(lambda: _inject(torch, case, tensors))
    size = required_bytes(case)
    return {
        "operation": "kv_feature_injection",
        "case": case.name,
        "seconds": seconds,
        "required_bytes": size,
        "bytes_per_second": size / seconds,
        "rival_seconds": rivals,
    }


def _inject(torch: Any, case: Case, tensors: dict[str, Any]) -> None:
    """Norm, rotation and two cache writes, as a model's own code has them."""
    k, positions = tensors["k"], tensors["positions"]
    wide = k.float()
    norm = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + case.attributes["epsilon"])
    k = (wide * norm * tensors["k_norm"]).to(k.dtype)
    cos, sin = (tensors[name][positions].unsqueeze(2) for name in ("cos", "sin"))
    near, far = k.chunk(2, dim=-1)
    k = torch.cat((near * cos - far * sin, far * cos + near * sin), dim=-1)
    sequence = torch.arange(len(positions), device=positions.device)[:, None]
    tensors["k_cache"][sequence, :, positions] = k
    tensors["v_cache"][sequence, :, positions] = tensors["v"]
