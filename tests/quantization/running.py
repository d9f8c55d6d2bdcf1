"""Quantising in tests: made-up magnitudes, remembered progress, independent reading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from dflash_trt.core.formats import Format
from dflash_trt.core.progress import Unit
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.linears import LAYER_LINEARS, QuantizeOptions
from dflash_trt.quantization.rewrite import Rewritten
from dflash_trt.quantization.scales import Activations


class Stages:
    """Progress that remembers its stages and how much of each was done."""

    def __init__(self) -> None:
        self.totals: dict[str, int | None] = {}
        self.done: dict[str, int] = {}
        self.units: dict[str, Unit] = {}
        self._current = ""

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> None:
        self._current = name
        self.totals[name] = total
        self.done[name] = 0
        self.units[name] = unit

    def advance(self, count: int) -> None:
        self.done[self._current] += count


class Failing(Stages):
    """Raises `error` once more than `after` bytes of `stage` are done."""

    def __init__(self, error: BaseException, stage: str, after: int = 0) -> None:
        super().__init__()
        self._error, self._stage, self._after = error, stage, after

    def advance(self, count: int) -> None:
        super().advance(count)
        if self._current == self._stage and self.done[self._stage] > self._after:
            raise self._error


def amax_of_all(spec: DecoderSpec) -> dict[str, float]:
    """A different input magnitude for every linear, the head and `fc` included."""
    roles = [
        role
        for role in spec.weights
        if role.rpartition(".")[2] in LAYER_LINEARS or role in ("lm_head", "fc")
    ]
    return {role: 1.0 + index / 8 for index, role in enumerate(roles)}


def quantize(
    spec: DecoderSpec,
    folder: Path,
    algorithm: Format = Format.NVFP4,
    *,
    activations: Activations | None = None,
    progress: Stages | None = None,
    **options: Any,
) -> Rewritten:
    """`quantize_checkpoint` with magnitudes made up."""
    return quantize_checkpoint(
        spec,
        QuantizeOptions(algorithm, **options),
        activations or Activations.known(amax_of_all(spec)),
        folder,
        progress or Stages(),
    )


def quantize_in_place(config: Path, owner: str) -> Path:
    """The checkpoint folder "target" or "draft" beside a build configuration, now in FP8."""
    folder, new = config.parent / owner, config.parent / "quantized"
    quantize(read_target(folder) if owner == "target" else read_draft(folder), new, Format.FP8)
    shutil.rmtree(folder)
    new.rename(folder)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as safetensors' own library reads it."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no mapping
                assert name not in tensors
                tensors[name] = opened.get_tensor(name)
    return tensors


def raw(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
