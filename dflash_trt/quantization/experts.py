"""Rewrites gpt-oss's native MXFP4 experts as NVFP4 or bf16, expert by expert.

Values stay the same wherever the format can hold them. Blocks that NVFP4's range of scales does not
reach are quantised again, and counted where a value changes. ModelOpt casts checkpoints by the same
rule (`cast_mxfp4_to_nvfp4`), which docs/design/engines.md explains. The layouts of both
are in checkpoints/quantized_weights.py; bf16 is `X` [E, in, out]. Everything else, attention and
router included, is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.core.formats import MX_BLOCK, NVFP4_BLOCK, Format
from dflash_trt.core.progress import Progress
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.folder import Checkpoint
from dflash_trt.models.quantization import CONFIG_KEY, WEIGHTS_ONLY
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.quantization.codecs import (
    E8M0_BIAS,
    E8M0_NAN,
    Codes,
    dequantize_mxfp4,
    dequantize_nvfp4,
    encode_e4m3,
    quantize_nvfp4,
)
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport
from dflash_trt.quantization.rewrite import Rewriting, Rewritten, rewrite_checkpoint
from dflash_trt.quantization.tensor_rows import ShardWriter, TensorLayout, sum_of_squares

LARGEST_EXPONENT = 8
SMALLEST_EXPONENT = -9
_HALVES = MX_BLOCK // NVFP4_BLOCK


@dataclass(frozen=True, slots=True)
class Recoded:
    """NVFP4 of MXFP4: packed codes [..., K/2], E4M3 scales [..., K/16].

    `exact` and `requantized` count blocks of 16; `error` and `norm` are sums of squares of
    W' - W and of W over the blocks that were quantised again.
    """

    packed: Codes
    scales: Codes
    exact: int
    requantized: int
    error: float
    norm: float


def global_scale(shift: int) -> np.float32:
    """2^shift as NVFP4's scale of a tensor."""
    return np.float32(np.ldexp(np.float32(1), shift))


