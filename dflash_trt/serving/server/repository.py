"""Writes a model repository that serves a bundle, complete in itself."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dflash_trt.backends.registry import check_runnable
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME, read_manifest
from dflash_trt.core.files import exists
from dflash_trt.core.links import place_files
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import StagedKind, staged_folder
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS, NOBODY, Drafting
from dflash_trt.decoding.schedule import BlockSchedule, schedule_name
from dflash_trt.decoding.tuning.bundle_schedule import (
    AUTO,
    NONE,
    check_drafter,
    choose_schedule,
    write_schedule,
)
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import AUTO as ALL_CORES
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.models.build_config import data_folder

LLM_MODEL = "tensorrt_llm"
ENSEMBLE_MODEL = "ensemble"
BUNDLE_FOLDER = Path(LLM_MODEL, "1", "bundle")
REPOSITORY = StagedKind("model repository", f"{LLM_MODEL}/config.pbtxt")

MAX_QUEUE_SIZE = 64


def identify_bundle(repository: Path) -> frozenset[tuple[str, object]]:
    """What tells the repository's bundle from any other; nothing where it has none.

    Weights, whose content nobody has hashed, count by when they were written.

    Raises:
        DflashError: the bundle has no good manifest, or lacks a file.
    """
    folder = repository / BUNDLE_FOLDER
    if not exists(folder / MANIFEST_NAME):
        return frozenset()
    bundle = Bundle(folder, read_manifest(folder))
    rest = bundle.manifest.model_copy(update={"files": []})
    found: set[tuple[str, object]] = {("", rest.encode())}
    for file in bundle.manifest.files:
        known: object = file.sha256
        if file.header_sha256 is not None:
            known = bundle.find(file.path).stat().st_mtime_ns
        if file.path not in map(schedule_name, DRAFTERS):  # `tune` may write it meanwhile
            found.add((file.path, known))
    return frozenset(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """What the models' `config.pbtxt` say, beyond what the bundle does.

    `drafter` says who fills the blocks; with nobody the target is served alone. `block_schedule` is
    "auto" (the bundle's own where it has one), "none", a block for all batches, or a file: these
    become that of the bundle in the repository.
    `max_queue_size` requests may wait for a slot; one that is not done `request_seconds` after its
    arrival ends with an error (0: never). A step takes `threads` CPU threads, "auto" what the
    machine that serves has.
    """

    block_schedule: str = AUTO
    drafter: Drafting = DFLASH
    max_queue_size: int = MAX_QUEUE_SIZE
    request_seconds: int = 0
    threads: ThreadChoice = ALL_CORES

    @property
    def speculation(self) -> bool:
        return self.drafter != NOBODY

    def check(self) -> None:
        """Raises DflashError (usage) where options contradict each other."""
        if not self.speculation and self.block_schedule not in (AUTO, NONE):
            raise DflashError("needs speculation", where="--block-schedule", usage=True)


def write_repository(
    bundle: Path,
    destination: Path,
    options: RepositoryOptions,
    progress: Progress,
    *,
    overwrite: bool = False,
) -> tuple[Bundle, BlockSchedule | None]:
    """Writes a repository of `bundle` to `destination`, whole or not at all.

    The bundle's files are hard-linked where the filesystem allows, else cloned, else copied.
    Returns the bundle, and the block schedule that is followed.
    """
    opened = open_bundle(bundle)
    check_runnable(opened)
    tokenizer = load_tokenizer(opened)
    options.check()
    drafter = DFLASH if options.drafter == NOBODY else options.drafter
    check_drafter(opened, drafter)
    schedule = choose_schedule(opened, options.block_schedule, drafter)
    template = data_folder("triton_repo")
    limits = opened.manifest.limits
    values = {
        "speculation": "on" if options.speculation else "off",
        "block_schedule": "off" if options.block_schedule == NONE else "on",
        "drafter": drafter,
        "max_batch": limits.max_batch,
        "max_queue_size": options.max_queue_size,
        "request_seconds": options.request_seconds,
        "max_requests": limits.max_batch + options.max_queue_size,
        "chat_template": "false" if tokenizer.chat_template is None else "true",
        "threads": options.threads,
    }
    with staged_folder(destination, overwrite=overwrite, kind=REPOSITORY) as folder:
        for model in (LLM_MODEL, ENSEMBLE_MODEL):
            (folder / model / "1").mkdir(parents=True)
            shutil.copyfile(template / model / "1" / "model.py", folder / model / "1" / "model.py")
            config = Template((template / model / "config.pbtxt").read_text(encoding="utf-8"))
            (folder / model / "config.pbtxt").write_text(config.substitute(values), "utf-8")
        inner = folder / BUNDLE_FOLDER
        names = [*(file.path for file in opened.manifest.files), MANIFEST_NAME]
        files = {inner / name: opened.find(name) for name in names}
        place_files(files, inner, "the bundle", progress)
        if schedule is not None and options.block_schedule != AUTO:
            write_schedule(open_bundle(inner), schedule)
    return opened, schedule if options.speculation else None
