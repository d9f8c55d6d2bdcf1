"""`kv_feature_injection` on a GPU: verify steps and prefill chunks of public drafts."""

from __future__ import annotations

import math
from typing import Any

from dflash_plugins.cache_writes import public_cases
from dflash_plugins.kv_feature_injection.launch import LAYOUTS, make_case
from dflash_plugins.operation import Case
from dflash_plugins.testing.cache_writes import make_inputs
from dflash_plugins.testing.gpu import TorchRunner, to_torch

LENGTH = 4096
ROWS = ((1, 16), (8, 16), (64, 16), (1, 2048))
"""Sequences and rows of each: three verify steps, and a chunk of a prompt."""


def points() -> list[Case]:
    """Both drafts, types of cache and layouts."""
    label = "{pair} {cache}{paged}, {batch} × {rows} rows"
    return public_cases(make_case, LAYOUTS, ROWS, length=LENGTH, label=label)


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
