"""Runs the parts of the check, within a budget of time, and keeps their record."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.core.progress import Progress
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.proof.gpu_check.outcome import PartOutcome
from dflash_trt.proof.gpu_check.page import page
from dflash_trt.proof.gpu_check.parts import (
    BUDGET_SECONDS,
    LONG_SECONDS,
    MACHINE,
    Part,
    check_parts,
)
from dflash_trt.proof.gpu_check.record import (
    PAGE_NAME,
    RECORD_NAME,
    CheckRecord,
    open_record,
    write_file,
)
from dflash_trt.proof.gpu_check.runner import PartInterruptedError, RunPart, run_in_child
from dflash_trt.proof.gpu_check.setting import Setting

# No part is begun with less.
LEAST_SECONDS = 15.0


def check_gpu(
    folder: Path,
    progress: Progress,
    *,
    is_long: bool = False,
    only: Sequence[str] = (),
    run: RunPart | None = None,
    parts: Sequence[Part] | None = None,
) -> CheckRecord:
    """Runs what the record in `folder` does not have yet; it is written after every part.

    `only` names parts that are run instead, whether the record has them or not. `run` runs one
    part, in a process of its own if it is None.

    Raises:
        DflashError: there is no GPU; `folder` holds the record of another, or a name of `only` is
            no part's (usage).
        KeyboardInterrupt, SystemExit: the user's; the record has all that was found until then.
    """
    run = run or run_in_child
    chosen = _choose(check_parts() if parts is None else parts, only)
    ends = time.monotonic() + (LONG_SECONDS if is_long else BUDGET_SECONDS)
    progress.stage(MACHINE.name, None)
    try:
        found = _run(MACHINE, MACHINE.seconds, run, is_long=is_long)
    except PartInterruptedError as stop:
        raise _cause(stop) from None
    if found.status == "failed":
        raise DflashError(str(found.reason))
    if found.status != "done":
        what, fix = f"the GPU does not answer: {found.reason}", "nvidia-smi says whether it is well"
        raise DflashError(what, fix=fix)
    record = open_record(folder, found.probes[0].to_json()["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    _save(record, folder)  # a folder that cannot be written to is known before minutes of work
    for part in chosen:
        known = record.parts.get(part.name)
        instead = None if only else _standing(part, known, record, is_long=is_long)
        if instead is not None and instead is known:
            continue
        left = LONG_SECONDS if is_long else ends - time.monotonic()
        if instead is None and left < LEAST_SECONDS:
            instead = known or PartOutcome("not run", "out of time")
        if instead is not None:
            _keep(record, part, instead, folder)
            continue
        progress.stage(part.name, None)
        seconds = LONG_SECONDS if is_long else min(part.seconds, left)
        try:
            outcome = _run(part, seconds, run, is_long=is_long)
        except PartInterruptedError as stop:
            _keep(record, part, stop.outcome, folder)
            raise _cause(stop) from None
        ran_out = outcome.status in ("out of time", "no answer")
        outcome.is_cut = ran_out and seconds < part.seconds
        _keep(record, part, outcome, folder)
    return record


def _choose(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    known = [part.name for part in parts]
    for name in only:
        if name not in known:
            what = f"no part is called {one_line(name, 80)!r}{nearest(name, known)}"
            raise DflashError(what, where="--part", usage=True)
    return [part for part in parts if not only or part.name in only]


def _standing(
    part: Part, known: PartOutcome | None, record: CheckRecord, *, is_long: bool
) -> PartOutcome | None:
    """The outcome of a part that is not to be run: the known one, or that it is left out."""
    if known is None or known.status in ("skipped", "not run"):
        left_out = part.left_out(record.parts)  # the part that it hangs on may have run by now
        if left_out is not None or part.instead_of is not None:
            return left_out
    return known if known is not None and known.is_final(is_long=is_long) else None


def _run(part: Part, seconds: float, run: RunPart, *, is_long: bool) -> PartOutcome:
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as folder:
        ends = time.monotonic() + seconds
        return run(part.work, Setting(Path(folder), ends, is_long))


def _keep(record: CheckRecord, part: Part, outcome: PartOutcome, folder: Path) -> None:
    """Puts an outcome in place of the one before, unless it only knows less."""
    known = record.parts.get(part.name)
    is_less = known is not None and len(outcome.probes) < len(known.probes)
    was_stopped = outcome.status == "interrupted" or outcome.is_cut
    if not (is_less and was_stopped and outcome.passed is not False):
        record.parts[part.name] = outcome
    _save(record, folder)


def _save(record: CheckRecord, folder: Path) -> None:
    text = json.dumps(record.to_json(), indent=2, allow_nan=False)
    write_file(folder / RECORD_NAME, f"{text}\n")
    write_file(folder / PAGE_NAME, page(record))


def _cause(stop: PartInterruptedError) -> BaseException:
    assert stop.__cause__ is not None
    return stop.__cause__
