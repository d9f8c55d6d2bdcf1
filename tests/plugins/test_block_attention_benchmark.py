"""The benchmark's sums and rivals, on a CPU: they compute what the kernels compute."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_plugins.block_attention.checks import (
    AttentionPoint,
    Tensors,
    make_tensors,
    measure,
    points,
)
from dflash_plugins.block_attention.launch import TACTICS
from dflash_plugins.operation import Case, DType
from dflash_plugins.testing.gpu import Call
from dflash_plugins.testing.interpreter import Interpreter

from tests.plugins.conftest import attention_shape

torch = pytest.importorskip("torch")


class InterpretingRunner:
    """Stands in for a GPU; every call takes a second."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter
        self.names: list[tuple[str, int]] = []

    def prepare(self, case: Case, tensors: Tensors, tactic: int = 0) -> tuple[Call, Tensors]:
        self.names.append((case.operation.name, tactic))
        specs = case.outputs
        outputs = {name: torch.empty(spec.shape) for name, spec in specs.items()}

        def work() -> None:
            arrays: dict[str, Any] = {}
            for name in case.operation.inputs:
                tensor = tensors[name]
                bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
                arrays[name] = bits.numpy().view(case.inputs[name].dtype.numpy)
            results = self.interpreter.run(case.operation.name, arrays, case.attributes, tactic)
            for name, result in results.items():
                outputs[name].copy_(torch.from_numpy(result))

        return work, outputs

    def seconds(self, work: Call) -> float:
        work()
        return 1.0


@pytest.mark.parametrize("cache", [DType.FLOAT32, DType.FLOAT8])
def test_rivals_compute_the_same(interpreter: Interpreter, cache: DType) -> None:
    shape = attention_shape(2, 1, length=1024, cache=cache)
    runner = InterpretingRunner(interpreter)
    row = measure(torch, AttentionPoint("small", shape, 2, 570, 4), runner, "cpu")
    assert row["error"] < 1e-5
    assert set(row["rival_seconds"]) == {"sdpa", "concatenate"}
    names = ["block_attention_split" + "_fp8" * (cache is DType.FLOAT8), "block_attention_merge"]
    calls = [((names[0], one), (names[1], 0)) for one in TACTICS]
    assert runner.names == [call for both in calls for call in both]
    assert (row["launches"], row["tactic_seconds"]) == (2, [1.0] * len(TACTICS))
    kv, rows = 2 * 574 * 64 * cache.numpy.itemsize, 2 * 4 * 2 * 64 * 4
    assert row["bytes_per_second"] == row["required_bytes"] == 2 * (kv + rows)


@pytest.mark.parametrize("window", [0, 20])
def test_a_chunks_rivals_compute_the_same(interpreter: Interpreter, window: int) -> None:
    shape = attention_shape(2, 1, length=128, is_causal=True, window=window)
    point = AttentionPoint("small", shape, 1, 70, 40)
    row = measure(torch, point, InterpretingRunner(interpreter), "cpu")
    assert (row["failed_rivals"], set(row["rival_seconds"])) == ({}, {"sdpa"})
    assert row["error"] < 1e-5
    keys = 40 * window if window else sum(range(71, 111))
    assert row["flops_per_second"] == row["required_flops"] == 4 * 2 * 64 * keys
    assert "bytes_per_second" not in row


def test_pytorch_reads_no_paged_points_which_are_scattered(interpreter: Interpreter) -> None:
    point = AttentionPoint("small", attention_shape(2, 1, page_size=32), 2, 80, 4)
    row = measure(torch, point, InterpretingRunner(interpreter), "cpu")
    assert (row["error"], row["rival_seconds"], row["launches"]) == (None, {}, 1)
    assert row["failed_rivals"] == {}
    table = make_tensors(torch, point, "cpu")["page_table"]
    assert sorted(table.flatten().tolist()) == list(range(6))


def test_every_pair_cache_layout_context_and_batch_is_measured() -> None:
    found = points()
    assert len({point.name for point in found}) == len(found)
    chunks = [point for point in found if point.is_chunk]
    assert len(chunks) == 4 * 2 * 2 * 3
    assert len(found) - len(chunks) == 3 * 2 * 2 * 4 * 3
