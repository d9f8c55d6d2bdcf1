"""gpt-oss's MXFP4 experts in other formats: the values, the files, the counts, the refusals."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_trt.core.formats import Format
from dflash_trt.errors import DflashError
from dflash_trt.models.folder import Checkpoint, open_checkpoint
from dflash_trt.quantization.codecs import (
    decode_e4m3,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_nvfp4,
)
from dflash_trt.quantization.experts import (
    convert_experts,
    global_scale,
    mxfp4_to_nvfp4,
)
from dflash_trt.quantization.partial import partial_folder
from tests.models.helpers import edit_tensors
from tests.quantization.running import Failing, Stages, raw, read_json, read_tensors
from tests.reference.checkpoints import write_target

NVFP4, BF16 = Format.NVFP4, Format.BF16
MATRICES = [
    f"model.layers.{layer}.mlp.experts.{name}_proj"
    for layer in range(4)
    for name in ("gate_up", "down")
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 gpt-oss with native MXFP4 experts, the scales in a shard of their own."""
    folder = tmp_path_factory.mktemp("experts") / "source"
    write_target(folder, "gpt_oss", "bfloat16", num_layers=4, mxfp4=True, eos_token_id=[1, 2])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {
        name: f"{'b' if name.endswith('_scales') or '.layers.3.' in name else 'a'}.safetensors"
        for name in tensors
    }
    for file in set(places.values()):
        some = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(some, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def checkpoint(source: Path) -> Checkpoint:
    return open_checkpoint(source)


def _decoded_source(source: dict[str, torch.Tensor], name: str) -> npt.NDArray[np.float32]:
    """An expert matrix [E, out, in]."""
    scales = source[f"{name}_scales"].numpy()
    packed = source[f"{name}_blocks"].numpy().reshape(*scales.shape[:2], -1)
    return dequantize_mxfp4(packed, scales)


def _decoded_nvfp4(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """[E, out, in], decoded as ModelOpt decodes what it exported."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    packed = tensors[name].transpose(1, 2).contiguous()
    shape = (*packed.shape[:2], 2 * packed.shape[2])
    opened = qtensor.NVFP4QTensor(torch.Size(shape), torch.float32, packed)
    decoded: torch.Tensor = opened.dequantize(
        torch.float32,
        scale=tensors[f"{name}_weight_scale"].transpose(1, 2).contiguous(),
        double_scale=tensors[f"{name}_weight_scale_2"],
        block_sizes={-1: 16},
    )
    return decoded


def test_nvfp4_experts_have_the_values_they_had(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stages = Stages()
    written = convert_experts(checkpoint, NVFP4, tmp_path / "q", stages)
    before, after = read_tensors(source), read_tensors(tmp_path / "q")
    assert sorted(written.reports) == sorted(MATRICES)
    for name in MATRICES:
        values = _decoded_source(before, name)
        assert torch.equal(_decoded_nvfp4(after, name), torch.from_numpy(values)), name
        report = written.reports[name]
        assert (report.exact, report.requantized, report.error) == (values.size // 16, 0, 0)
    assert stages.totals == stages.done
    assert written.source_bytes == sum(raw(tensor).size for tensor in before.values())
    assert written.bytes == sum(raw(tensor).size for tensor in after.values())


def test_everything_else_is_copied(source: Path, checkpoint: Checkpoint, tmp_path: Path) -> None:
    convert_experts(checkpoint, NVFP4, tmp_path / "q", Stages())
    before, after = read_tensors(source), read_tensors(tmp_path / "q")
    packed = {f"{name}{end}" for name in MATRICES for end in ("_blocks", "_scales")}
    assert before.keys() - after.keys() == packed
    suffixes = ("", "_weight_scale", "_weight_scale_2")
    assert after.keys() - before.keys() == {f"{name}{end}" for name in MATRICES for end in suffixes}
    for name in before.keys() & after.keys():
        np.testing.assert_array_equal(raw(before[name]), raw(after[name]), name)
    opened = open_checkpoint(tmp_path / "q")  # the index agrees with the shards
    assert [file.name for file in opened.files] == ["a.safetensors", "b.safetensors"]
    stated = opened.config.pop("quantization_config")
    assert stated["quant_algo"] == "W4A16_NVFP4" and stated["quant_method"] == "modelopt"
    patterns = ["model.layers.*.self_attn*", "model.layers.*.mlp.router*"]
    assert stated["ignore"] == [*patterns, "lm_head", "model.embed_tokens"]
    assert opened.config == {
        key: value for key, value in checkpoint.config.items() if key != "quantization_config"
    }
    assert read_json(tmp_path / "q" / "generation_config.json")["eos_token_id"] == [1, 2]


def test_transformers_reads_the_bf16_experts_as_it_decodes_mxfp4(
    checkpoint: Checkpoint, source: Path, tmp_path: Path
) -> None:
    convert_experts(checkpoint, BF16, tmp_path / "q", Stages())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for (name, one), (_, other) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("value", "message"),
    [(255, "a block's scale is NaN"), (253, r"a block's scale is 2\^126, more than bf16 holds")],
)
def test_scales_that_are_no_numbers(source: Path, tmp_path: Path, value: int, message: str) -> None:
    broken = shutil.copytree(source, tmp_path / "broken")
    name = f"{MATRICES[3]}_scales"
    scales = read_tensors(source)[name]
    scales.view(-1)[7] = value
    edit_tensors(broken / "b.safetensors", {name: scales})
    with pytest.raises(DflashError, match=message):
        convert_experts(open_checkpoint(broken), NVFP4, tmp_path / "q", Stages())
    assert not (tmp_path / "q").exists() and not partial_folder(tmp_path / "q").exists()


BIAS = 127


def _blocks(exponents: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One row: a block of 32 random codes for each exponent."""
    generator = np.random.default_rng(seed)
    packed = generator.integers(0, 256, (1, 16 * len(exponents)), np.uint8)
    return packed, (np.array([exponents]) + BIAS).astype(np.uint8)


def _check(packed: np.ndarray, scales: np.ndarray) -> tuple[int, int]:
    """Recodes, and holds every block of 16 to the definition; exact and requantised blocks."""
    before = dequantize_mxfp4(packed, scales)
    shift = int(scales.max()) - BIAS - 8
    recoded = mxfp4_to_nvfp4(packed, scales, shift)
    after = dequantize_nvfp4(recoded.packed, recoded.scales, global_scale(shift))
    same = (after == before).reshape(-1, 16).all(axis=-1)
    assert recoded.exact == same.sum() and recoded.requantized == (~same).sum()
    fits = np.repeat(scales.astype(int) - BIAS - shift >= -9, 2, axis=-1).reshape(-1)
    assert same[fits].all()
    kept = np.repeat(fits, 8)
    np.testing.assert_array_equal(recoded.packed.reshape(-1)[kept], packed.reshape(-1)[kept])
    steps = decode_e4m3(recoded.scales).reshape(-1) * global_scale(shift)
    np.testing.assert_array_equal(
        steps[fits], np.repeat(decode_e8m0(scales), 2, axis=-1).reshape(-1)[fits]
    )
    return recoded.exact, recoded.requantized


@pytest.mark.parametrize("top", [-127, -110, -30, 0, 8, 100, 125])
def test_eighteen_exponents_in_a_row_are_exact(top: int) -> None:
    exponents = [top, *(max(top - i, -127) for i in range(18))]
    assert _check(*_blocks(exponents)) == (2 * len(exponents), 0)


def test_an_interrupted_run_continues(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = convert_experts(checkpoint, NVFP4, tmp_path / "whole", Stages())
    tensors = checkpoint.tensors.values()
    length = sum(one.length for one in tensors if one.file.name == "a.safetensors")
    failing = Failing(KeyboardInterrupt(), "converting experts to NVFP4", length)
    with pytest.raises(KeyboardInterrupt):
        convert_experts(checkpoint, NVFP4, tmp_path / "q", failing)
    assert partial_folder(tmp_path / "q").is_dir()
    stages = Stages()
    written = convert_experts(checkpoint, NVFP4, tmp_path / "q", stages)
    assert written.resumed_shards == 1 and written.reports == whole.reports
    assert "continuing: 1 of 2 shards are finished" in stages.totals
    assert "reading block scales" not in stages.totals
    for file in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "q" / file.name).read_bytes() == file.read_bytes()


def test_memory_is_bounded_by_an_expert(tmp_path: Path) -> None:
    folder = write_target(
        tmp_path / "large", "gpt_oss", "bfloat16", num_layers=1, hidden=256, intermediate=256,
        experts=32, mxfp4=True,
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    one = 512 * 256 // 2
    tracemalloc.start()
    convert_experts(checkpoint, NVFP4, tmp_path / "q", Stages())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * one
