"""The scales that an FP8 KV cache of a checkpoint needs, as ModelOpt writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dflash_trt.checkpoints.decoder import DecoderSpec
from dflash_trt.checkpoints.kv_scales import are_fp8
from dflash_trt.checkpoints.quantized_weights import KV_SCALE_SUFFIXES, is_kv_scale
from dflash_trt.errors import DflashError
from dflash_trt.quantization.fp8 import fp8_scale

KV_CACHE = "FP8"
_FIX = "calibrate with other texts, or leave out --kv-scales"


def states_scales(spec: DecoderSpec) -> bool:
    """Whether a checkpoint has scales for an FP8 cache already."""
    stated = spec.quantization
    is_fp8 = stated is None or are_fp8(stated.kv_cache_algorithm)
    return is_fp8 and any(map(is_kv_scale, spec.checkpoint.tensors))


class KvScales:
    """One scale for K and one for V of each layer, largest magnitude / 448.

    Each is written beside the weight of its projection; scales that the source has are dropped.
    """

    def __init__(self, spec: DecoderSpec) -> None:
        self._roles: dict[str, str] = {}
        self._names: dict[str, str] = {}
        for layer, sizes in enumerate(spec.sizes.layers):
            if sizes.recurrent is not None:
                continue
            for kind, suffixes in KV_SCALE_SUFFIXES.items():
                weight = spec.weights[f"layers.{layer}.{kind}_proj"].name
                module = weight.removesuffix(f"{kind}_proj.weight")
                self._roles[weight] = f"layers.{layer}.{kind}_cache"
                self._names[weight] = module + suffixes[0]
        self._stale = {name for name in spec.checkpoint.tensors if is_kv_scale(name)}
        self._scales: dict[str, np.float32] = {}

    def name(self, weight: str) -> str | None:
        """The scale that goes with the tensor called `weight`; None: no scale does."""
        return self._names.get(weight)

    def is_stale(self, name: str) -> bool:
        """Whether a tensor of the source is a scale, which the new ones replace."""
        return name in self._stale

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
