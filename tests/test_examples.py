"""Every example runs as its first lines say, on the demo pair."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.models.families import FAMILIES
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.served import serving

EXAMPLES = Path(__file__).parent.parent / "examples"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dflash_trt.build("demo", tmp_path_factory.mktemp("examples") / "demo-bundle").folder


@pytest.fixture(scope="module")
def address(tritonserver: TritonServerBinary, demo: Path) -> Iterator[str]:
    with serving(demo, demo) as served:
        yield served.grpc


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example with arguments; what it printed."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_each_says_what_it_needs_and_how_to_run_it() -> None:
    found = sorted(EXAMPLES.glob("*.py"))
    assert len(found) == 5
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^Needs ", text, re.MULTILINE), path
        assert f"\nRun it: python examples/{path.name}" in text, path
        assert len(text.splitlines()) < 60, path


def test_generate(run: Run, demo: Path) -> None:
    shown = run("generate.py", demo)
    assert shown.count("acceptance length ") == 3
    with dflash_trt.load(demo) as pair:
        (result,) = pair.generate(["route #5399 to #5409"], max_tokens=32)
    streamed = shown.split("in brackets\n")[1].split("\n# two")[0]
    assert re.sub(r"[\[\]]", "", streamed) == result.text


@pytest.mark.exhaustive
def test_stream_from_server(run: Run, address: str) -> None:
    assert run("stream_from_server.py", address.removeprefix("grpc://")).count(" → ") == 3


@pytest.mark.exhaustive
def test_quantise_and_compare(run: Run, tmp_path: Path) -> None:
    shown = run("quantise_and_compare.py", tmp_path, 3)
    size = re.match(r"weights: (\d+)% of the bytes\n", shown)
    assert size is not None and int(size[1]) < 80
    assert shown.count("tokens agree; acceptance length") == 3


@pytest.mark.exhaustive
def test_sweep_and_plot(run: Run, address: str, demo: Path, tmp_path: Path) -> None:
    arguments = (address.removeprefix("grpc://"), demo / "prompts.jsonl", tmp_path / "sweep", 2, 8)
    shown = run("sweep_and_plot.py", *arguments)
    assert shown.count("tokens/s per user") == 2
    assert list((tmp_path / "sweep").glob("report-*.png"))


def test_add_a_family(run: Run, demo: Path, tmp_path: Path) -> None:
    known = list(FAMILIES)
    try:
        shown = run("add_a_family.py", tmp_path)
    finally:
        FAMILIES[:] = known
    with dflash_trt.load(demo) as pair:
        (result,) = pair.generate(["fleet #6400 to #6410 in kyiv at load 5\n"], max_tokens=32)
    assert shown == f"toy: {result.text!r}\n"