def mxfp4_to_nvfp4(packed: Codes, scales: Codes, shift: int) -> Recoded:
    """NVFP4 with the tensor's scale 2^shift, of packed codes [..., K/2] and scales [..., K/32].

    No scale may be NaN or above 2^(shift + 8).
    """
    relative = scales.astype(np.int32) - (E8M0_BIAS + shift)
    powers = np.ldexp(np.float32(1), np.maximum(relative, SMALLEST_EXPONENT))
    block_scales = np.repeat(encode_e4m3(powers), _HALVES, axis=-1)
    below = relative < SMALLEST_EXPONENT
    count = block_scales.size
    if not below.any():
        return Recoded(packed, block_scales, count, 0, 0.0, 0.0)
    blocks = packed.reshape(*scales.shape, MX_BLOCK // 2)
    values = dequantize_mxfp4(blocks[below], scales[below][:, None])
    codes, small_scales = quantize_nvfp4(values, global_scale(shift))
    difference = dequantize_nvfp4(codes, small_scales, global_scale(shift)) - values
    changed = (difference.reshape(-1, NVFP4_BLOCK) != 0).any(axis=-1)
    recoded = blocks.copy()
    recoded[below] = codes
    block_scales.reshape(*scales.shape, _HALVES)[below] = small_scales
    requantized = int(changed.sum())
    return Recoded(
        recoded.reshape(packed.shape),
        block_scales,
        count - requantized,
        requantized,
        sum_of_squares(difference.reshape(-1, NVFP4_BLOCK)[changed]),
        sum_of_squares(values.reshape(-1, NVFP4_BLOCK)[changed]),
    )


METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
LARGEST_SCALE = 252
"""E8M0 code of 2^125: above it, values overflow bf16."""

_CHUNK = 4 << 20
_STRIP = 256
_FIX = "download the checkpoint again"


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One matrix of all experts of a layer, in MXFP4; `name` is without `_blocks`."""

    name: str
    blocks: TensorEntry
    scales: TensorEntry

    def iterate(self) -> Iterator[tuple[Codes, Codes]]:
        """Packed codes [out, in/2] and scales [out, in/32] of one expert after the other."""
        count, rows = self.blocks.shape[:2]
        entries = self.blocks, self.scales
        packed, scales = (entry.pieces(entry.length // count) for entry in entries)
        for pair in zip(packed, scales, strict=True):
            codes, factors = (np.frombuffer(data, np.uint8) for data in pair)
            yield codes.reshape(rows, -1), factors.reshape(rows, -1)


def has_mxfp4_experts(config: Mapping[str, Any]) -> bool:
    """Whether config.json states gpt-oss's native MXFP4."""
    stated = config.get(CONFIG_KEY)
    return isinstance(stated, dict) and stated.get("quant_method") == METHOD


def find_experts(checkpoint: Checkpoint) -> dict[str, LayerExperts]:
    """The MXFP4 matrices of a checkpoint, by the name of their `_blocks`.

    Raises:
        DflashError: there are none, scales are missing or have another shape.
    """
    found: dict[str, LayerExperts] = {}
    for entry in checkpoint.tensors.values():
        if not entry.name.endswith(BLOCKS):
            continue
        name = entry.name.removesuffix(BLOCKS)
        scales = checkpoint.tensors.get(name + SCALES)
        if scales is None:
            raise entry.error(f"{quoted(name + SCALES)} is missing", _FIX)
        for one, wanted in ((entry, (*scales.shape, MX_BLOCK // 2)), (scales, entry.shape[:3])):
            if one.dtype != "U8" or one.shape != wanted or len(wanted) < 3 or not one.length:
                what = f"it is {one.dtype} {list(one.shape)}, not U8 {list(wanted)}"
                raise one.error(what, _FIX)
        found[entry.name] = LayerExperts(name, entry, scales)
    if not found:
        what = f"states MXFP4, but holds no tensor called *{BLOCKS}"
        raise DflashError(what, where=checkpoint.path, fix=_FIX)
    return found


class _ExpertRewriting(Rewriting):
    def __init__(self, checkpoint: Checkpoint, form: Format) -> None:
        algorithm = WEIGHTS_ONLY if form is Format.NVFP4 else None
        stage = f"converting experts to {form.algorithm}"
        super().__init__(stage, {"experts": form.algorithm}, _kept(checkpoint), algorithm)
        self._form = form
        self._experts = find_experts(checkpoint)
        self._dropped = {one.scales.name for one in self._experts.values()}
        self._largest: Mapping[str, float] = {}

    def layout(self, entry: TensorEntry) -> list[TensorLayout] | None:
        if entry.name in self._dropped:
            return []
        experts = self._experts.get(entry.name)
        if experts is None:
            return None
        name, (count, rows, blocks) = experts.name, experts.scales.shape
        columns = blocks * MX_BLOCK
        if self._form is Format.BF16:
            return [TensorLayout(name, "BF16", (count, columns, rows))]
        return [
            TensorLayout(name, "U8", (count, columns // 2, rows)),
            TensorLayout(f"{name}_weight_scale", "F8_E4M3", (count, columns // NVFP4_BLOCK, rows)),
            TensorLayout(f"{name}_weight_scale_2", "F32", ()),
        ]

    def prepare(self, partial: PartialCheckpoint, progress: Progress) -> None:
        experts = self._experts.values()
        if partial.state.weights is None:
            progress.stage("reading block scales", sum(one.scales.length for one in experts))
            partial.state.weights = {
                one.name: float(_largest_scale(one.scales, progress.advance)) for one in experts
            }
            partial.save()
        self._largest = partial.state.weights

    def write(
        self, entry: TensorEntry, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> tuple[str, TensorReport]:
        experts = self._experts[entry.name]
        if self._form is Format.BF16:
            for packed, scales in experts.iterate():
                # At most one bit follows the leading one, so the lower half of a value is zero.
                bits = dequantize_mxfp4(packed, scales).view(np.uint32) >> np.uint32(16)
                shard.write(experts.name, _turned(bits.astype(np.uint16)))
                on_bytes(packed.size)
            blocks = experts.scales.num_elements * (MX_BLOCK // NVFP4_BLOCK)
            return experts.name, TensorReport(error=0.0, exact=blocks)
        shift = int(self._largest[experts.name]) - E8M0_BIAS - LARGEST_EXPONENT
        exact = requantized = 0
        error = norm = 0.0
        for packed, scales in experts.iterate():
            recoded = mxfp4_to_nvfp4(packed, scales, shift)
            shard.write(experts.name, _turned(recoded.packed))
            shard.write(f"{experts.name}_weight_scale", _turned(recoded.scales))
            exact += recoded.exact
            requantized += recoded.requantized
            error += recoded.error
            norm += recoded.norm
            on_bytes(packed.size)
        scale = np.asarray(global_scale(shift), "<f4")
        shard.write(f"{experts.name}_weight_scale_2", scale.tobytes())
        relative = math.sqrt(error / norm) if norm else 0.0
        report = TensorReport(error=relative, exact=exact, requantized=requantized)
        return experts.name, report


def convert_experts(
    checkpoint: Checkpoint,
    form: Format,
    destination: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> Rewritten:
    """Writes a copy of a gpt-oss checkpoint whose experts have another format.

    Shards keep their names; memory stays at a few times one expert's matrix. The reports count
    each matrix's blocks of 16 that keep every value, and those that were quantised again.

    Raises:
        DflashError: see `find_experts` and `rewrite_checkpoint`; scales that are NaN or so large
            that values overflow.
    """
    rewriting = _ExpertRewriting(checkpoint, form)
    return rewrite_checkpoint(checkpoint, rewriting, destination, progress, overwrite=overwrite)


def _turned(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The transpose, in strips that a core's cache holds: several times faster than at once."""
    turned = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, len(matrix), _STRIP):
        turned[:, start : start + _STRIP] = matrix[start : start + _STRIP].T
    return turned


def _kept(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Patterns of every module that stays as it is: those that MXFP4's statement has, and more."""
    stated = checkpoint.config[CONFIG_KEY].get("modules_to_not_convert") or []
    patterns = [f"{name}*" if "*" in name and not name.endswith("*") else name for name in stated]
    matrices = (
        entry.name.removesuffix(".weight")
        for entry in checkpoint.tensors.values()
        if entry.name.endswith(".weight") and len(entry.shape) > 1
    )
    rest = {one for one in matrices if not any(fnmatchcase(one, p) for p in patterns)}
    return (*patterns, *sorted(rest))


def _largest_scale(entry: TensorEntry, on_bytes: Callable[[int], None]) -> int:
    largest = 0
    for data in entry.pieces(_CHUNK):
        largest = max(largest, int(np.frombuffer(data, np.uint8).max()))
        on_bytes(len(data))
    if largest > LARGEST_SCALE:
        what = "NaN" if largest == E8M0_NAN else f"2^{largest - 127}, more than bf16 holds"
        raise entry.error(f"a block's scale is {what}", _FIX)
    return largest
