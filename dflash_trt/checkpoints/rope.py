"""Rotary position embedding as the checkpoint's config states it, and its tables.

Shapes: D head size, P positions. Sources: RoFormer (arXiv 2104.09864); the llama3 variant is
Llama 3.1's frequency scaling as transformers' modeling_rope_utils computes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.config_fields import ConfigFields
from dflash_trt.errors import DflashError

FloatArray = npt.NDArray[np.float32]

DEFAULT_THETA = 10_000.0
"""transformers' base for a config that states none (Llama 2's are like that)."""

UNDERSTOOD_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """`theta` is the frequency base; the other numbers are set for kind "llama3" only."""

    theta: float
    kind: Literal["default", "llama3"] = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


def read_rope(config: ConfigFields, default_theta: float | None = DEFAULT_THETA) -> RopeSpec:
    """RoPE from `rope_scaling`, `rope_parameters` (transformers 5) and `rope_theta`.

    `default_theta` stands in for a theta that is stated nowhere; None makes that an error.

    Raises:
        DflashError: a variant other than default and llama3, or numbers that make no sense.
    """
    # transformers prefers rope_scaling over rope_parameters, and a theta inside over one beside.
    scaling = config.child(
        "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    )
    _check_keys(scaling)
    theta_at = scaling if scaling.has("rope_theta") else config
    theta = theta_at.number("rope_theta", default_theta, low=1.0)
    for fields in (scaling, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            fix = "only rotation of the whole head is"
            raise fields.unsupported("partial_rotary_factor", fix)

    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text(kind_key, "default")
    if kind == "default":
        return RopeSpec(theta)
    if kind != "llama3":
        raise scaling.unsupported(kind_key, "the RoPE variants supported are default and llama3")
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"must be above low_freq_factor ({low:g})")
    key = "original_max_position_embeddings"
    if config.has(key):
        original = config.integer(key)
    elif scaling.has(key):
        original = scaling.integer(key)
    else:
        original = config.integer("max_position_embeddings")
    return RopeSpec(theta, "llama3", scaling.number("factor"), low, high, original)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> FloatArray:
    """Radians per position of each rotated pair, float32 [D/2].

    The power is taken in float64 and rounded once: that is what transformers' float32 power
    gives up to its last bit, and it does not depend on the machine. One unit in the last
    place matters: at position 100,000 it turns a pair by 0.006 radians.
    """
    if head_dim <= 0 or head_dim % 2:
        raise DflashError(
            f"head_dim is {head_dim}", where="RoPE", fix="it must be positive and even"
        )
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(spec.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies: FloatArray = np.float32(1.0) / powers
    return _scale_llama3(spec, frequencies) if spec.kind == "llama3" else frequencies


def tables(spec: RopeSpec, head_dim: int, positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin of position · frequency for positions 0 … `positions`-1, float32 [P, D/2]."""
    frequencies = inverse_frequencies(spec, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    # The float32 angle is part of the definition; its cosine is rounded once, from float64.
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def _check_keys(scaling: ConfigFields) -> None:
    for key, value in scaling.values.items():
        if key not in UNDERSTOOD_KEYS and value is not None:
            raise scaling.unsupported(key, "the RoPE variants supported are default and llama3")


def _scale_llama3(spec: RopeSpec, frequencies: FloatArray) -> FloatArray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = spec.factor, spec.low_freq_factor, spec.high_freq_factor
    original = spec.original_max_position_embeddings
    if factor is None or low is None or high is None or original is None:
        raise DflashError("a llama3 RoPE needs all its numbers", where="RoPE")
    one = np.float32(1.0)
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_long = wavelengths > np.float32(original / low)
    is_short = wavelengths < np.float32(original / high)
    stretched = frequencies / np.float32(factor)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (one - smooth) * frequencies / np.float32(factor) + smooth * frequencies
    scaled = np.where(is_long, stretched, np.where(is_short, frequencies, blended))
    return scaled.astype(np.float32)
