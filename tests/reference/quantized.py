"""Quantised checkpoints in ModelOpt's layout, and what they compute, written from the formats.

Independent of the project's codecs: rounding is ml_dtypes', everything else is spelled out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.reference.draft import ReferenceDraft

Algorithm = Literal["FP8", "NVFP4"]
ConfigForm = Literal["modelopt", "nested"]
Float32 = npt.NDArray[np.float32]
Tensors = dict[str, torch.Tensor]

LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
)
DOUBT = 1e-6
"""Of typical values: what float32 errs by in a few layers, 13 roundings for 1,000 additions."""
ACTIVATION_AMAX = 5.0  # below what random activations reach: some of them are clipped


def e4m3(values: Float32) -> Float32:
    """Rounded to E4M3, saturating."""
    clipped = np.clip(values, np.float32(-448), np.float32(448))
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1(values: Float32) -> Float32:
    """Rounded to E2M1, saturating."""
    clipped = np.clip(values, np.float32(-6), np.float32(6))
    return clipped.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def round_fp8(x: Float32, input_scale: np.float32) -> Float32:
    """An FP8 linear's input as it sees it."""
    return e4m3(x / input_scale) * input_scale


def round_nvfp4(x: Float32, input_scale: np.float32) -> Float32:
    """An NVFP4 linear's input as it sees it; blocks of 16 along the last axis."""
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    steps = e4m3(amax / (np.float32(6) * input_scale)) * input_scale
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(steps == 0, np.float32(0), e2m1(blocks / steps))
    return (codes * steps).reshape(x.shape)


def decode_fp8(codes: Any, scale: np.float32) -> Float32:
    return codes.astype(np.float32) * scale


