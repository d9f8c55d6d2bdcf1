"""Bundles of the target with a draft: what answers, captures features and measures acceptance."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_trt.building.bundle_writer import TOKENIZER_FILES, build_bundle
from dflash_trt.building.observing.observe import estimate_memory
from dflash_trt.building.spec import BuildSpec, CacheOptions
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.core.files import exists, find_file
from dflash_trt.core.free_memory import available_memory
from dflash_trt.core.links import place_files
from dflash_trt.core.progress import Progress, SilentProgress
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import Owner
from dflash_trt.models.build_config import BuildConfig, CheckpointSource
from dflash_trt.models.draft import DraftSpec, read_draft
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.training.target import TrainingTarget
from dflash_trt.training.work_folder import write_lines

MAX_BATCH = 16
_GIB = 1 << 30
_ROWS = 256


class PairBuilder:
    """Builds bundles for the CPU of `target` and drafts like the one in the folder `draft`.

    Args:
        max_seq_len: tokens of the longest row.
    """

    def __init__(self, target: TrainingTarget, draft: Path, max_seq_len: int) -> None:
        self._target, self._max_seq_len = target, max_seq_len
        self._folder = join_target(target, draft.parent / "target")
        self._max_batch = choose_batch(target.spec, read_draft(draft), max_seq_len)

    def build(
        self,
        draft: Path,
        destination: Path,
        *,
        prompts: Sequence[str] = (),
        progress: Progress | None = None,
        overwrite: bool = True,
    ) -> Bundle:
        """Builds a bundle whole or not at all; `prompts` go along, for `verify`.

        Raises:
            DflashError: the pair cannot be served, or the disk refuses.
        """
        pair = check_pair(read_target(self._folder), read_draft(draft))
        config = BuildConfig(
            description=f"{self._target.name} with a draft trained for it",
            target=CheckpointSource(checkpoint=str(self._target.folder)),
            draft=CheckpointSource(checkpoint=str(draft)),
            max_batch=self._max_batch,
            max_seq_len=self._max_seq_len,
        )
        caches = CacheOptions(kv_dtype=self._target.cache_dtype.value)
        spec = BuildSpec(overwrite=overwrite, caches=caches)
        told, name = progress or SilentProgress(), self._target.name
        with TemporaryDirectory() as scratch:
            file = Path(scratch) / "prompts.jsonl"
            write_lines(file, ({"prompt": text} for text in prompts))
            given = file if prompts else None
            int8: tuple[Owner, ...] = ("target", "draft") if self._target.int8 else ()
            build_bundle(pair, config, name, destination, spec, told, prompts=given, int8=int8)
        return open_bundle(destination)


def join_target(target: TrainingTarget, folder: Path) -> Path:
    """A folder with the target's weights and its tokenizer: its own, or one of both.

    A bundle keeps the two apart.
    """
    if target.tokenizer_folder == target.folder:
        return target.folder
    if folder.exists():
        return folder
    texts = {name: target.tokenizer_folder / name for name in TOKENIZER_FILES}
    files = {path.name: path for path in target.folder.iterdir() if not path.is_dir()}
    files |= {name: path for name, path in texts.items() if exists(path)}
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    placed = {new / name: find_file(path) for name, path in files.items()}
    place_files(placed, folder, "the target", SilentProgress())
    new.rename(folder)
    return folder


def choose_batch(target: TargetSpec, draft: DraftSpec, max_seq_len: int) -> int:
    """How many sequences are answered together: as many as this machine's memory holds.

    Raises:
        DflashError: not even one; says what is needed and what there is.
    """
    available = available_memory()
    batch = MAX_BATCH
    while available is not None:
        needed = estimate_memory(target, draft, max_seq_len * batch, _ROWS)
        if needed <= available:
            break
        if batch == 1:
            raise DflashError(
                f"the target in float32 needs about {needed / _GIB:.1f} GiB of memory, "
                f"{available / _GIB:.1f} GiB are available",
                where=target.checkpoint.path,
                fix="lower --set max-length, or use a machine with more memory",
            )
        batch //= 2
    return batch
