"""Runs the parts of the check, within a budget of time, and keeps their record."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import replace_file
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.proof.gpu_check.gpu_record import (
    PAGE_NAME,
    RECORD_NAME,
    CheckRecord,
    PartOutcome,
    open_record,
)
from dflash_trt.proof.gpu_check.page import page
from dflash_trt.proof.gpu_check.parts import MACHINE, Part, check_parts
from dflash_trt.proof.gpu_check.runner import Setting, run_in_child

BUDGET_SECONDS = 580
"""Ten minutes with the end of a part that does not heed its time."""
LONG_SECONDS = 3600
"""Of a part that was asked for by name: there is no budget."""
LEAST_SECONDS = 15.0
"""No part is begun with less."""


def check_gpu(folder: Path, progress: Progress, only: Sequence[str] = ()) -> CheckRecord:
    """Runs what the record in `folder` does not have yet; it is written after every part.

    `only` names parts that are run instead, known or not, for as long as they take.

    Raises:
        DflashError: there is no GPU; `folder` holds the record of another, or a name of `only` is
            no part's (usage).
        KeyboardInterrupt, SystemExit: the user's; the record has all that was found until then.
    """
    parts = check_parts()
    known_names = [part.name for part in parts]
    for name in only:
        if name not in known_names:
            what = f"no part is called {one_line(name, 80)!r}{nearest(name, known_names)}"
            raise DflashError(what, where="--part", usage=True)
    ends = time.monotonic() + BUDGET_SECONDS
    record = open_record(folder, _find_machine(progress))
    folder.mkdir(parents=True, exist_ok=True)
    _save(record, folder)  # a folder that cannot be written to is known before minutes of work
    for part in parts:
        known = record.parts.get(part.name)
        is_known = known is not None and not known.was_stopped
        if part.name not in only if only else is_known:
            continue
        left = LONG_SECONDS if only else ends - time.monotonic()
        if left < LEAST_SECONDS:
            outcome = PartOutcome("not run", "out of time")
        else:
            progress.stage(part.name, None)
            seconds = left if only else min(part.seconds, left)
            outcome = _run(part, seconds)
            if outcome.status in ("out of time", "no answer") and seconds < part.seconds:
                outcome.status, outcome.reason = "interrupted", "the ten minutes were up"
        is_less = known is not None and len(outcome.probes) < len(known.probes)
        if not (is_less and outcome.was_stopped and outcome.passed is not False):
            record.parts[part.name] = outcome
        _save(record, folder)
        if outcome.stop is not None:
            raise outcome.stop
    return record


def _find_machine(progress: Progress) -> dict[str, Any]:
    """The GPU and the versions of what is installed."""
    progress.stage(MACHINE.name, None)
    found = _run(MACHINE, MACHINE.seconds)
    if found.stop is not None:
        raise found.stop
    if found.status == "failed":
        raise DflashError(str(found.reason))
    if found.status != "done":
        what, fix = f"the GPU does not answer: {found.reason}", "nvidia-smi says whether it is well"
        raise DflashError(what, fix=fix)
    machine: dict[str, Any] = found.probes[0].to_json()["figures"]
    return machine


def _run(part: Part, seconds: float) -> PartOutcome:
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as folder:
        return run_in_child(part.work, Setting(Path(folder), time.monotonic() + seconds))


def _save(record: CheckRecord, folder: Path) -> None:
    text = json.dumps(record.to_json(), indent=2, allow_nan=False)
    replace_file(folder / RECORD_NAME, f"{text}\n".encode())
    replace_file(folder / PAGE_NAME, page(record).encode())
