"""Hashes of every graph in every form.

A graph is hashed without the producer's version, and with the names of stored tensors where it
has files and offsets: they are the checkpoint's facts. Beside the hash of the whole stand shorter
ones of its parts, so that a difference says where to look.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import onnx
from safetensors.numpy import save_file

from dflash_trt.backends.kernel_calls import hand_over, hand_over_attention
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.rope_tables import compute_tables
from dflash_trt.graph.target import build_target
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.safetensors_header import TensorEntry, read_header
from tests.frozen.pairs import PAIRS, write_pair

POSITIONS = 128
LENGTH, PAGE_SIZE, PAGES, BLOCK_SIZE = 112, 16, 9, 8
GRAPHS = ("target", "draft", "target_only")
PRECISIONS = {"fp32": Precision.FLOAT32, "fp16": Precision.FLOAT16, "bf16": Precision.BFLOAT16}


def forms() -> dict[str, GraphForm]:
    """Every combination of compute type, layout, what caches hold and who draws."""
    named = {}
    for (short, precision), is_paged, cache_dtype, draws in product(
        PRECISIONS.items(), (False, True), CacheDtype, (False, True)
    ):
        words = [short, "paged" if is_paged else "linear", cache_dtype.name.lower()]
        is_narrow = precision is not Precision.FLOAT32
        named["-".join([*words, *["draws"] * draws])] = GraphForm(
            precision,
            cache_length=LENGTH if is_narrow else None,
            page_size=PAGE_SIZE if is_paged else None,
            pages=PAGES if is_paged and is_narrow else None,
            cache_dtype=cache_dtype,
            draws=draws,
        )
    wide, narrow = Precision.FLOAT32, Precision.BFLOAT16
    named["fp32-linear-compute-fixed"] = GraphForm(wide, cache_length=LENGTH)
    named["fp32-linear-compute-observe"] = GraphForm(wide, observe=True)
    named["bf16-linear-compute-free"] = GraphForm(narrow)
    named["bf16-linear-compute-observe"] = GraphForm(narrow, cache_length=LENGTH, observe=True)
    return named


def graph_facts(folder: Path, names: Iterable[str] = PAIRS) -> dict[str, str]:
    """The digest of each graph in its canonical form, by "pair/graph/form"."""
    facts = {}
    for name in names:
        pair = write_pair(name, folder / name)
        tables = folder / name / "tables.safetensors"
        save_file(dict(compute_tables(pair.target, pair.draft, POSITIONS)), tables)
        stored = _StoredTensors()
        wanted = PAIRS[name].forms or forms()
        for (label, form), graph in product(forms().items(), GRAPHS):
            if label not in wanted:
                continue
            model = _build(graph, pair, tables, form)
            if form.draws and form.precision is not Precision.FLOAT32:
                handed = stored.canonical(_handed_over(model))
                facts[f"{name}/{graph}/{label}-plugins"] = _digest(handed)
            facts[f"{name}/{graph}/{label}"] = _digest(stored.canonical(model))
    return facts


def _build(graph: str, pair: Pair, tables: Path, form: GraphForm) -> onnx.ModelProto:
    """A graph whose weights are referenced by the paths of their files."""
    entries = read_header(tables)
    if pair.target.sizes.has_state:
        form = replace(form, replay=BLOCK_SIZE)

    def locate(entry: TensorEntry) -> str:
        return str(entry.file)

    if graph == "draft":
        return build_draft(pair, entries, locate, form)
    draft = pair.draft if graph == "target" else None
    return build_target(pair.target, draft, entries, locate, form)


def _handed_over(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` as TensorRT gets it where plugins stand for functions."""
    from dflash_plugins.table import operations

    handed = hand_over(model, set(operations()))
    hand_over_attention(handed, BLOCK_SIZE, LENGTH)
    return handed


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
