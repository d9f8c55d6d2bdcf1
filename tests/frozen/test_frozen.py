"""Nothing that is frozen has changed; `python -m tests.frozen.write` changes it on purpose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")
pytest.importorskip("triton", reason="Triton language (the plugins extra) is not installed")

from dflash_trt.errors import DflashError
from dflash_trt.serving.server.inputs import ModelSettings
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


def test_a_repository_of_before_is_served_or_says_what_to_do() -> None:
    """Parameters as an earlier `package` wrote them: what is missing since asks for a new one."""
    text = (Path(__file__).parent / "repository" / "config.pbtxt").read_text(encoding="utf-8")
    found = re.findall(r'key: "(\w+)" +value: { (string_value): "(.*)" }', text)
    config = json.dumps({"parameters": {name: {key: value} for name, key, value in found}})
    arguments = {"model_config": config, "model_repository": "/r", "model_version": "1"}
    settings = ModelSettings(arguments)
    assert settings.read("speculation", bool) and settings.read("threads", int) == 1
    with pytest.raises(DflashError, match=r"block_schedule: .*; package the bundle again"):
        settings.read("block_schedule", bool)
