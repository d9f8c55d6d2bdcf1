"""A recorded run: figures together with the machine, the versions, the date and the command."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_trt.core.machine import describe_host, processor


def describe_machine() -> dict[str, Any]:
    """The machine that figures depend on: processor, cores, memory, system, library versions."""
    return {
        "processor": processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **describe_host(),
    }


def write_record(
    folder: Path, name: str, arguments: Sequence[str], figures: dict[str, Any]
) -> Path:
    """Writes `figures` with machine, versions, date and command to `folder`/DATE-NAME.json.

    `arguments` are those of `python -m dflash_perf`; returns the file.
    """
    now = datetime.now(UTC)
    record = {
        "name": name,
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", "dflash_perf", *map(plain_argument, arguments)]),
        "machine": describe_machine(),
        "load_average_at_end": os.getloadavg()[0],
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{now:%Y-%m-%d}-{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def plain_argument(argument: str) -> str:
    """An argument; of an absolute path, alone or as NAME=PATH, only the last part, as records name
    no local folders."""
    name, separator, value = argument.rpartition("=")
    if argument.startswith("/"):
        return Path(argument).name
    return name + separator + (Path(value).name if value.startswith("/") else value)
