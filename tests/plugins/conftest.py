"""The interpreter's process, one for all tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dflash_plugins.testing.interpreter import Interpreter

from dflash_trt.graph.form import CacheDtype, GraphForm, Precision

KERNEL_FORMS = [
    pytest.param(GraphForm(Precision.BFLOAT16, page_size=page_size, cache_dtype=dtype), id=name)
    for name, page_size, dtype in (
        ("fp8", None, CacheDtype.FP8),
        ("paged", 16, CacheDtype.COMPUTE),
        ("paged_fp8", 16, CacheDtype.FP8),
    )
]
"""Forms whose every attention and cache write is a kernel's."""

WRITTEN_HEADS = [(8, 128), (8, 64), (1, 256), (20, 64), (3, 80)]
"""KV heads and head sizes of public pairs, a single head, more heads than one program takes, and a
head size that is no power of two."""


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs kernels in a process that interprets; this one never does."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    with Interpreter() as running:
        yield running
