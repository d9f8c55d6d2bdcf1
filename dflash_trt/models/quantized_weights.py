"""The tensors of a quantised linear: its packed weight and the scales beside it.

Layout (ModelOpt's unified Hugging Face export) of a linear `X` [out, in]:
FP8: `X.weight` F8_E4M3 [out, in], `X.weight_scale` and `X.input_scale` F32 scalars.
NVFP4: `X.weight` U8 [out, in/2] (low nibble = even column), `X.weight_scale` F8_E4M3
[out, in/16], `X.weight_scale_2` and `X.input_scale` F32 scalars.
MXFP4 experts `X` of gpt-oss: `X_blocks` U8 [experts, out, in/32, 16], `X_scales` U8
[experts, out, in/32], the codes of E8M0. NVFP4 experts: `X` U8 [experts, in/2, out],
`X_weight_scale` F8_E4M3 [experts, in/16, out], `X_weight_scale_2` an F32 scalar.

The scales of an FP8 KV cache are one for K and one for V of each layer: ModelOpt writes
`…self_attn.k_proj.k_scale` and `…self_attn.v_proj.v_scale`, others leave out the projection. Scales
of a cache in another format belong to other codes: FP8's would clip by them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace

from dflash_trt.core.files import open_file
from dflash_trt.core.formats import NVFP4_BLOCK
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError, one_line
from dflash_trt.models.quantization import SUPPORTED, LinearFormat, Quantization
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.weight_names import LINEARS

_FIX = "export the checkpoint again"
FLOAT_DTYPES = ("F32", "F16", "BF16")
QUANTIZED_DTYPES: Mapping[str, LinearFormat] = {"F8_E4M3": "FP8", "U8": "NVFP4"}
KV_SCALE_SUFFIXES = {"k": ("k_proj.k_scale", "k_scale"), "v": ("v_proj.v_scale", "v_scale")}
"""What follows `…self_attn.` in the names of a KV cache's scales, of K and of V."""

WEIGHT_SCALE = "weight_scale"
WEIGHT_SCALE_2 = "weight_scale_2"
INPUT_SCALE = "input_scale"
EXPERT_BLOCKS = "blocks"
EXPERT_SCALES = "scales"
EXPERT_DTYPES = {
    EXPERT_BLOCKS: "U8",
    EXPERT_SCALES: "U8",
    WEIGHT_SCALE: "F8_E4M3",
    WEIGHT_SCALE_2: "F32",
}
"""What packed experts are stored as, by the last part of the role."""
SCALES: Mapping[LinearFormat, tuple[str, ...]] = {
    "FP8": (WEIGHT_SCALE, INPUT_SCALE),
    "NVFP4": (WEIGHT_SCALE, WEIGHT_SCALE_2, INPUT_SCALE),
}
"""Tensors that lie beside a quantised weight; as roles they follow the linear's and a dot."""


def is_linear(role: str) -> bool:
    """True for the matrices that a product takes, which alone may be quantised."""
    return role.rpartition(".")[2] in LINEARS


def is_scale(role: str) -> bool:
    """True for the tensors beside a quantised weight."""
    scales = (WEIGHT_SCALE, WEIGHT_SCALE_2, INPUT_SCALE, EXPERT_SCALES)
    return role.rpartition(".")[2] in scales


def is_packed_expert(role: str) -> bool:
    """True for the tensors of experts in four bits, whose shapes count bytes."""
    return role.rpartition(".")[2] in EXPERT_DTYPES


def linear_algorithm(weights: Mapping[str, TensorEntry], role: str) -> LinearFormat | None:
    """How the linear of `role` is quantised; None where it is in floating point."""
    return QUANTIZED_DTYPES.get(weights[role].dtype)


def quantized_linears(weights: Mapping[str, TensorEntry]) -> dict[str, LinearFormat]:
    """Every quantised linear of a model, by role."""
    found = {role: linear_algorithm(weights, role) for role in weights if is_linear(role)}
    return {role: algorithm for role, algorithm in found.items() if algorithm is not None}


def logical_shape(entry: TensorEntry) -> tuple[int, ...]:
    """The shape in elements: a U8 weight holds two a byte."""
    if entry.dtype != "U8" or not entry.shape:
        return entry.shape
    return (*entry.shape[:-1], 2 * entry.shape[-1])


def count_parameters(weights: Mapping[str, TensorEntry]) -> int:
    """Elements of the weights; scales are none."""
    return sum(
        math.prod(logical_shape(entry)) for role, entry in weights.items() if not is_scale(role)
    )


def is_kv_scale(name: str) -> bool:
    """True for the scales of a quantised KV cache, which only `--kv-dtype fp8` uses."""
    known = tuple(f"self_attn.{suffix}" for both in KV_SCALE_SUFFIXES.values() for suffix in both)
    return name.endswith(known)


