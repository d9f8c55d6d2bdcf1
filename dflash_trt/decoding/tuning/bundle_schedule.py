"""The block schedule that goes with a bundle: found, checked against it, written into it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle, attach_file
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.support import Feature, check_executor
from dflash_trt.decoding.drafter_kinds import DFLASH, DRAFTERS, DrafterKind
from dflash_trt.decoding.schedule import BlockRange, BlockSchedule, schedule_name
from dflash_trt.errors import DflashError

AUTO, NONE = "auto", "none"


def fingerprint(manifest: Manifest) -> str:
    """Identifies what a schedule was measured on, by the hashes of graphs, weights and engines.

    Weights count by size and header, which every manifest has.
    """
    digest = hashlib.sha256()
    for file in sorted(manifest.files, key=lambda file: file.path):
        if file.path.endswith((".onnx", ".safetensors", ".engine")):
            digest.update(
                f"{file.path} {file.bytes} {file.header_sha256 or file.sha256}\n".encode()
            )
    return digest.hexdigest()


def choose_schedule(
    bundle: Bundle, choice: str, drafter: DrafterKind = DFLASH
) -> BlockSchedule | None:
    """What `--block-schedule` asks for: "auto" the bundle's own for `drafter` if it has one,
    "none", a block for all batches, or a file's.

    Raises:
        DflashError: a file that is no schedule, or one that does not fit the bundle.
    """
    if choice == NONE:
        return None
    if choice.isdecimal():
        limits = bundle.manifest.limits
        if not 2 <= int(choice) <= limits.block_size:
            what = f"{int(choice)} is no block from 2 to {limits.block_size}"
            raise DflashError(what, where="--block-schedule", usage=True)
        fixed = [BlockRange(max_batch=limits.max_batch, block_size=int(choice))]
        return BlockSchedule(blocks=fixed, executor=bundle.manifest.executor, drafter=drafter)
    if choice != AUTO:
        path = Path(choice)
    elif any(file.path == schedule_name(drafter) for file in bundle.manifest.files):
        path = bundle.folder / schedule_name(drafter)
    else:
        return None
    schedule = BlockSchedule.read(path)
    _check_fit(schedule, bundle, path, drafter)
    return schedule


def check_drafter(bundle: Bundle, drafter: DrafterKind) -> None:
    """Raises DflashError (usage) where `bundle` cannot run so."""
    if drafter != DFLASH:
        executor = bundle.manifest.executor
        check_executor(Feature.PROMPT_LOOKUP, executor, drafter, where="drafter")


def write_schedule(bundle: Bundle, schedule: BlockSchedule) -> Bundle:
    """Writes `schedule` into the bundle, in place of its drafter's other; see `attach_file`."""
    return attach_file(bundle, schedule_name(schedule.drafter), encode_schedule(schedule))


def encode_schedule(schedule: BlockSchedule) -> bytes:
    """The content of a schedule's file."""
    return (json.dumps(schedule.to_json(), indent=1) + "\n").encode()


def _check_fit(schedule: BlockSchedule, bundle: Bundle, path: Path, drafter: DrafterKind) -> None:
    manifest = bundle.manifest
    limits = manifest.limits
    what = None
    if schedule.executor != manifest.executor:
        what = f"is for executor {schedule.executor}, the bundle for {manifest.executor}"
    elif schedule.drafter != drafter:
        what = f"is for {DRAFTERS[schedule.drafter]} drafts"
    elif schedule.bundle is not None and schedule.bundle != fingerprint(manifest):
        what = "was measured on another bundle"
    elif schedule.max_batch < limits.max_batch:
        what = f"ends at {schedule.max_batch} sequences, the bundle has {limits.max_batch}"
    elif schedule.largest_block > limits.block_size:
        what = f"has block {schedule.largest_block}, the bundle at most {limits.block_size}"
    if what is not None:
        raise DflashError(what, where=path, fix="run `dflash-trt tune` on this bundle", usage=True)
