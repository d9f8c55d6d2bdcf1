"""The scales of linears, from the largest magnitudes of their weights and inputs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.errors import DflashError, first_few
from dflash_trt.quantization.fp8 import fp8_scale
from dflash_trt.quantization.linears import NAMES_SHOWN, Algorithm, Linear
from dflash_trt.quantization.nvfp4 import nvfp4_global_scale


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
    algorithm: Algorithm,
    weights: Mapping[str, float],
    activations: Mapping[str, float],
) -> dict[str, Scales]:
    """Role → scales, from role → largest magnitude of weights and of inputs.

    As in ModelOpt, linears that servers fuse share the largest input scale of the group and the
    largest of NVFP4's global weight scales.

    Raises:
        DflashError: a linear's input was not observed, or never differed from zero.
    """
    _check_activations(linears, activations)
    scale = fp8_scale if algorithm is Algorithm.FP8 else nvfp4_global_scale
    inputs = _group_maxima(linears, activations)
    fused = _group_maxima(linears, weights)
    return {
        linear.role: Scales(
            scale(weights[linear.role] if algorithm is Algorithm.FP8 else fused[linear.group]),
            scale(inputs[linear.group]),
        )
        for linear in linears
    }


def _group_maxima(linears: Collection[Linear], amax: Mapping[str, float]) -> dict[str, float]:
    maxima: dict[str, float] = {}
    for linear in linears:
        maxima[linear.group] = max(maxima.get(linear.group, 0.0), amax[linear.role])
    return maxima


def _check_activations(linears: Collection[Linear], activations: Mapping[str, float]) -> None:
    missing = [linear.module for linear in linears if linear.role not in activations]
    if missing:
        raise DflashError(f"calibration saw no input of {first_few(missing, NAMES_SHOWN)}")
    for linear in linears:
        amax = activations[linear.role]
        if not math.isfinite(amax) or amax <= 0:
            raise DflashError(
                f"the largest input of {linear.module} over the calibration texts is {amax:g}",
                fix=f"calibrate with other texts, or add --exclude {linear.module}",
            )
