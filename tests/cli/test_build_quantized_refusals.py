"""`build --precision` that cannot be: one clear line, and nothing is left anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import dflash_trt.bundle.quantize as bundle_quantize
from dflash_trt.calibration import memory
from tests.cli.conftest import Outcome, Run
from tests.quantization.running import quantize_in_place

FP8 = ["--precision", "fp8"]


@pytest.fixture
def build(run: Run, own_pair: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Builds `own_pair` to tmp_path/out/b, which fails and leaves nothing anywhere."""

    def call(*arguments: object) -> Outcome:
        before = sorted(tmp_path.rglob("*"))
        outcome = run("build", "--target", own_pair, "-o", tmp_path / "out" / "b", *arguments)
        assert outcome.code and outcome.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return outcome

    return call


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--calibration", "x.jsonl"], ["--calibration", "does nothing without a precision"]),
        (["--exclude", "*"], ["--exclude", "does nothing", "--precision fp8 or nvfp4"]),
        (["--quantize-lm-head"], ["--quantize-lm-head", "does nothing"]),
        (["--quantize-lm-head", "--draft-precision", "fp8"], ["--quantize-lm-head"]),
        (["--precision", "fp32", "--exclude", "*"], ["--exclude", "does nothing"]),
        (["--draft-precision", "bf16"], ["--draft-precision", "neither model is quantised"]),
        (["--precision", "bf16"], ["--precision", "for engines", "float32"]),
        (["--precision", "int4"], ["--precision", "int4"]),
        ([*FP8, "--exclude", "*.nothing"], ["'*.nothing' matches no linear of target or draft"]),
        ([*FP8, "--exclude", "*"], ["nothing is left to quantize"]),
        (
            ["--draft-precision", "fp8", "--exclude", "model.*"],
            ["'model.*' matches no linear of draft"],
        ),
        (["--precision", "nvfp4"], ["down_proj", "24 input columns", "--exclude '*.down_proj'"]),
        ([*FP8, "--calibration", "no-such.jsonl"], ["no-such.jsonl", "cannot be read"]),
    ],
)
def test_options_that_do_not_go_together(
    build: Callable[..., Outcome], arguments: list[object], pieces: list[str]
) -> None:
    build(*arguments).fails(2, *pieces)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ('{"text": "a"}', '"prompt"'),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": "a"}\nnot json', "texts.jsonl:2"),
        ('{"prompt": "a"}', "no sequence is long enough for a draft block"),
    ],
)
def test_calibration_texts_that_cannot_be_used(
    build: Callable[..., Outcome], tmp_path: Path, text: str, piece: str
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(text)
    build(*FP8, "--calibration", texts).fails(2, piece)


def test_texts_are_looked_at_before_any_download(run: Run, tmp_path: Path) -> None:
    command = ["build", "--target", "qwen3-8b", *FP8, "-o", tmp_path / "b"]
    run(*command).fails(2, "qwen3-8b.yaml has neither calibration texts nor prompts")
    run(*command, "--calibration", tmp_path / "x.jsonl").fails(2, "x.jsonl: cannot be read")


def test_no_texts_at_all(build: Callable[..., Outcome], own_pair: Path) -> None:
    own_pair.write_text(own_pair.read_text().replace("prompts: prompts.jsonl\n", ""))
    build(*FP8).fails(2, "--calibration", "pair.yaml has neither calibration texts nor prompts")


def test_a_target_without_a_tokenizer(build: Callable[..., Outcome], own_pair: Path) -> None:
    (own_pair.parent / "target" / "tokenizer.json").unlink()
    build(*FP8).fails(1, "has no tokenizer.json, which calibration texts need")


@pytest.mark.parametrize(
    ("owner", "fix"),
    [("target", "leave out --precision"), ("draft", "add --draft-precision bf16")],
)
def test_what_is_quantised_already(
    build: Callable[..., Outcome], own_pair: Path, owner: str, fix: str
) -> None:
    folder = quantize_in_place(own_pair, owner)
    build(*FP8).fails(1, f"{folder}: is quantized already", fix)


def test_damaged_quantised_checkpoints(build: Callable[..., Outcome], own_pair: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = quantize_in_place(own_pair, "target")
    path, name = folder / "model.safetensors", "model.layers.3.mlp.up_proj.input_scale"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    build("--draft-precision", "fp8").fails(1, name, "which is missing")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A8_AWQ"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    build("--draft-precision", "fp8").fails(1, "W4A8_AWQ", "supported are ModelOpt's FP8")


def test_a_disk_that_is_too_small(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(bundle_quantize, "shutil", usage)
    line = build(*FP8).fails(1, "the quantized weights need", "1,000 are free")
    assert f"{tmp_path}/out/b: " in line and "building-" not in line


def test_a_machine_that_is_too_small(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 10)
    build(*FP8).fails(1, "observing activations in float32 needs about", "0.0 GiB are available")


def test_a_failed_write_is_about_the_bundle(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_trt.quantization.shards.ShardWriter.write", fail)
    line = build(*FP8).fails(1, "No space left on device", "nothing was left behind")
    assert f"{tmp_path}/out/b: " in line
