"""Damaged bundles and bad calls end in one clear line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.errors import DflashError
from tests.backends.steps import forward_rows, one_chunk, one_step, random_ids
from tests.inspection import arrays, loaded_graphs
from tests.pairs import PairFactory

Damage = Callable[[Path], object]

DAMAGES: dict[str, Damage] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(b"\x93not a graph\xff\x00" * 99),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
}


@pytest.fixture
def bundle(make_pair: PairFactory, tmp_path: Path) -> Bundle:
    """A bundle of its own, which a test may damage."""
    built = make_pair()
    folder = tmp_path / "bundle"
    shutil.copytree(built.bundle.folder, folder)
    return Bundle(folder, built.bundle.manifest)


USES: dict[str, Callable[[Executor], object]] = {
    "target_only": lambda e: e.forward(one_chunk(np.array([[1, 2]]), 1, graph="target_only")),
    "target": lambda e: e.speculate(one_step()),
    "draft": lambda e: e.speculate(one_step()),
}


def check_line(error: DflashError, *pieces: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 600
    for piece in pieces:
        assert piece in message


@pytest.mark.covering(1)
@pytest.mark.parametrize("graph", USES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_graph_is_named_in_one_line(bundle: Bundle, graph: str, damage: str) -> None:
    DAMAGES[damage](bundle.folder / f"{graph}.onnx")
    with pytest.raises(DflashError) as caught:
        USES[graph](open_executor(bundle, threads=1))
    told = "no such file" if damage == "missing" else "inspect --verify"
    check_line(caught.value, f"{graph}.onnx", told)


@pytest.mark.parametrize("token", [256, 10**9])
def test_a_token_outside_the_vocabulary_is_one_line_and_harms_nothing(
    bundle: Bundle, token: int
) -> None:
    executor = open_executor(bundle, threads=1)
    call = one_chunk(random_ids(256, 1, 4), 3)
    expected = executor.forward(call).choice_ids.copy()
    with pytest.raises(DflashError) as caught:
        executor.forward(one_chunk(np.full((1, 4), token), 3))
    check_line(caught.value, "target.onnx")
    np.testing.assert_array_equal(executor.forward(call).choice_ids, expected)


def test_a_call_that_is_refused_loads_nothing(bundle: Bundle) -> None:
    executor = open_executor(bundle, threads=1)
    with pytest.raises(ValueError, match="block size"):
        executor.speculate(one_step(9))
    assert not loaded_graphs(executor)
    executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.speculate(one_step())


def test_a_sequence_that_overflowed_does_not_poison_the_next(bundle: Bundle) -> None:
    executor = open_executor(bundle, threads=1)
    ids = random_ids(256, 1, 4)
    expected = forward_rows(executor, ids, [0])
    for array in arrays(executor).values():
        array[0] = np.nan
    executor.release_slots(0)
    np.testing.assert_array_equal(forward_rows(executor, ids, [0]), expected)


@pytest.mark.parametrize(
    ("owner", "key", "value"), [("target", "layers", 7), ("draft", "head_dim", 8)]
)
def test_a_manifest_that_lies_about_the_caches_is_refused_when_a_graph_is_opened(
    bundle: Bundle, owner: str, key: str, value: int
) -> None:
    dims = getattr(bundle.manifest, owner).model_copy(update={key: value})
    lying = Bundle(bundle.folder, bundle.manifest.model_copy(update={owner: dims}))
    with pytest.raises(DflashError) as caught:
        open_executor(lying, threads=1, graphs=("target",))
    check_line(caught.value, "target.onnx", "caches", "build the bundle again")
