"""`dflash-trt quantize`; the options that it refuses are in tests/frozen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dflash_trt.building.observing import observe_pair, observe_target
from dflash_trt.cli import quantize as quantize_command
from dflash_trt.models.draft import read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import read_target
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.cli.conftest import Run
from tests.pairs import SilentProgress

# The bigram pair's feed-forward is 24 wide, which has no whole blocks.
NVFP4 = ["--precision", "nvfp4", "--exclude", "*.down_proj"]
FP8 = ["--precision", "fp8"]


@pytest.fixture
def models(bigram_config: Path) -> Path:
    return bigram_config.parent


def _arguments(models: Path, kind: str) -> list[object]:
    shared: list[object] = ["quantize", "--calibration", models / "prompts.jsonl"]
    if kind == "target":
        return [*shared, "--checkpoint", models / "target"]
    draft = ["--checkpoint", models / "draft"]
    return [*shared, *draft, "--target-checkpoint", models / "target"]


def _scalars(folder: Path, suffix: str) -> dict[str, np.float32]:
    with safe_open(folder / "model.safetensors", "np") as file:
        names = [name for name in file.keys() if name.endswith(suffix)]  # noqa: SIM118
        return {name.removesuffix(suffix): file.get_tensor(name)[()] for name in names}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["target", "draft"])
@pytest.mark.parametrize("precision", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_the_line_and_the_json(
    run: Run, models: Path, tmp_path: Path, kind: str, precision: list[str]
) -> None:
    shown = run.well(*_arguments(models, kind), *precision, "-o", tmp_path / "q")
    (line,) = shown.out.splitlines()
    described = run(*_arguments(models, kind), *precision, "-o", tmp_path / "j", "--json").json
    assert described["linears"] == len(_scalars(tmp_path / "q", ".input_scale"))
    assert f"{described['linears']} linears quantized" in line
    assert described["algorithm"] == precision[1].upper() and described["algorithm"] in line
    assert described["bytes"] < described["source_bytes"]
    assert all(module in line for module in described["kept"][:4])
    errors = described["relative_error"]
    assert 0 < errors["median"] <= errors["max"] < 0.2
    with safe_open(tmp_path / "q" / "model.safetensors", "np") as file:
        assert f"{errors['max_module']}.weight_scale" in file.keys()  # noqa: SIM118
    assert _names(tmp_path) == ["j", "q"]
    for name in _names(tmp_path / "q"):
        assert (tmp_path / "q" / name).read_bytes() == (tmp_path / "j" / name).read_bytes()


def test_input_scales_are_what_calibration_observes(run: Run, models: Path, tmp_path: Path) -> None:
    target, draft = read_target(models / "target"), read_draft(models / "draft")
    tokenizer = BundleTokenizer(models / "target")
    sequences = [tokenizer.encode(text) for text in ("cab", "129")]
    alone = observe_target(target, sequences, SilentProgress())
    both = observe_pair(check_pair(target, draft), sequences, SilentProgress())
    run.well(*_arguments(models, "target"), *FP8, "-o", tmp_path / "t")
    found = _scalars(tmp_path / "t", ".input_scale")
    for role in ("layers.0.o_proj", "layers.5.down_proj", "layers.2.q_proj"):
        module = target.weights[role].name.removesuffix(".weight")
        assert found[module] == np.float32(alone[role]) / np.float32(448)
    run.well(*_arguments(models, "draft"), *NVFP4, "-o", tmp_path / "d")
    found = _scalars(tmp_path / "d", ".input_scale")
    fused = max(both.draft[f"layers.1.{name}_proj"] for name in "qkv")
    for name in "qkv":
        module = f"layers.1.self_attn.{name}_proj"
        assert found[module] == np.float32(fused) / np.float32(2688)


def test_a_draft_of_another_target(run: Run, own_pair: Path, tmp_path: Path) -> None:
    models = own_pair.parent
    config = models / "draft" / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["dflash_config"]["target_layer_ids"] = [1, 2, 30]
    config.write_text(json.dumps(fields), encoding="utf-8")
    run(*_arguments(models, "draft"), *FP8, "-o", tmp_path / "q").fails(1, "draft does not fit")
    assert _names(tmp_path) == ["pair"]


def test_an_interrupted_run_says_where_it_is(
    run: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    command = [*_arguments(models, "target"), *FP8, "-o", tmp_path / "q"]
    with monkeypatch.context() as patched:
        patched.setattr(quantize_command, "observe_target", interrupt)
        outcome = run(*command)
    assert outcome.code == 130
    assert f"note: what is finished stays in {tmp_path / '.q.quantizing'}" in outcome.err
    assert _names(tmp_path) == [".q.quantizing"]
    again = run(*command)
    assert again.code == 0 and "continuing: 0 of 1 shards are finished" in again.err
    assert "reading weights" not in again.err
    assert _names(tmp_path) == ["q"]
