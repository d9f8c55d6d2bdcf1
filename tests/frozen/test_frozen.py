"""Nothing that is frozen has changed; `python -m tests.frozen.write` changes it on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from tests.frozen.bundles import write_bundles
from tests.frozen.golden import OF_BUNDLES, differences, read
from tests.frozen.graphs import graph_facts
from tests.frozen.pairs import PAIRS

SHOWN = 40


def check(want: object, got: object) -> None:
    found = differences(want, got)
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    assert not found, "\n".join(["frozen facts have changed:", *found[:SHOWN], *more])


@pytest.mark.parametrize("name", PAIRS)
def test_graphs(name: str, tmp_path: Path) -> None:
    want = {key: value for key, value in read("graphs").items() if key.startswith(f"{name}/")}
    check(want, graph_facts(tmp_path, [name]))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    write_bundles(folder)
    return folder


@pytest.mark.parametrize("name", OF_BUNDLES)
def test_bundles(name: str, bundles: Path) -> None:
    check(read(name), OF_BUNDLES[name](bundles))
