"""Reading what was written without the project's own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open


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
