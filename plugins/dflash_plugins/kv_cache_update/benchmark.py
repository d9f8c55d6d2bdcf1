"""`kv_cache_update` on a GPU: verify steps and prefill chunks of public pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_plugins.kv_cache_update.launch import LAYOUTS, make_case
from dflash_plugins.kv_caches import public_cases
from dflash_plugins.operation import Case
from dflash_plugins.testing.cache_writes import MEASURED_LENGTH, make_inputs
from dflash_plugins.testing.gpu import TorchRunner

ROWS = ((1, 16), (8, 16), (64, 16), (1, 512), (1, 2048))
"""(Sequences, rows of each): three verify steps and two prefill chunks."""


def points() -> list[Case]:
    """The heads of public pairs, in every form of caches."""
    label = "{pair} {cache}{paged}, {batch} × {rows} rows"
    return public_cases(make_case, LAYOUTS, ROWS, MEASURED_LENGTH, label)


def measure(torch: Any, case: Case, runner: TorchRunner) -> dict[str, Any]:
    """Seconds of the kernel and of PyTorch; the bytes are k and v, read once and written once."""
    tensors = runner.upload(make_inputs(case))
    k, cache = case.inputs["k"], case.inputs["k_cache"]
    size = 2 * (k.nbytes + replace(k, dtype=cache.dtype).nbytes)
    rivals = {"operation by operation": lambda: update_by_operation(torch, case, tensors)}
    return runner.measure(case, tensors, rivals, size)


def update_by_operation(torch: Any, case: Case, tensors: dict[str, Any]) -> None:
    """Two scatters, as in a model's PyTorch code; for FP8 caches after dividing by the scale."""
    positions = tensors["positions"]
    sequence = torch.arange(len(positions), device=positions.device)[:, None]
    for index, name in enumerate("kv"):
        rows, cache = tensors[name].transpose(1, 2), tensors[f"{name}_cache"]
        if "kv_scales" in tensors:
            rows = (rows.float() / tensors["kv_scales"][index]).clamp(-448, 448).to(cache.dtype)
        if cache.dtype.itemsize == 1:  # PyTorch has no scatter of FP8: as bytes
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
        if "page_table" in tensors:
            page_size = case.attributes["page_size"]
            pages = tensors["page_table"].gather(1, positions // page_size)
            cache[pages.long(), positions % page_size] = rows
        else:
            cache[sequence, :, positions] = rows
