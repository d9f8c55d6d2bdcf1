"""The optional packages that training needs, imported by name or refused with one clear line."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dflash_trt.errors import DflashError


def training_module(name: str) -> Any:
    """Import `name`, or raise a DflashError that says how to install the `train` extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise DflashError(
            f"training needs {name}, which cannot be imported ({error})",
            fix="pip install 'dflash-trt[train]'",
        ) from error
