"""All that the frozen facts need of the project; nothing else here imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import onnx

from dflash_trt import __version__
from dflash_trt.backends.tensorrt.build.plugins import hand_over, hand_over_attention
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import Pair, check_pair
from dflash_trt.checkpoints.safetensors_header import read_header
from dflash_trt.checkpoints.target import read_target
from dflash_trt.cli.main import main
from dflash_trt.errors import DflashError
from dflash_trt.graph.draft import build_draft
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.tables import compute_tables
from dflash_trt.graph.target import build_target, build_target_only
from tests.cli.bigram import write_bigram_pair
from tests.reference.checkpoints import write_draft, write_target
from tests.reference.quantized import quantize_folder

__all__ = [
    "GRAPHS",
    "Form",
    "Pair",
    "build_graph",
    "handed_over",
    "main",
    "noted_errors",
    "quantize_folder",
    "read_pair",
    "rope_tables",
    "version",
    "write_bigram_pair",
    "write_draft",
    "write_target",
]

GRAPHS = ("target", "draft", "target_only")
BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True)
class Form:
    """A graph's form in words that no change of the project's own types touches."""

    precision: str
    cache_length: int | None = None
    page_size: int | None = None
    pages: int | None = None
    is_fp8: bool = False
    draws: bool = False
    observe: bool = False


def version() -> str:
    """The project's own, which every record carries."""
    return __version__


def read_pair(target: Path, draft: Path) -> Pair:
    return check_pair(read_target(target), read_draft(draft))


def rope_tables(pair: Pair, positions: int) -> dict[str, Any]:
    """float32 arrays [positions, D/2] by name."""
    return dict(compute_tables(pair, positions))


def build_graph(graph: str, pair: Pair, tables: Path, form: Form) -> onnx.ModelProto:
    """A graph whose weights are referenced by the paths of their files; see `rope_tables`."""
    made = GraphForm(
        Precision(form.precision),
        cache_length=form.cache_length,
        observe=form.observe,
        page_size=form.page_size,
        draws=form.draws,
        pages=form.pages,
        cache_dtype=CacheDtype.FP8 if form.is_fp8 else CacheDtype.COMPUTE,
    )
    entries = read_header(tables)

    def locate(entry: Any) -> str:
        return str(entry.file)

    if graph == "target_only":
        return build_target_only(pair.target, entries, locate, made)
    return (build_draft if graph == "draft" else build_target)(pair, entries, locate, made)


def handed_over(model: onnx.ModelProto, cache_length: int) -> onnx.ModelProto:
    """`model` as TensorRT gets it where plugins stand for functions."""
    from dflash_plugins.table import operations

    handed = hand_over(model, set(operations()))
    hand_over_attention(handed, BLOCK_SIZE, cache_length, keep_native=model.graph.name != "draft")
    return handed


@contextmanager
def noted_errors() -> Iterator[list[DflashError]]:
    """Every error of the project's that is made inside the block, in its order."""
    made: list[DflashError] = []
    original = DflashError.__init__

    def note(error: DflashError, *arguments: Any, **options: Any) -> None:
        original(error, *arguments, **options)
        made.append(error)

    with mock.patch.object(DflashError, "__init__", note):
        yield made
