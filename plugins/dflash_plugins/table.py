"""The table of all operations and their kernels; a new one is added here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_plugins.accept import launch as accept
from dflash_plugins.block_attention import cases as block_attention_cases
from dflash_plugins.block_attention import launch as block_attention
from dflash_plugins.gated_delta_step import launch as gated_delta_step
from dflash_plugins.kv_cache_update import launch as kv_cache_update
from dflash_plugins.kv_feature_injection import launch as kv_feature_injection
from dflash_plugins.operation import Case, Operation
from dflash_plugins.row_sample import launch as row_sample

_TABLE = {
    "accept": (accept.OPERATIONS, accept.main_cases),
    "block_attention": (block_attention.OPERATIONS, block_attention_cases.main_cases),
    "gated_delta_step": (gated_delta_step.OPERATIONS, gated_delta_step.main_cases),
    "kv_cache_update": (kv_cache_update.OPERATIONS, kv_cache_update.main_cases),
    "kv_feature_injection": (kv_feature_injection.OPERATIONS, kv_feature_injection.main_cases),
    "row_sample": (row_sample.OPERATIONS, row_sample.main_cases),
}

FOLDERS = tuple(_TABLE)
"""The folders that hold operations."""


def operations() -> dict[str, Operation]:
    """Every operation, by name."""
    return {one.name: one for found, _ in _TABLE.values() for one in found}


def main_cases(folders: Sequence[str] = FOLDERS) -> list[Case]:
    """Shapes of public pairs. CI compiles them, and none may spill registers."""
    return [case for folder in folders for case in _TABLE[folder][1]()]


def load_kernel(name: str) -> Any:
    """The kernel function `name`, from its operation's folder; imports Triton language."""
    from dflash_plugins.accept.kernel import accept
    from dflash_plugins.block_attention.kernel import block_attention, block_attention_merge
    from dflash_plugins.gated_delta_step.kernel import gated_delta_step
    from dflash_plugins.kv_cache_update.kernel import kv_cache_update
    from dflash_plugins.kv_feature_injection.kernel import kv_feature_injection
    from dflash_plugins.row_sample.kernel import row_groups, row_sample

    attention = (block_attention, block_attention_merge)
    writes = (gated_delta_step, kv_cache_update, kv_feature_injection)
    kernels = (accept, *attention, *writes, row_groups, row_sample)
    return {one.fn.__name__: one for one in kernels}[name]
