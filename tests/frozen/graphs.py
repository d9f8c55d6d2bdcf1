"""Hashes of every graph in every form.

A graph is hashed without the producer's version, and with the names of stored tensors where it
has files and offsets: they are the checkpoint's facts. Beside the hash of the whole stand shorter
ones of its parts, so that a difference says where to look.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import onnx
from safetensors.numpy import save_file

from tests.frozen import adapter
from tests.frozen.adapter import Form
from tests.frozen.pairs import PAIRS, write_pair

POSITIONS = 128
LENGTH, PAGE_SIZE, PAGES = 112, 16, 9
NARROW = {"fp16": "float16", "bf16": "bfloat16"}


def forms() -> dict[str, Form]:
    """Every combination of compute type, layout, what caches hold and who draws."""
    named = {}
    for precision, is_paged, is_fp8, draws in product(
        ("fp32", *NARROW), (False, True), (False, True), (False, True)
    ):
        words = [precision, "paged" if is_paged else "linear", "fp8" if is_fp8 else "compute"]
        is_narrow = precision in NARROW
        named["-".join([*words, *["draws"] * draws])] = Form(
            NARROW.get(precision, "float32"),
            cache_length=LENGTH if is_narrow else None,
            page_size=PAGE_SIZE if is_paged else None,
            pages=PAGES if is_paged and is_narrow else None,
            is_fp8=is_fp8,
            draws=draws,
        )
    named["fp32-linear-compute-fixed"] = Form("float32", cache_length=LENGTH)
    named["fp32-linear-compute-observe"] = Form("float32", observe=True)
    named["bf16-linear-compute-free"] = Form("bfloat16")
    named["bf16-linear-compute-observe"] = Form("bfloat16", LENGTH, observe=True)
    return named


def graph_facts(folder: Path, names: Iterable[str] = PAIRS) -> dict[str, str]:
    """The digest of each graph, by "pair/graph/form"."""
    return {key: _digest(model) for key, model in graphs(folder, names)}


def graphs(folder: Path, names: Iterable[str] = PAIRS) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every graph in its canonical form, with its name."""
    for name in names:
        pair = write_pair(name, folder / name)
        tables = folder / name / "tables.safetensors"
        save_file(adapter.rope_tables(pair, POSITIONS), tables)
        stored = _StoredTensors()
        for (label, form), graph in product(forms().items(), adapter.GRAPHS):
            model = adapter.build_graph(graph, pair, tables, form)
            if form.draws and form.precision != "float32":
                handed = adapter.handed_over(model, LENGTH)
                yield f"{name}/{graph}/{label}-plugins", stored.canonical(handed)
            yield f"{name}/{graph}/{label}", stored.canonical(model)


class _StoredTensors:
    """The names of what lies in checkpoints' files."""

    def __init__(self) -> None:
        self._names: dict[str, dict[int, str]] = {}

    def canonical(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model`, changed in place: no version, and names instead of places in files."""
        model.producer_version = ""
        for tensor in model.graph.initializer:
            if not tensor.external_data:
                continue
            place = {item.key: item.value for item in tensor.external_data}
            del tensor.external_data[:]
            file, offset = place["location"], int(place["offset"])
            tensor.external_data.add(key="tensor", value=self._name(file, offset))
            tensor.external_data.add(key="length", value=place["length"])
        return model

    def _name(self, file: str, offset: int) -> str:
        if file not in self._names:
            with Path(file).open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header: dict[str, Any] = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            self._names[file] = {
                8 + size + entry["data_offsets"][0]: name for name, entry in header.items()
            }
        names = self._names[file]
        first = max(start for start in names if start <= offset)
        return f"{names[first]}+{offset - first}"


def _digest(model: onnx.ModelProto) -> str:
    """The whole model's SHA-256, then that of each part and how many there are of it."""
    parts = {
        "nodes": model.graph.node,
        "values": [*model.graph.input, *model.graph.output],
        "stored": model.graph.initializer,
        "functions": model.functions,
    }
    words = [_sha256([model])]
    words += [f"{name}:{len(part)}:{_sha256(part)[:8]}" for name, part in parts.items()]
    return " ".join(words)


def _sha256(messages: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for message in messages:
        raw = message.SerializeToString(deterministic=True)
        digest.update(struct.pack("<Q", len(raw)) + raw)
    return digest.hexdigest()
