"""A checkpoint being written: a folder that survives a kill, and a note of what is finished."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_trt.core import publish
from dflash_trt.core.files import resolved
from dflash_trt.core.validation import StrictRecord
from dflash_trt.errors import DflashError
from dflash_trt.models.quantization import QUANT_CONFIG_NAME
from dflash_trt.models.safetensors_header import header_sha256

# Inside the partial folder, beside its lock and what is replaced.
_NEW_NAME = "checkpoint"
_STATE_NAME = "state.json"
_WORK_NAME = "work"
_QUANTIZED = publish.StagedKind("quantized checkpoint", QUANT_CONFIG_NAME)


class TensorReport(StrictRecord):
    """How a tensor was converted.

    `error` is |W' - W| / |W| in the Frobenius norm, over what was requantised. Of blocks whose
    scale was converted, `exact` keep every value and `requantized` do not.
    """

    error: float
    exact: int = 0
    requantized: int = 0


class FinishedShard(StrictRecord):
    """A shard that is whole: its size, its header, and the reports of its modules."""

    bytes: int
    header_sha256: str
    reports: dict[str, TensorReport]


class State(BaseModel):
    """What an interrupted run leaves for the next.

    `key` stands for source and options; `weights` and `activations` are largest magnitudes by role
    (of MXFP4: codes of scales), None until known; `shards` are the finished ones, by file name.
    """

    model_config = ConfigDict(extra="forbid")

    key: str
    weights: dict[str, float] | None = None
    activations: dict[str, float] | None = None
    shards: dict[str, FinishedShard] = {}


class PartialCheckpoint:
    """The folder to write into, the state beside it, and an empty `workspace` for other files."""

    def __init__(self, root: Path, key: str) -> None:
        self.folder = root / _NEW_NAME
        self.workspace = root / _WORK_NAME
        self._path = root / _STATE_NAME
        # A run begins, goes on where another was interrupted, or cannot use what that left.
        self.origin: Literal["fresh", "continued", "restarted"] = "fresh"
        self.state = State(key=key)
        if self._path.exists() or self.folder.exists():
            found = None
            with suppress(OSError, ValidationError):
                found = State.model_validate_json(self._path.read_bytes())
            if found is not None and found.key == key and self.folder.is_dir():
                self.origin, self.state = "continued", found
            else:
                self.origin = "restarted"
                shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        shutil.rmtree(self.workspace, ignore_errors=True)
        self.workspace.mkdir()
        self.save()

    def is_finished(self, name: str) -> bool:
        """Whether shard `name` is whole; one that is not what was noted counts as missing."""
        noted, path = self.state.shards.get(name), self.folder / name
        if noted is None or not path.is_file() or path.stat().st_size != noted.bytes:
            return False
        return header_sha256(path) == noted.header_sha256

    def finish(self, name: str, reports: dict[str, TensorReport]) -> None:
        """Notes that shard `name` is whole."""
        path = self.folder / name
        self.state.shards[name] = FinishedShard(
            bytes=path.stat().st_size, header_sha256=header_sha256(path), reports=reports
        )
        self.save()

    def save(self) -> None:
        """Replaces the note on disk; a kill leaves the old one or the new one."""
        publish.replace_file(self._path, self.state.model_dump_json().encode(), durable=True)


@contextmanager
def partial_checkpoint(
    destination: Path, key: str, *, overwrite: bool
) -> Iterator[PartialCheckpoint]:
    """Yields a checkpoint that becomes `destination` on success.

    An error leaves nothing. An interrupted run (Ctrl-C or a kill) leaves `partial_folder`; the
    next run with the same key finds its finished shards there.

    Raises:
        DflashError: `destination` exists (without `overwrite`), is not a quantised checkpoint,
            cannot be written, or is being written by another process.
    """
    destination = resolved(destination)
    check_destination(destination, overwrite=overwrite)
    root = partial_folder(destination)
    created = publish.missing_folders(destination.parent)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = publish.lock_folder(root, wait=False)
    except (BlockingIOError, FileNotFoundError) as error:
        raise DflashError("is being written by another process", where=destination) from error
    except OSError as error:
        publish.remove_empty(created)
        raise publish.file_error(error, destination.parent) from error
    keep = True
    try:
        with publish.publishing(root / _NEW_NAME, destination, overwrite=overwrite):
            publish.put_back(root, destination)
            check_destination(destination, overwrite=overwrite)
            yield PartialCheckpoint(root, key)
        keep = False
    except Exception:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
            publish.remove_empty(created)
        os.close(lock)


def partial_folder(destination: Path) -> Path:
    """Where an interrupted run leaves its work: a hidden folder beside `destination`."""
    return destination.parent / f".{destination.name}.quantizing"


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Raises DflashError (usage) when no quantised checkpoint may be put at `destination`."""
    publish.check_destination(destination, overwrite=overwrite, kind=_QUANTIZED)
