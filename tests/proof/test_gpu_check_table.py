"""The GPU check's tables: of its parts, and of the random pairs that they build."""

from __future__ import annotations

import pickle
from itertools import product

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_trt.graph.form import CacheDtype
from dflash_trt.proof.gpu_check.contracts import CONTRACTS
from dflash_trt.proof.gpu_check.parts import check_parts
from dflash_trt.proof.gpu_check.random_pairs import PAIRS


def test_pairs_meet_every_kind_in_each_cache_and_without_plugins() -> None:
    columns = {
        "group": {1, 4, 8},
        "attention": {"full", "sinks", "window"},
        "head_dim": {64, 128},
    }
    for chosen in (
        [pair for pair in PAIRS if pair.is_paged],
        [pair for pair in PAIRS if not pair.is_paged],
        [pair for pair in PAIRS if not pair.needs_plugins],
    ):
        for name, values in columns.items():
            assert {getattr(pair, name) for pair in chosen} == values, name
    caches = {(pair.is_paged, pair.cache_dtype) for pair in PAIRS}
    assert caches == set(product((False, True), CacheDtype))


def test_parts_have_names_of_their_own() -> None:
    parts = check_parts()
    names = [part.name for part in parts]
    for part in parts:
        assert callable(pickle.loads(pickle.dumps(part.work))), "a child imports it"
    assert len(set(names)) == len(names) == 2 * 6 + 1 + 8 + 4 + 4
    for contract in CONTRACTS:
        assert any(name.startswith(contract.part) for name in names), contract
