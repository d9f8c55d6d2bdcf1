"""The scales of linears and of FP8 KV caches, from largest magnitudes, as ModelOpt writes them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.core.formats import Format
from dflash_trt.errors import DflashError, first_few
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.quantized_weights import KV_SCALE_SUFFIXES, are_fp8, is_kv_scale
from dflash_trt.quantization.codecs import fp8_scale, nvfp4_global_scale
from dflash_trt.quantization.linears import NAMES_SHOWN, Linear


@dataclass(frozen=True, slots=True)
class Activations:
    """Largest input magnitude of each linear, by role, and how to observe it.

    An interrupted run is continued only where `key` is the same: it stands for texts and weights.
    `observe` is given a folder beside the destination for temporary files.
    """

    key: str
    observe: Callable[[Path], Mapping[str, float]]

    @staticmethod
    def known(amax: Mapping[str, float]) -> Activations:
        """Magnitudes that were observed before."""
        encoded = json.dumps(dict(amax), sort_keys=True).encode()
        return Activations(hashlib.sha256(encoded).hexdigest(), lambda workspace: amax)


@dataclass(frozen=True, slots=True)
class Scales:
    """`weight` is FP8's scale or NVFP4's `weight_scale_2`, `input` the input's `input_scale`."""

    weight: np.float32
    input: np.float32


def compute_scales(
    linears: Collection[Linear],
    form: Format,
    weights: Mapping[str, float],
    activations: Mapping[str, float],
) -> dict[str, Scales]:
    """Role → scales, from role → largest magnitude of weights and of inputs.

    As in ModelOpt, linears that servers fuse share the largest input scale of the group and the
    largest of NVFP4's global weight scales.

    Raises:
        DflashError: a linear's input was not observed, or never differed from zero.
    """
    missing = [linear.module for linear in linears if linear.role not in activations]
    if missing:
        raise DflashError(f"calibration saw no input of {first_few(missing, NAMES_SHOWN)}")
    for linear in linears:
        amax = activations[linear.role]
        if not math.isfinite(amax) or amax <= 0:
            raise DflashError(
                f"the largest input of {linear.module} over the calibration texts is {amax:g}",
                fix=f"calibrate with other texts, or exclude {linear.module}",
            )
    scale = fp8_scale if form is Format.FP8 else nvfp4_global_scale
    inputs = _group_maxima(linears, activations)
    fused = _group_maxima(linears, weights)
    return {
        linear.role: Scales(
            scale(weights[linear.role] if form is Format.FP8 else fused[linear.group]),
            scale(inputs[linear.group]),
        )
        for linear in linears
    }


def _group_maxima(linears: Collection[Linear], amax: Mapping[str, float]) -> dict[str, float]:
    maxima: dict[str, float] = {}
    for linear in linears:
        maxima[linear.group] = max(maxima.get(linear.group, 0.0), amax[linear.role])
    return maxima


KV_CACHE = "FP8"
_FIX = "calibrate with other texts, or leave out --kv-scales"


def states_scales(spec: DecoderSpec) -> bool:
    """Whether a checkpoint has scales for an FP8 cache already."""
    stated = spec.quantization
    is_fp8 = stated is None or are_fp8(stated.kv_cache_algorithm)
    return is_fp8 and any(map(is_kv_scale, spec.checkpoint.tensors))


class KvScales:
    """One scale for K and one for V of each layer, largest magnitude / 448.

    Each is written beside the weight of its projection: `names` are theirs, by the weight's.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._roles: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self._scales: dict[str, np.float32] = {}
        for layer, sizes in enumerate(spec.sizes.layers):
            if sizes.recurrent is not None:
                continue
            for kind, suffixes in KV_SCALE_SUFFIXES.items():
                weight = spec.weights[f"layers.{layer}.{kind}_proj"].name
                self._roles[weight] = f"layers.{layer}.{kind}_cache"
                self.names[weight] = weight.removesuffix(f"{kind}_proj.weight") + suffixes[0]

    def prepare(self, amax: Mapping[str, float]) -> None:
        """Computes the scales from the largest magnitudes in the caches, by role.

        Raises:
            DflashError: a cache was not observed, or held nothing but zeros.
        """
        for weight, role in self._roles.items():
            largest = amax.get(role, 0.0)
            if not (math.isfinite(largest) and largest > 0):
                what = f"the largest value of {role} over the calibration texts is {largest:g}"
                raise DflashError(what, fix=_FIX)
            self._scales[weight] = fp8_scale(largest)

    def encode(self, weight: str) -> bytes:
        """The bytes of the scale that goes with `weight`."""
        return np.asarray(self._scales[weight], "<f4").tobytes()
