"""A Gemma 4 pair on the command line: what is shown of it, and what is refused, in a line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.cli.main import main
from dflash_trt.models.quantized_weights import quantized_linears
from dflash_trt.models.target import read_target
from tests.cli.bigram import write_tokenizer
from tests.cli.stub_builds import build_with_kernels
from tests.covering import exhaustive
from tests.pairs import PairFactory, TinyPair


@pytest.fixture(scope="module")
def pair(make_pair: PairFactory) -> TinyPair:
    target = {"vocab": 300, "num_layers": 3, "tie": True}
    return make_pair("gemma4", target, {"target_layer_ids": [0, 2]}, max_seq_len=128)


@pytest.mark.parametrize("layout", ["linear", exhaustive("paged")])
def test_engines_with_kernels_attend_by_ours(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Where TensorRT has no kernel for heads of 32; over pages in every layer."""
    found = build_with_kernels(pair, tmp_path, "--kv-layout", layout, largest=16)
    kernel = "block_attention" + "_paged" * (layout == "paged")
    for graph in ("target", "target_only"):
        assert found[graph][kernel] == "plugin"
        is_native = "native" in found[graph].values()
        assert is_native == (layout == "linear")
    assert main(["inspect", str(tmp_path / "bundle")]) == 0
    assert "one projection, their attention by a kernel of ours" in capsys.readouterr().out


def test_quantize_takes_every_linear(pair: TinyPair, capfd: pytest.CaptureFixture[str]) -> None:
    """What K and V share is one; an FP8 cache of it has no scales."""
    output, texts = pair.folder / "quantised", pair.folder / "texts.jsonl"
    texts.write_text('{"prompt": "calibrate"}\n')
    write_tokenizer(pair.folder / "target")
    command = ["quantize", "--checkpoint", str(pair.folder / "target"), "--precision", "fp8"]
    command += ["--calibration", str(texts), "-o", str(output)]
    assert main([*command, "--kv-scales"]) == 2
    assert "K and V of some layers are one projection" in capfd.readouterr().err
    assert main(command) == 0
    found = quantized_linears(read_target(output).weights)
    assert len(found) == 3 * 7 - 1 and "layers.2.v_proj" not in found
