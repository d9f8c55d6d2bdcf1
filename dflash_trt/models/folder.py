"""A Hugging Face checkpoint folder: config.json and one or many .safetensors shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, exists
from dflash_trt.core.strict_json import quoted, read_json_object
from dflash_trt.errors import DflashError, first_few, one_line
from dflash_trt.models.safetensors_header import TensorEntry, read_header

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FOREIGN_SUFFIXES = {".bin": "pickle", ".pt": "pickle", ".pth": "pickle", ".gguf": "GGUF"}
"""Weight formats that are recognised only to be refused: pickle can run code, GGUF is not HF."""
NAMES_SHOWN = 3
_GGUF_FIX = "make a checkpoint of it: dflash-trt import-gguf FILE -o DIR"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers have been read and agree; no weight is loaded.

    `files` are the shards by their names in the folder, sorted; `TensorEntry.file` is resolved.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: tuple[Path, ...]


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of `folder`; DflashError when the folder or the file is missing or malformed."""
    folder = _existing_folder(folder)
    path = folder / CONFIG_NAME
    if not exists(path):
        fix = "pass the folder that a Hugging Face checkpoint was downloaded to"
        raise DflashError(f"has no {CONFIG_NAME}", where=folder, fix=fix)
    return read_json_object(path)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads the config and every shard's header, and checks the index against the shards.

    Raises:
        DflashError: no config, no safetensors weights, a malformed header, or an index that
            does not agree with the shards (either way) or names a path outside the folder.
    """
    folder = _existing_folder(folder)
    config = read_config(folder)
    if exists(folder / SINGLE_NAME):
        files: tuple[Path, ...] = (folder / SINGLE_NAME,)
        tensors = read_header(files[0])
    elif exists(folder / INDEX_NAME):
        files, tensors = _read_shards(folder)
    else:
        raise _no_weights(folder)
    if not tensors:
        raise DflashError("holds no tensors", where=folder, fix="download the checkpoint again")
    return Checkpoint(folder, config, tensors, files)


def _existing_folder(folder: str | Path) -> Path:
    path = Path(folder)
    try:
        if path.is_dir():
            return path
    except (OSError, ValueError) as error:
        raise DflashError(f"cannot be read ({one_line(error)})", where=path) from None
    what = "is a file, not a folder" if path.exists() else "no such folder"
    fix = _GGUF_FIX if path.suffix == ".gguf" else "pass a Hugging Face checkpoint folder"
    raise DflashError(what, where=path, fix=fix)


def _no_weights(folder: Path) -> DflashError:
    try:
        found = sorted(f.name for f in folder.iterdir() if f.suffix in FOREIGN_SUFFIXES)
    except OSError as error:
        return DflashError(f"cannot be read ({one_line(error)})", where=folder)
    if not found:
        what = f"has neither {SINGLE_NAME} nor {INDEX_NAME}"
        return DflashError(what, where=folder, fix="download the checkpoint's weights")
    kind = FOREIGN_SUFFIXES[Path(found[0]).suffix]
    fix = f"convert them to {SINGLE_NAME} (save_pretrained in transformers writes it)"
    what = f"holds only {kind} weights ({found[0]})"
    return DflashError(what, where=folder, fix=_GGUF_FIX if kind == "GGUF" else fix)


def _read_shards(folder: Path) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    index_path = folder / INDEX_NAME
    weight_map = read_json_object(index_path, FileKind.INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what = "weight_map must map tensor names to shard files"
        raise DflashError(what, where=index_path, fix="download the index again")
    for shard in weight_map.values():
        _check_shard_name(shard, index_path)

    files = tuple(folder / shard for shard in sorted(set(weight_map.values())))
    tensors: dict[str, TensorEntry] = {}
    shard_of: dict[str, str] = {}
    for file in files:
        if not exists(file):
            first = next(name for name, shard in weight_map.items() if shard == file.name)
            what = f"names {quoted(file.name)} (for {quoted(first)}), which is not in the folder"
            raise DflashError(what, where=index_path, fix="download the missing shard")
        for name, entry in read_header(file).items():
            if name in tensors:
                what = f"tensor {quoted(name)} is in both {shard_of[name]} and {file.name}"
                raise DflashError(what, where=folder, fix="remove the stale shard")
            tensors[name] = entry
            shard_of[name] = file.name
    _check_index(weight_map, shard_of, index_path)
    return files, tensors


def _check_shard_name(shard: Any, index_path: Path) -> None:
    """A shard is a plain file name; anything that could leave the folder is refused."""
    plain = (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and not any(character in shard for character in "/\\:\0")
        and shard.isprintable()
    )
    if not plain:
        raise DflashError(
            f"shard {quoted(shard)} is not the name of a .safetensors file in this folder",
            where=index_path,
            fix="shards lie beside the index; download the checkpoint again",
        )


def _check_index(weight_map: dict[str, str], shard_of: dict[str, str], index_path: Path) -> None:
    lost = [one for one in weight_map.items() if shard_of.get(one[0]) != one[1]]
    problems = [f"{quoted(name)} is not in {shard}" for name, shard in lost]
    unlisted = [one for one in shard_of.items() if one[0] not in weight_map]
    problems += [f"{quoted(name)} in {shard} is not in the index" for name, shard in unlisted]
    if problems:
        raise DflashError(
            f"does not match the shards: {first_few(problems, NAMES_SHOWN)}",
            where=index_path,
            fix="download the index and the shards of one revision",
        )
