"""`dflash-trt quantize`; the options that it refuses are in tests/frozen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dflash_trt.cli import quantize as quantize_command
from dflash_trt.models.folder import open_checkpoint
from tests.cli.conftest import Run
from tests.reference.checkpoints import write_target

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


def test_an_interrupted_run_says_where_it_is(
    run: Run, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    command = [*_arguments(models, "target"), *FP8, "-o", tmp_path / "q"]
    with monkeypatch.context() as patched:
        patched.setattr(quantize_command, "observe", interrupt)
        outcome = run(*command)
    assert outcome.code == 130
    assert f"note: what is finished stays in {tmp_path / '.q.quantizing'}" in outcome.err
    assert _names(tmp_path) == [".q.quantizing"]
    again = run(*command)
    assert again.code == 0 and "continuing: 0 of 1 shards are finished" in again.err
    assert "reading weights" not in again.err
    assert _names(tmp_path) == ["q"]


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4") / "source"
    return write_target(folder, "gpt_oss", "bfloat16", num_layers=4, mxfp4=True)


def test_experts_are_converted(run: Run, mxfp4: Path, tmp_path: Path) -> None:
    arguments = ["quantize", "--checkpoint", mxfp4, "--precision", "nvfp4"]
    shown = run.well(*arguments, "-o", tmp_path / "q")
    described = run(*arguments, "--json", "-o", tmp_path / "j").json
    blocks = 4 * 8 * (2 * 96 * 64 + 64 * 96) // 16
    assert (described["exact_blocks"], described["requantized_blocks"]) == (blocks, 0)
    assert len(described["tensors"]) == 8
    assert f"8 tensors, {blocks:,} blocks of 16 exact, 0 quantized again" in shown.out
    assert described["tensors"].keys() < open_checkpoint(tmp_path / "q").tensors.keys()
