"""One model quantised by ModelOpt 0.47 and by this project, from the same input magnitudes."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt.core.formats import Format
from dflash_trt.models.target import read_target
from dflash_trt.quantization.scales import Activations
from tests.covering import exhaustive
from tests.quantization.reading import raw, read_tensors
from tests.quantization.running import quantize
from tests.reference.checkpoints import Storage, write_target

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
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
