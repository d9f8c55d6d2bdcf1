"""`kv_feature_injection` on a GPU: verify steps and prefill chunks of public drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_plugins.kv_caches import public_cases
from dflash_plugins.kv_feature_injection.launch import LAYOUTS, make_case
from dflash_plugins.operation import Case
from dflash_plugins.testing.cache_writes import MEASURED_LENGTH, make_inputs
from dflash_plugins.testing.gpu import TorchRunner

ROWS = ((1, 16), (8, 16), (64, 16), (1, 2048))
"""(Sequences, rows of each): three verify steps and one prefill chunk."""


def points() -> list[Case]:
    """The heads of public drafts, in every form of caches."""
    label = "{pair} {cache}{paged}, {batch} × {rows} rows"
    return public_cases(make_case, LAYOUTS, ROWS, MEASURED_LENGTH, label)


def measure(torch: Any, case: Case, runner: TorchRunner) -> dict[str, Any]:
    """Seconds of the kernel, and of PyTorch for the plain form.

    The bytes: k and v are read once and written once, and each row reads D/2 of cos and of sin.
    """
    tensors = runner.upload(make_inputs(case))
    k, cache = case.inputs["k"], case.inputs["k_cache"]
    tables = k.nbytes // k.shape[2]
    size = 2 * (k.nbytes + replace(k, dtype=cache.dtype).nbytes) + tables
    is_plain = case.operation.name == "kv_feature_injection"
    rivals = {"operation by operation": lambda: _inject(torch, case, tensors)} if is_plain else {}
    return runner.measure(case, tensors, rivals, size)


def _inject(torch: Any, case: Case, tensors: dict[str, Any]) -> None:
    """k_norm, RoPE and two cache writes, as in a model's PyTorch code."""
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
