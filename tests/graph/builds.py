"""Graphs of any form over a pair's own weights, opened or not."""

from __future__ import annotations

import onnx
import onnxruntime as ort

from dflash_trt.backends.onnxruntime.session import open_session
from dflash_trt.graph.bindings import GraphName
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.target import build_target
from dflash_trt.models.safetensors_header import read_header
from tests.pairs import TinyPair


def build(built: TinyPair, graph: GraphName, form: GraphForm) -> onnx.ModelProto:
    """A graph over the bundle's own files."""
    folder = built.bundle.folder
    tables = read_header(folder / "weights" / "tables.safetensors")
    sources = (built.pair.target.weights, built.pair.draft.weights)
    shards = {
        entry.file: f"weights/{owner}/shard-00000.safetensors"
        for owner, weights in zip(("target", "draft"), sources, strict=True)
        for entry in weights.values()
    }
    shards |= {entry.file: "weights/tables.safetensors" for entry in tables.values()}
    arguments = (tables, lambda entry: shards[entry.file], form)
    if graph == "draft":
        return build_draft(built.pair, *arguments)
    draft = built.pair.draft if graph == "target" else None
    return build_target(built.pair.target, draft, *arguments)


def open_model(built: TinyPair, model: onnx.ModelProto) -> ort.InferenceSession:
    """A session of a graph that `build` made, for one thread."""
    path = built.bundle.folder / "opened.onnx"  # external data lies beside it
    path.write_bytes(model.SerializeToString())
    session = open_session(path, 1)
    path.unlink()
    return session
