"""A folder of graphs while it is put together: weights, RoPE tables, the graphs over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from safetensors.numpy import save

from dflash_trt.core.files import FileKind, copy_small, exists, resolved
from dflash_trt.core.links import check_space, place_files
from dflash_trt.core.progress import Progress
from dflash_trt.graph.bindings import Owner
from dflash_trt.models.draft_tokens import DRAFT_TOKENS_NAME
from dflash_trt.models.folder import CONFIG_NAME, INDEX_NAME, Checkpoint
from dflash_trt.models.quantization import QUANT_CONFIG_NAME
from dflash_trt.models.safetensors_header import TensorEntry, read_header
from dflash_trt.models.target import GENERATION_CONFIG_NAME
from dflash_trt.quantization.int8 import int8_bytes, write_int8

TABLES_LOCATION = "weights/tables.safetensors"
INT8_LOCATION = "weights/int8.safetensors"
DESCRIBING_FILES = (CONFIG_NAME, GENERATION_CONFIG_NAME, QUANT_CONFIG_NAME, DRAFT_TOKENS_NAME)


class GraphFolder:
    """What `folder` holds so far.

    Attributes:
        weights: the shard that each weight file was made of, by its path in the folder. One that
            both models use lies there twice, so that either's weights are whole. Eight-bit copies
            were made of none but themselves.
        has_copies: whether any weight file is one of its own, not a hard link.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: dict[str, Path] = {}
        self.has_copies = False
        self._locations: dict[Path, str] = {}

    def place_weights(
        self,
        weights: Mapping[Owner, Mapping[str, TensorEntry]],
        destination: Path,
        progress: Progress,
        *,
        copy: bool = False,
        written: Path | None = None,
    ) -> None:
        """Links every shard that `weights` use into weights/, or copies it where need be.

        `destination` is where the folder will lie: an error about space names it. `copy` makes
        files of their own of all but those below `written`, which were made for this folder: once
        `written` is removed they are nobody else's.
        """
        for owner, entries in weights.items():
            for index, shard in enumerate(sorted({entry.file for entry in entries.values()})):
                # Blobs of a hub cache are named by hash; a number says more to a reader.
                location = f"weights/{owner}/shard-{index:05d}.safetensors"
                self._locations.setdefault(shard, location)
                self.weights[location] = shard
        files = {self.folder / location: shard for location, shard in self.weights.items()}
        made = None if written is None else resolved(written)
        apart = {
            path
            for path, shard in files.items()
            if copy and (made is None or not shard.is_relative_to(made))
        }
        self.has_copies = place_files(files, destination, "weights", progress, apart=apart)

    def describe_weights(self, owner: Owner, checkpoint: Checkpoint) -> None:
        """Makes `owner`'s weights folder a Hugging Face checkpoint of its own."""
        folder = self.folder / "weights" / owner
        for name in DESCRIBING_FILES:
            if exists(checkpoint.path / name):
                copy_small(checkpoint.path / name, folder / name, FileKind.CONFIG)
        shards = self.shards(owner)
        placed = {name: entry for name, entry in checkpoint.tensors.items() if entry.file in shards}
        index = {
            "metadata": {"total_size": sum(entry.length for entry in placed.values())},
            "weight_map": {name: shards[entry.file] for name, entry in sorted(placed.items())},
        }
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def shards(self, owner: Owner) -> dict[Path, str]:
        """The names of `owner`'s weight files in its own folder, by the shard they were made of."""
        return {
            shard: Path(location).name
            for location, shard in self.weights.items()
            if Path(location).parent.name == owner
        }

    def write_tables(self, tables: Mapping[str, NDArray[Any]]) -> dict[str, TensorEntry]:
        """Stores what a build computes (RoPE tables, a draft's head); returns where each lies."""
        path = self.folder / TABLES_LOCATION
        # Not save_file: on a full disk it raises an error of its own, not an OSError.
        path.write_bytes(save(dict(tables)))
        self._locations[resolved(path)] = TABLES_LOCATION
        return read_header(path)

    def write_int8(
        self, matrices: Mapping[str, TensorEntry], progress: Progress
    ) -> dict[str, TensorEntry]:
        """Stores eight-bit copies of matrices; returns where each part lies, by its name."""
        path = self.folder / INT8_LOCATION
        check_space(int8_bytes(matrices.values()), self.folder, path)
        write_int8(path, matrices, progress)
        real = resolved(path)
        self.weights[INT8_LOCATION] = real
        self._locations[real] = INT8_LOCATION
        return read_header(path)

    def locate(self, entry: TensorEntry) -> str:
        """Where a graph of this folder finds a tensor's file."""
        return self._locations[entry.file]

    def write_graph(self, model: onnx.ModelProto) -> None:
        """Stores a graph under its name."""
        path = self.folder / f"{model.graph.name}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
