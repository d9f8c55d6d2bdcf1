"""A folder of results: the sweep's plan and every finished run, each complete or absent.

sweep.json                          what is measured, with machine and versions
runs/NAME/c16-r0/requests.jsonl     one line per request
runs/NAME/c16-r0/summary.json       the run's figures
points.json                         all points, rewritten after every run
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_perf.harness.points import RunPlan, RunSummary, SweepPoint, group
from dflash_perf.harness.records import RequestRecord, RunRecord
from dflash_perf.harness.sweep_config import SweepConfig, to_slug
from dflash_perf.record import describe_machine
from dflash_trt.core.files import FileKind, exists, read_bytes
from dflash_trt.core.publish import replace_file
from dflash_trt.core.strict_json import parse_json, read_json
from dflash_trt.errors import DflashError

FORMAT = "dflash-trt sweep 1"
# More loads, repeats and configurations may be added to a finished sweep. Where prompts came from
# may change: the hash says whether they did.
_MAY_CHANGE = {"configurations", "concurrency", "request_rate", "repeats", "baseline"}
_MAY_CHANGE |= {"input_file", "prompts"}
_LOCK, PLAN, _RUNS, _PARTIAL = ".lock", "sweep.json", "runs", ".partial"


class ResultStore:
    """A sweep's folder. Only one process at a time can write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def open_for(self, config: SweepConfig, prompts_sha256: str, command: str) -> Iterator[None]:
        """Locks the folder for a sweep: a new one, or one that continues what is in it.

        Raises:
            DflashError: it has other files or another sweep, or a sweep is writing to it.
        """
        is_new = not self.folder.exists() or (
            self.folder.is_dir() and {path.name for path in self.folder.iterdir()} <= {_LOCK}
        )
        if not is_new and not self._plan.is_file():
            raise DflashError(
                "is no folder of a sweep and not empty",
                where=self.folder,
                fix="choose another --output-dir",
                usage=True,
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise DflashError("another sweep is at work there", where=self.folder) from error
            self._write_plan(config, prompts_sha256, command)
            yield

    def plan(self) -> dict[str, Any]:
        """The content of sweep.json.

        Raises:
            DflashError: it is missing or not a sweep's (usage).
        """
        if not exists(self._plan):
            raise DflashError("holds no sweep (no sweep.json)", where=self.folder, usage=True)
        plan = read_json(self._plan)
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise DflashError(f"is not of format {FORMAT!r}", where=self._plan, usage=True)
        return plan

    def has(self, run: RunPlan) -> bool:
        """Whether a run is finished."""
        return (self._run_folder(run) / "summary.json").is_file()

    def add(self, run: RunRecord, summary: RunSummary) -> None:
        """Saves a finished run; when this returns it is flushed to disk under its final name."""
        folder = self._run_folder(summary)
        partial = folder.with_name(folder.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        lines = (json.dumps(one.to_json(), separators=(",", ":")) for one in run.requests)
        text = "".join(f"{line}\n" for line in lines)
        replace_file(partial / "requests.jsonl", text.encode(), durable=True)
        _write_json(partial / "summary.json", summary.to_json())
        partial.rename(folder)
        _write_json(self.folder / "points.json", [point.to_json() for point in self.points()])

    def runs(self) -> list[RunSummary]:
        """All finished runs, in the plan's order of configurations.

        Raises:
            DflashError: a summary.json is not a run's.
        """
        names = [one["name"] for one in self.plan()["config"]["configurations"]]
        found: list[RunSummary] = []
        for path in sorted(self.folder.glob(f"{_RUNS}/*/*/summary.json")):
            if path.parent.name.endswith(_PARTIAL):
                continue
            try:
                found.append(RunSummary.from_json(read_json(path)))
            except ValueError as error:
                raise DflashError("is no summary of a run", where=path) from error
        known = [run for run in found if run.configuration in names]
        return sorted(known, key=lambda run: names.index(run.configuration))

    def points(self) -> list[SweepPoint]:
        return group(self.runs())

    def requests(self, summary: RunSummary) -> list[RequestRecord]:
        """A run's requests.

        Raises:
            DflashError: the file is missing or cannot be read as requests.
        """
        path = self._run_folder(summary) / "requests.jsonl"
        try:
            lines = read_bytes(path, FileKind.DATA_SET).splitlines()
            return [RequestRecord.from_json(parse_json(line, path)) for line in lines]
        except ValueError as error:
            raise DflashError("cannot be read as a run's requests", where=path) from error

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Records what each configuration's server says about itself."""
        plan = self.plan()
        plan["servers"] = {**plan.get("servers", {}), **servers}
        _write_json(self._plan, plan)

    @property
    def _plan(self) -> Path:
        return self.folder / PLAN

    def _run_folder(self, run: RunPlan) -> Path:
        return self.folder / _RUNS / to_slug(run.configuration) / f"{run.load.slug}-r{run.repeat}"

    def _write_plan(self, config: SweepConfig, prompts_sha256: str, command: str) -> None:
        wanted = config.model_dump(mode="json")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        plan: dict[str, Any] = {
            "format": FORMAT,
            "began": now,
            "commands": [],
            "machine": describe_machine(),
            "prompts_sha256": prompts_sha256,
            "config": wanted,
        }
        if self._plan.is_file() and (found := self.plan()) and self.runs():
            plan = found
            self._refuse_changes(plan, wanted, prompts_sha256)
            plan["config"] = _merge(plan["config"], wanted)
        plan["commands"].append({"at": now, "command": command})
        _write_json(self._plan, plan)

    def _refuse_changes(self, plan: dict[str, Any], wanted: dict[str, Any], digest: str) -> None:
        before = plan["config"]
        pairs = [("", before, {key: wanted[key] for key in wanted.keys() - _MAY_CHANGE})]
        known = {one["name"]: one for one in before["configurations"]}
        for one in wanted["configurations"]:
            pairs.append((f"{one['name']}'s ", known.get(one["name"], one), one))
        what = None
        for owner, old, new in pairs:
            for key, value in new.items():
                if old.get(key) != value:
                    what = f"{owner}{key} was {json.dumps(old.get(key))}, now {json.dumps(value)}"
        if plan["prompts_sha256"] != digest:
            source = before["input_file"] or ", ".join(before["prompts"])
            what = f"the prompts of {source} are not those of now"
        if what is not None:
            fix = "choose another --output-dir"
            raise DflashError(
                f"holds another sweep: {what}", where=self.folder, fix=fix, usage=True
            )


def _merge(before: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The configuration that covers all runs of both."""
    names = {one["name"] for one in before["configurations"]}
    added = [one for one in wanted["configurations"] if one["name"] not in names]
    return {
        **wanted,
        "configurations": [*before["configurations"], *added],
        "concurrency": sorted({*before["concurrency"], *wanted["concurrency"]}),
        "request_rate": sorted({*before["request_rate"], *wanted["request_rate"]}),
        "repeats": max(before["repeats"], wanted["repeats"]),
        "baseline": wanted["baseline"] or before["baseline"],
    }


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    replace_file(path, text.encode(), durable=True)