def find_scales(
    tensors: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Role → scale of every quantised linear in `weights`; scalars have the shape ().

    Raises:
        DflashError: a scale is missing, or has another dtype, shape or an impossible value.
    """
    scales: dict[str, TensorEntry] = {}
    for role, algorithm in quantized_linears(weights).items():
        weight = weights[role]
        module = weight.name.removesuffix(".weight")
        rows, columns = logical_shape(weight)
        if algorithm == "NVFP4" and columns % NVFP4_BLOCK:
            raise weight.error(f"its {columns} columns are no multiple of {NVFP4_BLOCK}", _FIX)
        for suffix in SCALES[algorithm]:
            name = f"{module}.{suffix}"
            entry = tensors.get(name)
            if entry is None:
                raise weight.error(f"{algorithm} needs {quoted(name)}, which is missing", _FIX)
            if algorithm == "NVFP4" and suffix == WEIGHT_SCALE:
                stored = f"{entry.dtype} {list(entry.shape)}"
                wanted = f"F8_E4M3 {[rows, columns // NVFP4_BLOCK]}"
                if stored != wanted:
                    raise entry.error(f"it is {stored}, not {wanted}", _FIX)
            else:
                read_positive_scalar(entry)
                entry = replace(entry, shape=())
            scales[f"{role}.{suffix}"] = entry
    return scales


def check_quantized(weights: Mapping[str, TensorEntry], quantization: Quantization | None) -> None:
    """Holds every tensor's dtype to what the config says of it.

    Raises:
        DflashError: a quantised tensor that is no linear, an algorithm that is not the config's,
            a linear quantised though excluded, or in floating point though not excluded.
    """
    for role, entry in weights.items():
        if is_packed_expert(role):
            wanted = EXPERT_DTYPES[role.rpartition(".")[2]]
            if entry.dtype != wanted:
                stated = None if quantization is None else quantization.algorithm
                raise entry.error(
                    f"its dtype is {entry.dtype}, {stated} is stored as {wanted}", _FIX
                )
            if role.endswith(WEIGHT_SCALE_2):
                read_positive_scalar(entry)
            continue
        algorithm = QUANTIZED_DTYPES.get(entry.dtype) if is_linear(role) else None
        if ".experts." in role and entry.dtype in QUANTIZED_DTYPES:
            what = f"it is an expert's in {QUANTIZED_DTYPES[entry.dtype]}, which is not read here"
            fix = "use a checkpoint whose experts are in floating point, or gpt-oss's in MXFP4"
            raise entry.error(what, fix)
        if algorithm is None and entry.dtype not in FLOAT_DTYPES:
            fix = SUPPORTED if is_linear(role) else f"it must be {', '.join(FLOAT_DTYPES)}"
            raise entry.error(f"its dtype {entry.dtype} is not supported here", fix)
        if algorithm is not None and quantization is None:
            what = f"it is {entry.dtype}, but config.json has no quantization_config"
            fix = "download the checkpoint's config.json and hf_quant_config.json again"
            raise entry.error(what, fix)
        if not is_linear(role) or quantization is None:
            continue
        says, stated = None, quantization.algorithm
        pattern = quantization.excluding_pattern(entry.name.removesuffix(".weight"))
        if algorithm is None:
            if pattern is None and stated not in (None, "MXFP4"):
                says = f"says {stated} and does not exclude it"
        elif pattern is not None:
            says = f"excludes {quoted(pattern)}"
        elif algorithm != stated:
            says = f"says {stated}"
        if says is not None:
            raise entry.error(f"it is {entry.dtype}, but the config {says}", _FIX)


def read_scalar(entry: TensorEntry) -> float:
    """The value of an F32 scalar; DflashError when its file cannot be read."""
    try:
        with open_file(entry.file) as file:
            file.seek(entry.offset)
            (value,) = struct.unpack("<f", file.read(4))
    except (OSError, struct.error) as error:
        raise DflashError(f"cannot be read ({one_line(error)})", where=entry.file) from None
    return float(value)


def read_positive_scalar(entry: TensorEntry, fix: str = _FIX) -> float:
    """The same; DflashError with this `fix` unless it is an F32 scalar, finite and above 0."""
    if entry.dtype != "F32" or math.prod(entry.shape) != 1:
        raise entry.error(f"it is {entry.dtype} {list(entry.shape)}, not an F32 scalar", fix)
    value = read_scalar(entry)
    if not math.isfinite(value) or value <= 0:
        raise entry.error(f"its value is {value:g}, not a finite number above 0", fix)
    return value


_CACHE_FIX = "export the checkpoint again, or leave out --kv-dtype fp8"
UNSTATED = 1.0
"""The scale where the checkpoint states none: E4M3 reaches 448."""


def are_fp8(kv_cache_algorithm: str | None) -> bool:
    """Whether a cache that is stated so has FP8's scales; an unstated one has."""
    return kv_cache_algorithm in (None, "FP8")


def read_kv_scales(
    tensors: Mapping[str, TensorEntry],
    weights: Mapping[str, TensorEntry],
    quantization: Quantization | None,
    layer: int,
) -> tuple[float, float]:
    """The scales of K and V of one layer, `UNSTATED` where the checkpoint has none of FP8.

    Args:
        tensors: all of a checkpoint's, by name.
        weights: the same checkpoint's, by role.
        quantization: what the checkpoint states.

    Raises:
        DflashError: one that is no F32 scalar, or not a finite number above 0.
    """
    if quantization is not None and not are_fp8(quantization.kv_cache_algorithm):
        return UNSTATED, UNSTATED
    module = weights[f"layers.{layer}.k_proj"].name.removesuffix("k_proj.weight")
    found = {
        kind: [entry for suffix in suffixes if (entry := tensors.get(f"{module}{suffix}"))]
        for kind, suffixes in KV_SCALE_SUFFIXES.items()
    }
    k, v = (
        read_positive_scalar(entries[0], _CACHE_FIX) if entries else UNSTATED
        for entries in found.values()
    )
    return k, v
