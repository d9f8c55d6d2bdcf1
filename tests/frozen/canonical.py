"""What a machine, a day or a version puts into outputs, taken out again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import onnx

from dflash_trt import __version__

ROOT = Path(__file__).parents[2]
_SIGNIFICANT = 9
"""Digits of a number: libraries of mathematics differ behind them."""


def masked(text: str, folder: Path | None = None) -> str:
    """`text` without the project's version and the path of `folder`."""
    text = text.replace(f"dflash-trt {__version__}", "dflash-trt VERSION")
    if folder is not None:
        for path in {str(folder), str(folder.resolve())}:
            text = text.replace(path, "FOLDER")
    return text.replace(str(ROOT), "ROOT")


def rounded(value: Any) -> Any:
    """A JSON value with every float at nine significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def file_bytes(path: Path, folder: Path) -> bytes:
    """A file's bytes, a graph's without the version of its producer, a text's masked."""
    if path.suffix == ".onnx":
        model = onnx.load(path, load_external_data=False)
        model.producer_version = ""
        return bytes(model.SerializeToString(deterministic=True))
    if path.suffix in (".json", ".jsonl", ".jinja"):
        return masked(path.read_text(encoding="utf-8"), folder).encode()
    return path.read_bytes()


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def rows_digest(rows: list[Any]) -> str:
    """A list too long to read."""
    return f"{len(rows)} rows {sha256(json.dumps(rounded(rows), sort_keys=True))[:16]}"
