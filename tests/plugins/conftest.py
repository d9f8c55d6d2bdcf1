"""What all tests of kernels share: the interpreter's process, compiled kernels, shapes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dflash_plugins.block_attention.attention_inputs import Inputs, attend, expect
from dflash_plugins.block_attention.cases import AttentionShape
from dflash_plugins.block_attention.reference import error_bound
from dflash_plugins.operation import DType
from dflash_plugins.testing.numeric import Run

from dflash_trt.hardware import kernels as attention
from tests.plugins.interpreter import Interpreter, assert_close

SMALL_UNIT = 6
"""Instead of UNIT_ROWS: with four splits a unit is a block of 16 rows of three heads."""


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests, of all workers, keep what they compile of `main_cases`."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs kernels in a process that interprets; this one never does."""
    pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")
    with Interpreter() as running:
        yield running


@pytest.fixture
def small_units(interpreter: Interpreter) -> Iterator[None]:
    """Attention has fewer splits from so few rows on, that the interpreter can run them."""
    usual = attention.UNIT_ROWS
    set_unit_rows(SMALL_UNIT)
    interpreter.call(set_unit_rows, SMALL_UNIT)
    yield
    set_unit_rows(usual)
    interpreter.call(set_unit_rows, usual)


def entry_parameters(ptx: str) -> tuple[str, list[str]]:
    """The name of the only kernel entry in `ptx`, and its parameters' types ("u64", "u32")."""
    ((name, parameters),) = re.findall(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    return name, re.findall(r"\.param\s+\.(\w+)", parameters)


def set_unit_rows(rows: int) -> None:
    attention.UNIT_ROWS = rows


def attention_shape(
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    length: int = 96,
    compute: DType = DType.FLOAT32,
    **other: Any,
) -> AttentionShape:
    """A small attention over a cache of its own type."""
    form = {"block_size": 4, "compute": compute, "cache": compute} | other
    return AttentionShape(query_heads, kv_heads, head_dim, length, **form)


def check_attention(run: Run, shape: AttentionShape, inputs: Inputs) -> None:
    """What `run` attends is within its bound of float64."""
    attended = attend(run, shape, inputs)
    assert attended.dtype == shape.compute.numpy
    expected = expect(shape, inputs)
    assert_close(attended, expected, error_bound(shape, inputs, expected))
