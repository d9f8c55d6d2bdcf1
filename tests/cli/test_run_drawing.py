"""A bundle of engines that draw, on a stand-in GPU: built, run, and what it says of itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.tensorrt.run.executor import TensorRtExecutor
from tests.cli.conftest import Run
from tests.covering import exhaustive
from tests.standins.cuda import FakeCuda
from tests.standins.engines import stand_in
from tests.standins.plugin_tensorrt import PluginTensorRt
from tests.standins.stub_builder import FullTensorRt

BUILD = ["--executor", "tensorrt", "--precision", "fp16", "--max-seq-len", "100"]
SAMPLED = ["--temperature", 30, "--seed", 7]  # the pair is very sure of itself


@pytest.mark.parametrize(
    "options",
    [exhaustive(SAMPLED), [*SAMPLED, "--top-k", 9, "--top-p", 0.95], ["--no-speculation"], []],
)
def test_tokens_are_those_that_the_runtime_draws(
    run: Run,
    engine_config: Path,
    tmp_path: Path,
    full: PluginTensorRt,
    monkeypatch: pytest.MonkeyPatch,
    options: list[Any],
) -> None:
    closed: list[TensorRtExecutor] = []
    close = TensorRtExecutor.close
    monkeypatch.setattr(TensorRtExecutor, "close", lambda one: (closed.append(one), close(one)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("b", "cab", "129")))
    outputs = []
    for name, library, plugins in (
        ("runtime", FullTensorRt(), []),
        ("engine", full, ["--plugins"]),
    ):
        monkeypatch.setitem(sys.modules, "tensorrt", library)
        folder = tmp_path / name
        run.well("build", "--target", engine_config, *BUILD, *plugins, "-o", folder)
        with monkeypatch.context() as patch:
            cuda = FakeCuda()
            stand_in(patch, folder, cuda).version = "11.4.0"
            common = ["generate", folder, "--prompt-file", prompts, "--max-tokens", 40, "--json"]
            outcome = run.well(*common, *options)
            assert cuda.is_clean
        outputs.append([one["text"] for one in outcome.json["requests"]])
    assert outputs[0] == outputs[1]
    is_greedy = outputs[0][0] == "ab" * 20
    assert is_greedy == ("--temperature" not in options)
    plain, drawing = closed
    assert not plain.limits.draws and plain.ahead_steps == 0
    assert drawing.limits.draws and drawing._whole_rows is None
    assert (drawing.ahead_steps > 0) == ("--no-speculation" not in options)
