"""An output head above 1 GiB in float32, where ONNX Runtime's constant folding stops by default.

Unfolded, its bfloat16 weights are widened in every run, and the product then takes kernels
whose rounding depends on the number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.base import Executor, FloatArray, Scores, TargetCall
from dflash_trt.building.spec import BuildSpec
from tests.pairs import bundle_pair
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.compare import assert_bitwise_equal

VOCAB, HIDDEN = 131_200, 2048
ROWS, BATCH = 8, 3
NEEDED_GIB = 8


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    """Of a Qwen3 of one thin layer, whose tied embedding is VOCAB × HIDDEN."""
    free = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    if free is None or int(free[1]) < NEEDED_GIB << 20:
        pytest.skip(f"needs {NEEDED_GIB} GiB of free memory")
    target, draft = tmp_path / "target", {"num_layers": 1, "block_size": ROWS, "dtype": "bfloat16"}
    thin = {"num_layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "intermediate": 32}
    write_target(target, "qwen3", "bfloat16", hidden=HIDDEN, vocab=VOCAB, tie=True, **thin)
    try:
        write_draft(tmp_path / "draft", target, target_layer_ids=[0], **draft)
        opened = bundle_pair(tmp_path, BuildSpec(), max_seq_len=128, max_batch=BATCH).open()
        yield opened
        opened.close()
    finally:
        (target / "model.safetensors").unlink()


def forward(executor: Executor, ids: np.ndarray, start: int, picked: list[int]) -> FloatArray:
    """Logits [B,R,V] after the rows `picked` of ids [B,S]."""
    rows = np.tile(picked, (len(ids), 1))
    starts = np.full(len(ids), start)
    logits = executor.forward(TargetCall("target_only", 0, ids, starts, rows, Scores.LOGITS)).logits
    assert logits is not None
    return logits.copy()


@pytest.mark.exhaustive
def test_a_heads_logits_keep_their_bits_above_1_gib(executor: Executor) -> None:
    """At 1 and 8 rows, alone and between neighbours."""
    assert VOCAB * HIDDEN * 4 > 2**30
    ids = np.random.default_rng(1).integers(0, VOCAB, (BATCH, ROWS))
    alone, every, last = ids[:1], list(range(ROWS)), ROWS - 1
    expected = np.stack([forward(executor, alone[:, [row]], row, [0])[0, 0] for row in every])
    assert expected.std() > 0.1
    assert_bitwise_equal(forward(executor, alone, 0, every)[0], expected, "8 rows")
    assert_bitwise_equal(forward(executor, alone, 0, [last])[0, 0], expected[last], "the last of 8")
    assert_bitwise_equal(forward(executor, ids, 0, [last])[0, 0], expected[last], "3 sequences")
    one = forward(executor, ids[:, [last]], last, [0])[0, 0]
    assert_bitwise_equal(one, expected[last], "1 row of 3 sequences")
