"""Quantised checkpoints: every byte beside ModelOpt's, what is written, what is refused."""

from __future__ import annotations

import contextlib
import io
import shutil
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.core.formats import QUANTIZED, Format
from dflash_trt.errors import DflashError
from dflash_trt.models.draft import DraftSpec, read_draft
from dflash_trt.models.folder import open_checkpoint
from dflash_trt.models.quantized_weights import read_kv_scales
from dflash_trt.models.safetensors_header import ITEM_BYTES
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.quantization import tensor_rows as rows_module
from dflash_trt.quantization.scales import Activations
from tests.covering import exhaustive
from tests.models.helpers import edit_tensors
from tests.quantization.running import Stages, amax_of_all, quantize, raw, read_json, read_tensors
from tests.reference.checkpoints import Storage, write_draft, write_target

NVFP4, FP8 = Format.NVFP4, Format.FP8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/ (several shards, bf16), tied/ (float32) and draft/ (float32)."""
    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"num_layers": 6, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab": 64}
    write_target(root / "target", "llama", "bfloat16", attention_bias=True, shards=3, **sizes)
    write_target(root / "tied", "qwen3", tie=True, **sizes)
    write_draft(root / "draft", root / "target")
    (root / "target" / "chat_template.jinja").write_text("{{ messages }}")
    (root / "target" / "tokenizer.json").write_text("{}")
    (root / "target" / "LICENSE").write_text("free")
    (root / "target" / "modeling_x.py").write_text("code")
    (root / "target" / "pytorch_model.bin").write_bytes(b"pickle")
    return root


@pytest.fixture
def target(models: Path) -> TargetSpec:
    return read_target(models / "target")


@pytest.fixture
def draft(models: Path) -> DraftSpec:
    return read_draft(models / "draft")


def test_scales_of_an_fp8_cache_lie_beside_their_projections(models: Path, tmp_path: Path) -> None:
    """Those of a layer that stays as it is too."""
    spec = read_target(models / "tied")
    amax = amax_of_all(spec) | {
        f"layers.{layer}.{kind}_cache": 44.8 * (layer + 1) * (1 + (kind == "v"))
        for layer in range(6)
        for kind in "kv"
    }
    options: dict[str, Any] = {"exclude": ("model.layers.0.*",), "kv_scales": True}
    known = Activations.known(amax)
    written = quantize(spec, tmp_path / "q", FP8, activations=known, **options)
    assert not any(module.startswith("model.layers.0.") for module in written.errors)
    again = read_target(tmp_path / "q")
    tensors = again.checkpoint.tensors
    for layer in range(6):
        scales = read_kv_scales(tensors, again.weights, again.quantization, layer)
        assert scales == pytest.approx((0.1 * (layer + 1), 0.2 * (layer + 1)), rel=1e-6)
        module = f"model.layers.{layer}.self_attn.k_proj"
        assert tensors[f"{module}.k_scale"].file == tensors[f"{module}.weight"].file
    kept = "model.layers.0.self_attn.k_proj.weight"
    old, new = (read_tensors(folder)[kept] for folder in (models / "tied", tmp_path / "q"))
    assert (raw(old) == raw(new)).all()
    stated = read_json(tmp_path / "q" / "hf_quant_config.json")["quantization"]
    assert stated["kv_cache_quant_algo"] == "FP8"
    with pytest.raises(DflashError, match=r"the largest value of layers\.0\.k_cache .* is 0"):
        quantize(spec, tmp_path / "r", FP8, kv_scales=True)


def test_other_files_come_along_but_no_code_and_no_pickle(
    target: TargetSpec, tmp_path: Path
) -> None:
    quantize(target, tmp_path / "q")
    names = {path.name for path in (tmp_path / "q").iterdir()}
    shards = {file.name for file in target.checkpoint.files}
    assert names == shards | {
        "config.json",
        "hf_quant_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "tokenizer.json",
        "LICENSE",
    }
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == "{{ messages }}"
    config = read_json(tmp_path / "q" / "config.json")
    added = config.pop("quantization_config")
    assert config == target.checkpoint.config
    assert added["quant_method"] == "modelopt" and added["quant_algo"] == "NVFP4"
    assert added["ignore"] == ["lm_head", "model.embed_tokens"]


def test_a_tied_head_is_kept(models: Path, tmp_path: Path) -> None:
    tied = read_target(models / "tied")
    with pytest.raises(DflashError, match="--quantize-lm-head: the lm_head is tied") as caught:
        quantize(tied, tmp_path / "q", quantize_lm_head=True)
    assert caught.value.usage and not list(tmp_path.iterdir())
    assert quantize(tied, tmp_path / "q").kept == ("lm_head", "model.embed_tokens")


def test_refused_options(target: TargetSpec, draft: DraftSpec, tmp_path: Path) -> None:
    for model, options, piece in (
        (target, {"exclude": ("*.mlps.*",)}, r"'\*\.mlps\.\*' matches no linear.*model\.layers\.0"),
        (target, {"exclude": ("*",)}, "nothing is left to quantize"),
        (draft, {"quantize_lm_head": True}, "a draft borrows the target's lm_head"),
    ):
        with pytest.raises(DflashError, match=piece) as caught:
            quantize(model, tmp_path / "q", **options)  # type: ignore[arg-type]
        assert caught.value.usage and not list(tmp_path.iterdir())


def test_odd_input_sizes_are_refused_for_nvfp4_only(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "odd", num_layers=1, intermediate=72, hidden=32, heads=2)
    spec = read_target(folder)
    wanted = r'down_proj.weight" has 72 input columns.*exclude .\*\.down_proj'
    with pytest.raises(DflashError, match=wanted):
        quantize(spec, tmp_path / "q")
    quantize(spec, tmp_path / "q", exclude=("*.down_proj",))
    quantize(spec, tmp_path / "q8", FP8)
    with pytest.raises(DflashError, match="overlaps the checkpoint"):
        quantize(spec, tmp_path, FP8, overwrite=True)


def test_a_quantised_checkpoint_is_refused(target: TargetSpec, tmp_path: Path) -> None:
    written = quantize(target, tmp_path / "q", FP8)
    with pytest.raises(DflashError, match="quantized"):
        quantize(read_target(written.folder), tmp_path / "again")
    config = target.checkpoint.config | {"quantization_config": {"quant_method": "fp8"}}
    stated = replace(target, checkpoint=replace(target.checkpoint, config=config))
    with pytest.raises(DflashError, match="is quantized already; quantize the original"):
        quantize(stated, tmp_path / "again")
    narrow = {role: replace(entry, dtype="U8") for role, entry in target.weights.items()}
    with pytest.raises(DflashError, match=r"is quantized already: tensor .* is U8"):
        quantize(replace(target, weights=narrow), tmp_path / "again")


def test_weights_that_are_not_finite(models: Path, tmp_path: Path) -> None:
    spec = read_draft(shutil.copytree(models / "draft", tmp_path / "draft"))
    name = "layers.1.mlp.up_proj.weight"
    weight = read_tensors(spec.checkpoint.path)[name]
    weight[5, 7] = float("nan")
    edit_tensors(spec.checkpoint.files[0], {name: weight})
    with pytest.raises(DflashError, match=r'"layers.1.mlp.up_proj.weight" holds NaN or inf'):
        quantize(spec, tmp_path / "q")
    quantize(spec, tmp_path / "q", exclude=("layers.1.mlp.*",))


@pytest.mark.parametrize(
    ("amax", "piece"),
    [
        ({"layers.0.down_proj": 0.0}, r"layers\.0\.mlp\.down_proj over the calibration texts is 0"),
        ({"layers.0.down_proj": float("nan")}, "is nan"),
        (None, r"no input of layers\.0\.self_attn\.q_proj, .* and 11 more"),
    ],
)
def test_inputs_that_calibration_did_not_see(
    draft: DraftSpec, tmp_path: Path, amax: dict[str, float] | None, piece: str
) -> None:
    seen = {} if amax is None else amax_of_all(draft) | amax
    with pytest.raises(DflashError, match=piece):
        quantize(draft, tmp_path / "q", activations=Activations.known(seen))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("algorithm", QUANTIZED)
def test_chunks_of_rows_change_nothing(
    draft: DraftSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Format
) -> None:
    quantize(draft, tmp_path / "whole", algorithm)
    monkeypatch.setattr(rows_module, "CHUNK_ELEMENTS", 40)
    quantize(draft, tmp_path / "chunks", algorithm)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "chunks")]
    assert files[0] == files[1]


LAYERS = 2


@dataclass(frozen=True)
class Exported:
    """A checkpoint, what ModelOpt made of it and what this project did."""

    source: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor]
    their_folder: Path
    our_folder: Path


def _export(folder: Path, dtype: Storage, algorithm: Format, exclude: tuple[str, ...]) -> Any:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    transformers = pytest.importorskip("transformers")
    source = write_target(
        folder / "source", "qwen3", dtype, num_layers=LAYERS, head_dim=32, shards=2
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    config = dict(getattr(mtq, f"{algorithm.algorithm}_DEFAULT_CFG"))
    config["quant_cfg"] = [
        *config["quant_cfg"],
        *({"quantizer_name": pattern, "enable": False} for pattern in exclude),
    ]
    ids = torch.arange(96).reshape(3, 32) * 37 % 256
    with contextlib.redirect_stdout(io.StringIO()):
        # Two steps: with a loop inside `quantize`, NVFP4 would run where only CUDA can.
        model = mtq.quantize(model, config, None)
        mtq.calibrate(model, "max", lambda quantized: quantized(ids))
        amax = {
            _role(name): float(module.amax)
            for name, module in model.named_modules()
            if name.endswith(".input_quantizer") and module.is_enabled and module.amax is not None
        }
        export.export_hf_checkpoint(model, export_dir=folder / "theirs")
    spec = read_target(source)
    quantize(spec, folder / "ours", algorithm, activations=Activations.known(amax), exclude=exclude)
    return Exported(
        *(read_tensors(folder / name) for name in ("source", "theirs", "ours")),
        folder / "theirs",
        folder / "ours",
    )


def _role(quantizer: str) -> str:
    parts = quantizer.removesuffix(".input_quantizer").split(".")
    return ".".join([*parts[1:3], parts[-1]])


@pytest.fixture(
    scope="module",
    params=[
        ("float32", Format.NVFP4, ()),
        exhaustive(("bfloat16", Format.NVFP4, ("*.layers.1.mlp.*", "*.o_proj*"))),
        exhaustive(("float32", Format.FP8, ())),
        ("bfloat16", Format.FP8, ("*.layers.0.self_attn.*",)),
    ],
    ids=lambda case: f"{case[1].value}-{case[0]}",
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    found: Exported = _export(tmp_path_factory.mktemp("modelopt"), *request.param)
    return found


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_every_tensor_has_the_same_bytes(exported: Exported) -> None:
    """Except FP8 codes of bf16 weights, which ModelOpt rounds twice; see quantization/codecs.py."""
    assert exported.ours.keys() == exported.theirs.keys()
    for name, theirs in exported.theirs.items():
        ours = exported.ours[name]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
        if ours.dtype is torch.float8_e4m3fn and exported.source.get(name) is not None:
            weight = exported.source[name]
            scale = exported.ours[name.removesuffix("weight") + "weight_scale"]
            once = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            twice = (weight / scale).to(torch.float8_e4m3fn)
            np.testing.assert_array_equal(raw(ours), raw(once), name)
            np.testing.assert_array_equal(raw(theirs), raw(twice), name)
            differing = float((raw(once) != raw(twice)).mean())
            assert (differing == 0) == (weight.dtype is torch.float32)
            assert differing < 0.06
        else:
            np.testing.assert_array_equal(raw(ours), raw(theirs), name)


@pytest.mark.parametrize("algorithm", QUANTIZED)
def test_shards_keep_their_names_and_tensors(
    target: TargetSpec, tmp_path: Path, algorithm: Format
) -> None:
    stages = Stages()
    written = quantize(target, tmp_path / "q", algorithm, progress=stages)
    source = open_checkpoint(target.checkpoint.path)
    result = open_checkpoint(tmp_path / "q")  # the index agrees with the shards
    assert [file.name for file in result.files] == [file.name for file in source.files]
    assert len(result.files) == written.shards > 2
    for name, entry in source.tensors.items():
        assert result.tensors[name].file.name == entry.file.name
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            scale = result.tensors.get(f"{name.removesuffix('.weight')}.{suffix}")
            assert scale is None or scale.file.name == entry.file.name
    for entry in result.tensors.values():  # aligned to their type
        assert entry.offset % ITEM_BYTES[entry.dtype] == 0
    total = sum(entry.length for entry in result.tensors.values())
    assert read_json(tmp_path / "q" / "model.safetensors.index.json")["metadata"] == {
        "total_size": total
    }
    assert written.bytes == total
    assert written.source_bytes == sum(entry.length for entry in source.tensors.values())
    for stage in ("reading weights", f"quantizing to {algorithm.algorithm}"):
        assert stages.done[stage] == stages.totals[stage]


@pytest.mark.parametrize("algorithm", QUANTIZED)
def test_fused_linears_share_scales(draft: DraftSpec, tmp_path: Path, algorithm: Format) -> None:
    """The draft too, where ModelOpt's own export leaves a fused one without a common scale."""
    amax, weights = amax_of_all(draft), read_tensors(draft.checkpoint.path)
    quantize(draft, tmp_path / "q", algorithm)
    tensors = read_tensors(tmp_path / "q")
    for members in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        part = "self_attn" if "q_proj" in members else "mlp"
        own = {
            module: weights[f"{module}.weight"].abs().max()
            for module in (f"layers.1.{part}.{name}" for name in members)
        }
        inputs = torch.tensor(max(amax[f"layers.1.{name}"] for name in members))
        for module, largest in own.items():
            if algorithm is FP8:  # each weight has a scale of its own
                assert tensors[f"{module}.weight_scale"] == largest / 448
            else:
                assert tensors[f"{module}.weight_scale_2"] == max(own.values()) / 2688
            assert tensors[f"{module}.input_scale"] == inputs / (448 if algorithm is FP8 else 2688)


def test_memory_is_a_few_chunks(tmp_path: Path) -> None:
    folder = write_target(
        tmp_path / "wide", num_layers=1, hidden=512, intermediate=8192, heads=4, vocab=512
    )
    spec = read_target(folder)
    largest = max(entry.length for entry in spec.weights.values())
    assert largest == 16 << 20
    quantize(spec, tmp_path / "warm")  # tables and imports
    tracemalloc.start()
    quantize(spec, tmp_path / "q")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < largest / 2
