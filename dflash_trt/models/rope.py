"""Rotary position embedding as the checkpoint's config states it, and its tables.

Shapes: D head size, P positions. Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071),
Llama 3.1's frequency scaling; the last two as in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflash_trt.core.arrays import FloatArray
from dflash_trt.models.config_fields import ConfigFields

DEFAULT_THETA = 10_000.0
"""transformers' base for a config that states none (Llama 2's are like that)."""

GEMMA_THETA = 1_000_000.0
"""The same of a Gemma's layers that see everything."""

GEMMA4_TURNED = 0.25
"""Of a Gemma 4's config without RoPE parameters: the share of pairs in such layers that turn."""

PARTIAL = "partial_rotary_factor"
PROPORTIONAL = "proportional"
PARTIAL_FACTOR = 0.25
"""What a Qwen3.5 config has that states none."""

LEAST = 1e-6
"""What every number of a scaling is above: the inverse of a smaller one may leave float32."""

UNDERSTOOD_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings beta_fast beta_slow truncate attention_factor "
    "mscale mscale_all_dim".split()
)
SUPPORTED = "the RoPE variants supported are default, linear, llama3 and yarn"


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Wavelengths above original / low are stretched by `factor`, below original / high kept.

    `original_max_position_embeddings` is the context before RoPE was stretched.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The betas are turns within the original context.

    `attention_factor` multiplies cos and sin; `truncate` rounds the ramp's ends to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Proportional:
    """Of the pairs, the first `turned` turn, at 1 / `factor` of their pace; the others do not.

    Where all turn, it is transformers' "linear".
    """

    turned: float
    factor: float = 1.0

    def count_turned(self, head_dim: int) -> int:
        """Pairs of a head that turn."""
        return int(self.turned * head_dim // 2)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """`theta` is the frequency base; without a scaling the variant is transformers' "default"."""

    theta: float
    scaling: Llama3Scaling | YarnScaling | Proportional | None = None


def read_rope(
    config: ConfigFields,
    default_theta: float | None = DEFAULT_THETA,
    *,
    zeros_count: bool = False,
) -> RopeSpec:
    """RoPE from `rope_scaling`, `rope_parameters` (transformers 5) and `rope_theta`.

    `default_theta` stands in for a theta that is stated nowhere; None makes that an error.
    `zeros_count` as in `_read_gain`.

    Raises:
        DflashError: a variant that is not in `SUPPORTED`, or numbers that make no sense.
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
    if kind == "linear":
        return RopeSpec(theta, Proportional(1.0, scaling.number("factor", low=LEAST)))
    if kind not in ("yarn", "llama3"):
        raise scaling.unsupported(kind_key, SUPPORTED)
    # The context that the model was trained with before its RoPE was stretched.
    key = "original_max_position_embeddings"
    place = next((fields for fields in (config, scaling) if fields.has(key)), None)
    original = config.integer("max_position_embeddings") if place is None else place.integer(key)
    # A YaRN's factor that is null is what the context grew by; one that is absent is an error.
    is_grown = kind == "yarn" and scaling.values.get("factor", 1.0) is None
    grown = config.integer("max_position_embeddings") / original if is_grown else None
    factor = scaling.number("factor", grown, low=LEAST)
    if kind == "llama3":
        low = scaling.number("low_freq_factor", low=LEAST)
        high = scaling.number("high_freq_factor", low=LEAST)
        if high <= low:
            raise scaling.error("high_freq_factor", f"must be above low_freq_factor ({low:g})")
        return RopeSpec(theta, Llama3Scaling(factor, low, high, original))
    fast = scaling.number("beta_fast", 32.0, low=LEAST)
    slow = scaling.number("beta_slow", 1.0, low=LEAST)
    if fast < slow:
        raise scaling.error("beta_fast", f"must not be below beta_slow ({slow:g})")
    gain = scaling.number("attention_factor", _read_gain(scaling, factor, zeros_count), low=LEAST)
    # As transformers and vLLM have it: null is false, and only a missing key is true.
    truncate = scaling.flag("truncate", "truncate" not in scaling.values)
    return RopeSpec(theta, YarnScaling(factor, original, gain, fast, slow, truncate))


def read_ropes_by_kind(
    config: ConfigFields, turned: float | None = None
) -> tuple[RopeSpec, RopeSpec]:
    """Gemma's RoPE of layers that see everything, and of those that slide.

    transformers 5 has both under `rope_parameters`, by layer kind; before, the first was stated as
    any model's, which still goes first, and of the second `rope_local_base_freq` alone. `turned` is
    of a family whose first is proportional where nothing is stated.
    """
    stated = config.child("rope_parameters")
    values = {key: config.values[key] for key in config.values if key != "rope_parameters"}
    kind, older = stated.child("full_attention"), config.child("rope_scaling").values
    key = "rope_scaling" if older else "rope_parameters"
    full = {**values, key: {**kind.values, **older}}
    local = {
        "max_position_embeddings": values.get("max_position_embeddings"),
        "rope_theta": values.get("rope_local_base_freq"),
        "rope_parameters": stated.values.get("sliding_attention"),
    }
    sliding_rope = read_rope(ConfigFields(local, config.where))
    is_silent = turned is not None and not kind.values
    if kind.values.get("rope_type") != PROPORTIONAL and not is_silent:
        return read_rope(ConfigFields(full, config.where), GEMMA_THETA), sliding_rope
    if older:
        fix = "remove it, or state rope_parameters by layer kind"
        raise config.unsupported("rope_scaling", f"this RoPE is proportional: {fix}")
    _check_keys(kind)
    theta = kind.number("rope_theta", GEMMA_THETA, low=1.0)
    share = kind.number(PARTIAL, turned if is_silent else 1.0, high=1.0)
    turning = Proportional(share, kind.number("factor", 1.0, low=LEAST))
    return RopeSpec(theta, turning), sliding_rope


def read_partial_rope(config: ConfigFields, head_dim: int) -> tuple[RopeSpec, int]:
    """Qwen3.5's RoPE, and how many of a head's first elements it turns.

    Text has the same position in all three sections of multimodal RoPE, which is then plain.
    """
    values = dict(config.values)
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    scaling = dict(config.child(key).values)
    for own in ("mrope_section", "mrope_interleaved"):
        scaling.pop(own, None)
    fields = ConfigFields(scaling, config.where, f"{config.prefix}{key}.")
    at = fields if fields.has(PARTIAL) else config
    factor = at.number(PARTIAL, PARTIAL_FACTOR, high=1.0)
    turned = int(head_dim * factor)
    if turned < 2 or turned % 2:
        raise at.error(PARTIAL, f"must turn an even part of {head_dim}, not {turned}")
    scaling.pop(PARTIAL, None)
    values.pop(PARTIAL, None)
    return read_rope(ConfigFields(values | {key: scaling}, config.where, config.prefix)), turned


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> FloatArray:
    """Radians per position of each rotated pair, float32 [D/2].

    The power is taken in float64 and rounded once, the same on any machine: at position 100,000
    its last bit turns a pair by 0.006 radians.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(spec.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies: FloatArray = np.float32(1.0) / powers
    if isinstance(spec.scaling, YarnScaling):
        return _scale_yarn(spec.scaling, spec.theta, powers, frequencies)
    if isinstance(spec.scaling, Proportional):
        turning = np.arange(head_dim // 2) < spec.scaling.count_turned(head_dim)
        return np.where(turning, frequencies / np.float32(spec.scaling.factor), np.float32(0))
    return frequencies if spec.scaling is None else _scale_llama3(spec.scaling, frequencies)


def tables(spec: RopeSpec, head_dim: int, positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin of position · frequency for positions 0 … `positions`-1, float32 [P, D/2]."""
    frequencies = inverse_frequencies(spec, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    # The float32 angle is part of the definition; its cosine is rounded once, from float64.
    wide = angles.astype(np.float64)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    if isinstance(spec.scaling, YarnScaling):
        factor = np.float32(spec.scaling.attention_factor)
        return cos * factor, sin * factor
    return cos, sin


def _read_gain(scaling: ConfigFields, factor: float, zeros_count: bool) -> float:
    """What YaRN multiplies cos and sin by, from `mscale` and `mscale_all_dim`.

    transformers obeys the two where neither is 0; SpecForge where they are stated (`zeros_count`).
    """

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    # Above minus something: 0 is a value.
    own, every = (scaling.number(one, 0.0, low=-LEAST) for one in ("mscale", "mscale_all_dim"))
    is_stated = scaling.has("mscale") and scaling.has("mscale_all_dim")
    is_obeyed = is_stated if zeros_count else own and every
    return gain(own) / gain(every) if is_obeyed else gain(1.0)


def _check_keys(scaling: ConfigFields) -> None:
    for key, value in scaling.values.items():
        if key not in UNDERSTOOD_KEYS and value is not None:
            raise scaling.unsupported(key, SUPPORTED)


def _scale_llama3(scaling: Llama3Scaling, frequencies: FloatArray) -> FloatArray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    one = np.float32(1.0)
    wavelengths = np.float32(2 * math.pi) / frequencies
    is_long = wavelengths > np.float32(original / low)
    is_short = wavelengths < np.float32(original / high)
    stretched = frequencies / np.float32(factor)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (one - smooth) * frequencies / np.float32(factor) + smooth * frequencies
    scaled = np.where(is_long, stretched, np.where(is_short, frequencies, blended))
    return scaled.astype(np.float32)


def _scale_yarn(
    yarn: YarnScaling, theta: float, powers: FloatArray, frequencies: FloatArray
) -> FloatArray:
    """Pairs that turn often are kept, those that turn seldom are stretched, a ramp between."""
    original = yarn.original_max_position_embeddings
    pairs = len(powers)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns within the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # transformers' own: no division by zero
    one = np.float32(1.0)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = one - np.clip(ramp, 0, 1)
    stretched = one / (np.float32(yarn.factor) * powers)
    return (stretched * (one - kept) + frequencies * kept).astype(np.float32)