def decode_nvfp4(packed: npt.NDArray[np.uint8], scales: Any, scale_2: np.float32) -> Float32:
    """Weights [out,in] of bytes [out,in/2] and E4M3 scales [out,in/16]."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    steps = scales.astype(np.float32) * scale_2
    return values[codes] * np.repeat(steps, 16, axis=1)


def quantize_weight(weight: torch.Tensor, algorithm: Algorithm) -> Tensors:
    """The tensors of a quantised weight [out,in], by the end of their names."""
    w = weight.float().numpy()
    amax = np.float32(np.abs(w).max())
    if algorithm == "FP8":
        scale = amax / np.float32(448)
        codes = np.clip(w / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return {
            "weight": torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(scale),
            "input_scale": torch.tensor(np.float32(ACTIVATION_AMAX) / np.float32(448)),
        }
    scale_2 = amax / np.float32(6 * 448)
    blocks = w.reshape(len(w), -1, 16)
    scales = (np.abs(blocks).max(axis=-1) / (6 * scale_2)).astype(ml_dtypes.float8_e4m3fn)
    steps = scales.astype(np.float32)[..., None] * scale_2
    codes = np.clip(blocks / steps, -6, 6).astype(ml_dtypes.float4_e2m1fn).reshape(w.shape)
    nibbles = codes.view(np.uint8) & 15
    return {
        "weight": torch.from_numpy(nibbles[:, 0::2] | nibbles[:, 1::2] << 4),
        "weight_scale": torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(scale_2),
        "input_scale": torch.tensor(np.float32(ACTIVATION_AMAX) / np.float32(6 * 448)),
    }


def quantize_folder(
    folder: Path,
    algorithm: Algorithm,
    *,
    exclude: Sequence[str] = ("lm_head", "model.embed_tokens", "fc"),
    form: ConfigForm = "modelopt",
    kv_cache: bool = False,
    scalar_shape: tuple[int, ...] = (),
) -> None:
    """Quantises the linears of the unsharded checkpoint in `folder`, in place.

    `exclude` are exact module names or end in "*". `form` is what config.json says; "nested" is
    ModelOpt's for drafts. `kv_cache` adds the scales of an FP8 cache.
    """
    path = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith((*LINEARS, "lm_head"))
        if not is_linear or any(fnmatchcase(module, pattern) for pattern in exclude):
            tensors[name] = tensor
            continue
        for suffix, value in quantize_weight(tensor, algorithm).items():
            is_scalar = value.dim() == 0
            tensors[f"{module}.{suffix}"] = value.reshape(scalar_shape) if is_scalar else value
        for kind in "kv":
            if kv_cache and module.endswith(f"{kind}_proj"):
                tensors[f"{module}.{kind}_scale"] = torch.tensor(0.01)
    save_file(tensors, path, metadata={"format": "pt"})
    write_quant_config(folder, algorithm, exclude, form, kv_cache)


def write_quant_config(
    folder: Path, algorithm: str, exclude: Sequence[str], form: ConfigForm, kv_cache: bool = False
) -> None:
    """Both of ModelOpt's files."""
    group = {"group_size": 16} if algorithm == "NVFP4" else {}
    nested = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": "FP8" if kv_cache else None,
            **group,
            "exclude_modules": list(exclude),
        },
    }
    flat: dict[str, Any] = {
        "config_groups": {
            "group_0": {
                side: {"dynamic": False, "num_bits": 4 if group else 8, "type": "float", **group}
                for side in ("input_activations", "weights")
            }
            | {"targets": ["Linear"]}
        },
        "ignore": list(exclude),
        "quant_algo": algorithm,
        "producer": nested["producer"],
        "quant_method": "modelopt",
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(nested), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = flat if form == "modelopt" else nested
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


class QuantizedLinear:
    """One linear of a quantised checkpoint: decoded weight [out,in] and its inputs' rounding."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], module: str) -> None:
        def array(suffix: str) -> Any:
            tensor = tensors[f"{module}.{suffix}"]
            if tensor.dtype == torch.float8_e4m3fn:
                return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
            return tensor.numpy()

        def scalar(suffix: str) -> np.float32:
            return np.float32(array(suffix).reshape(()))

        self._doubts = 0
        input_scale = scalar("input_scale")
        self.round: Callable[[Float32], Float32]
        if f"{module}.weight_scale_2" in tensors:
            self.weight = decode_nvfp4(
                array("weight"), array("weight_scale"), scalar("weight_scale_2")
            )
            self.round = lambda x: round_nvfp4(x, input_scale)
        else:
            self.weight = decode_fp8(array("weight"), scalar("weight_scale"))
            self.round = lambda x: round_fp8(x, input_scale)

    def round_torch(self, x: torch.Tensor) -> torch.Tensor:
        values = x.detach().numpy()
        rounded = self.round(values)
        generator = np.random.default_rng(0)
        moved = np.float32(DOUBT * np.sqrt(np.mean(values.astype(np.float64) ** 2)))
        for _ in range(4):
            signs = generator.choice(np.float32([-1, 1]), values.shape)
            self._doubts += np.count_nonzero(self.round(values + moved * signs) != rounded)
        return torch.from_numpy(rounded)

    def take_doubts(self) -> int:
        """How many values lay near a midpoint between two codes since this was last asked."""
        doubts, self._doubts = self._doubts, 0
        return doubts


def quantized_modules(folder: Path) -> dict[str, QuantizedLinear]:
    """Every quantised linear of a checkpoint by module name."""
    tensors = load_file(folder / "model.safetensors")
    modules = [n.removesuffix(".input_scale") for n in tensors if n.endswith(".input_scale")]
    return {module: QuantizedLinear(tensors, module) for module in modules}


def load_quantized_target(
    folder: Path, scratch: Path, modules: Mapping[str, QuantizedLinear] | None = None
) -> Any:
    """The target in transformers, float32: decoded weights, inputs rounded by hooks.

    `modules` are its own `quantized_modules`, for a caller who asks them for doubts.
    """
    from tests.reference.generate import load_target

    modules = modules or quantized_modules(folder)
    plain = _decoded(folder, modules)
    scratch.mkdir(parents=True)
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_target(scratch)
    for name, linear in modules.items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, linear=linear: (linear.round_torch(args[0]),)
        )
    return model


class QuantizedReferenceDraft(ReferenceDraft):
    """The reference drafter with quantised linears."""

    modules: dict[str, QuantizedLinear]

    @classmethod
    def open(cls, folder: Path, target: Any) -> QuantizedReferenceDraft:
        from tests.reference.draft import DraftConfig

        modules = quantized_modules(folder)
        embed = target.get_input_embeddings().weight.detach()
        head = target.get_output_embeddings().weight.detach()
        draft = cls(DraftConfig.read(folder), _decoded(folder, modules), embed, head)
        draft.modules = modules
        return draft

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name in self.modules:
            x = self.modules[name].round_torch(x)
        return super()._linear(x, name)


def _decoded(folder: Path, modules: Mapping[str, QuantizedLinear]) -> Tensors:
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
    own = {f"{module}.{suffix}" for module in modules for suffix in suffixes}
    tensors = {
        name: tensor.float()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name not in own
    }
    return tensors | {f"{n}.weight": torch.from_numpy(m.weight) for n, m in modules.items()}
