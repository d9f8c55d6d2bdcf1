"""Rewrites gpt-oss's native MXFP4 experts as NVFP4 or bf16, expert by expert.

The layouts of both are in checkpoints/quantized_weights.py; bf16 is `X` [E, in, out]. Everything
else, attention and router included, is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.checkpoints.folder import Checkpoint
from dflash_trt.checkpoints.quantization import CONFIG_KEY, WEIGHTS_ONLY
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.core.formats import MX_BLOCK, NVFP4_BLOCK
from dflash_trt.core.progress import Progress
from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.quantization.formats import E8M0_NAN, Codes
from dflash_trt.quantization.partial import PartialCheckpoint, TensorReport
from dflash_trt.quantization.recode import (
    global_exponent,
    global_scale,
    mxfp4_to_bf16,
    mxfp4_to_nvfp4,
)
from dflash_trt.quantization.rewrite import Rewriting, Rewritten, rewrite_checkpoint
from dflash_trt.quantization.shards import ShardWriter, TensorLayout

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
LARGEST_SCALE = 252
"""E8M0 code of 2^125: above it, values overflow bf16."""

_CHUNK = 4 << 20
_STRIP = 256
_FIX = "download the checkpoint again"


class ExpertFormat(StrEnum):
    """What experts become."""

    NVFP4 = "NVFP4"
    BF16 = "BF16"


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """One matrix of all experts of a layer, in MXFP4; `name` is without `_blocks`."""

    name: str
    blocks: TensorEntry
    scales: TensorEntry

    @property
    def count(self) -> int:
        return self.blocks.shape[0]

    @property
    def rows(self) -> int:
        """Outputs of each expert's matrix."""
        return self.blocks.shape[1]

    @property
    def columns(self) -> int:
        """Its inputs."""
        return self.scales.shape[2] * MX_BLOCK

    def iterate(self) -> Iterator[tuple[Codes, Codes]]:
        """Packed codes [out, in/2] and scales [out, in/32] of one expert after the other.

        Raises DflashError when a file has become shorter than its header says.
        """
        packed, scales = (
            entry.pieces(entry.length // self.count) for entry in (self.blocks, self.scales)
        )
        for pair in zip(packed, scales, strict=True):
            codes, factors = (np.frombuffer(data, np.uint8) for data in pair)
            yield codes.reshape(self.rows, -1), factors.reshape(self.rows, -1)


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
        if entry.dtype != "U8" or len(entry.shape) != 4 or entry.shape[3] != MX_BLOCK // 2:
            wanted = f"U8 [E, out, in/32, {MX_BLOCK // 2}]"
            raise entry.error(f"it is {entry.dtype} {list(entry.shape)}, not {wanted}", _FIX)
        if scales.dtype != "U8" or scales.shape != entry.shape[:3]:
            wanted = f"U8 {list(entry.shape[:3])}"
            raise scales.error(f"it is {scales.dtype} {list(scales.shape)}, not {wanted}", _FIX)
        if not entry.length:
            raise entry.error("it is empty", _FIX)
        found[entry.name] = LayerExperts(name, entry, scales)
    if not found:
        raise DflashError(
            f"states MXFP4, but holds no tensor called *{BLOCKS}",
            where=checkpoint.path,
            fix=_FIX,
        )
    return found


class _ExpertRewriting(Rewriting):
    """MXFP4 experts become another format."""

    def __init__(self, checkpoint: Checkpoint, form: ExpertFormat) -> None:
        algorithm = WEIGHTS_ONLY if form is ExpertFormat.NVFP4 else None
        stage = f"converting experts to {form}"
        super().__init__(stage, {"experts": form}, _kept(checkpoint), algorithm)
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
        name, count, rows, columns = experts.name, experts.count, experts.rows, experts.columns
        if self._form is ExpertFormat.BF16:
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
        if self._form is ExpertFormat.BF16:
            for packed, scales in experts.iterate():
                shard.write(experts.name, _turned(mxfp4_to_bf16(packed, scales)))
                on_bytes(packed.size)
            blocks = experts.scales.num_elements * (MX_BLOCK // NVFP4_BLOCK)
            return experts.name, TensorReport(error=0.0, exact=blocks)
        return experts.name, self._write_nvfp4(experts, shard, on_bytes)

    def _write_nvfp4(
        self, experts: LayerExperts, shard: ShardWriter, on_bytes: Callable[[int], None]
    ) -> TensorReport:
        shift = global_exponent(int(self._largest[experts.name]))
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
        return TensorReport(error=relative, exact=exact, requantized=requantized)


def convert_experts(
    checkpoint: Checkpoint,
    form: ExpertFormat,
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
    """The largest E8M0 code of a tensor."""
    largest = 0
    for data in entry.pieces(_CHUNK):
        largest = max(largest, int(np.frombuffer(data, np.uint8).max()))
        on_bytes(len(data))
    if largest > LARGEST_SCALE:
        what = "NaN" if largest == E8M0_NAN else f"2^{largest - 127}, more than bf16 holds"
        raise entry.error(f"a block's scale is {what}", _FIX)
    return largest
