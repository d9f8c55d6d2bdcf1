"""Applies the mutants one by one and runs the tests: `python -m tests.mutation.run --help`.

Each mutant is written into a scratch copy of the tree, with a virtual environment of its own, so
that subprocesses of tests run the mutated code too. A test that fails is then run without the
mutant: one that fails there as well kills nothing and is left out from then on.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutation.mutants import (
    Mutant,
    Place,
    apply,
    load_drawn,
    load_seeded,
    locate,
    write_source,
)
from tests.mutation.scratch import Outcome, Scratch

# Tried before the other files are so much as collected.
_MOST_TELLING = 3
# Besides the folders that mirror the mutant's package, unless all are asked for.
_USUAL = {"lossless", "cli"}
# What an area's mutants are tried on besides.
_RELATED = {"executors": ["backends"], "quantization": ["checkpoints"]}


@dataclass(slots=True)
class Campaign:
    """What one run of the mutants was asked for, and the tests found red without any of them."""

    is_full: bool
    pytest_args: list[str]
    stall_s: float
    red: set[str] = field(default_factory=set)
    green: set[str] = field(default_factory=set)


def ordered_files(mutant: Mutant, place: Place, root: Path, is_full: bool) -> list[str]:
    """Test files of the folders in question: those that mirror where the mutant stands first.

    Among them those come first that speak of its function or module. Behind the most telling ones
    a folder's files stand together: pytest 9.1 can lose fixtures of a folder that it comes back to.
    """
    stem, *names = Path(place.file).stem, *place.name.split(".")
    patterns = [re.compile(rf"\b{re.escape(word.strip('_'))}\b") for word in (stem, *names)]
    mirrors = {*Path(place.file).parts[:-1], Path(mutant.file).parts[1], mutant.area}
    mirrors |= set(_RELATED.get(mutant.area, []))

    def rank(path: Path) -> tuple[bool, int, int]:
        text = (root / path).read_text()
        spoken = sum(pattern.search(text) is not None for pattern in patterns)
        return path.parts[1] not in mirrors, -spoken - 2 * (stem in path.stem), len(text)

    paths = [path.relative_to(root) for path in root.glob("tests/*/**/test_*.py")]
    wanted = [path for path in paths if is_full or path.parts[1] in mirrors | _USUAL]
    ranked = sorted(wanted, key=rank)
    folders = list(dict.fromkeys(path.parts[1] for path in ranked[_MOST_TELLING:]))
    rest = sorted(ranked[_MOST_TELLING:], key=lambda path: (folders.index(path.parts[1]), path))
    return [str(path) for path in [*ranked[:_MOST_TELLING], *rest]]


def try_mutant(mutant: Mutant, scratch: Scratch, campaign: Campaign) -> dict[str, Any]:
    """What became of one mutant."""
    place, how = locate(mutant, scratch.root)
    result: dict[str, Any] = {
        "number": mutant.number,
        "kind": mutant.kind,
        "before": mutant.before,
        "after": mutant.after,
        "file": mutant.file if place is None else place.file,
        "name": mutant.name if place is None else place.name,
        "found": how,
    }
    if place is None:
        return result | {"result": "does not apply"}
    started = time.monotonic()
    files = ordered_files(mutant, place, scratch.root, campaign.is_full)
    meant = [] if mutant.meant is None else [mutant.meant]
    for stage in (meant, files[:_MOST_TELLING], files[_MOST_TELLING:]):
        if stage and (killer := _run_stage(place, stage, scratch, campaign)) is not None:
            result |= {"result": "killed", "by": killer.test, "how": killer.how}
            break
    else:
        suites = sorted({Path(file).parts[1] for file in files})
        result |= {"result": "survived", "suites": suites}
    return result | {"seconds": round(time.monotonic() - started, 1)}


def _run_stage(
    place: Place, files: list[str], scratch: Scratch, campaign: Campaign
) -> Outcome | None:
    """The test that killed the mutant, if one of the files did."""
    path = scratch.root / place.file
    while True:
        original = path.read_bytes()
        apply(place, scratch.root)
        try:
            arguments = [*files, *campaign.pytest_args]
            outcome = scratch.pytest(arguments, campaign.stall_s, without=sorted(campaign.red))
        finally:
            write_source(path, original)
        if outcome.test is None:
            return None
        if outcome.test in campaign.green:
            return outcome
        # What has no test's name is a file, or all of them, that cannot even be collected.
        is_test = "::" in outcome.test
        alone_arguments = [outcome.test] if is_test else [*files, "--collect-only"]
        alone = scratch.pytest([*alone_arguments, *campaign.pytest_args], campaign.stall_s)
        if alone.test is None:
            campaign.green.add(outcome.test)
            return outcome
        if not is_test:
            raise RuntimeError(f"the tests cannot be collected without a mutant: {alone.how}")
        campaign.red.add(outcome.test)


def copy_tree(source: Path, target: Path) -> None:
    """Copies what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=source,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        path = target / name
        if (source / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, path)


def write(
    path: Path, known: list[Mutant], results: dict[str, dict[str, Any]], campaign: Campaign
) -> None:
    """The table as JSON; mutants in the order of `known`."""
    ordered = [results[mutant.number] for mutant in known if mutant.number in results]
    record = {"red_without_mutants": sorted(campaign.red), "mutants": ordered}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the tree to try them on")
    parser.add_argument("--seeded", action="store_true", help="the faults of seeded.json, not "
                        "the mutants that were drawn")  # fmt: skip
    parser.add_argument("--only", default="", help="numbers of mutants or areas, with commas")
    parser.add_argument("--full", action="store_true", help="every folder of tests/, not only "
                        "those of the mutant's package and a few")  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--stall", type=float, default=300, help="seconds until a test hangs")
    parser.add_argument("--check", action="store_true", help="only find them; run no test")
    parser.add_argument("--output", type=Path, default=Path("build/mutants.json"))
    parser.add_argument("--again", action="store_true", help="those too that --output has already")
    parser.add_argument("pytest_args", nargs="*", help="further arguments of pytest, behind --")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    known = load_seeded() if options.seeded else load_drawn()
    mutants = [m for m in known if not wanted or {m.number, m.area} & wanted]
    if unknown := wanted - {name for one in known for name in (one.number, one.area)}:
        parser.error(f"no mutant and no area is called {', '.join(sorted(unknown))}")
    if options.check:
        if options.pytest_args:
            parser.error("--check runs no test; pytest's arguments stand behind --")
        gone = 0
        for mutant in mutants:
            place, how = locate(mutant, options.tree)
            print(mutant.number, how, "" if place is None else f"{place.file} {place.name}")
            gone += place is None
        sys.exit(gone > 0)
    campaign = Campaign(options.full, options.pytest_args, options.stall)
    results: dict[str, dict[str, Any]] = {}
    if options.output.exists() and not options.again:
        stored = json.loads(options.output.read_text())
        results = {record["number"]: record for record in stored["mutants"]}
        campaign.red |= set(stored["red_without_mutants"])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        idle: SimpleQueue[Scratch] = SimpleQueue()
        for index in range(options.workers):
            root = Path(folder) / str(index)
            copy_tree(options.tree.resolve(), root)
            idle.put(Scratch.create(root))

        def run(mutant: Mutant) -> dict[str, Any]:
            scratch = idle.get()
            try:
                return try_mutant(mutant, scratch, campaign)
            finally:
                idle.put(scratch)

        left = [mutant for mutant in mutants if mutant.number not in results]
        with ThreadPoolExecutor(options.workers) as pool:
            for result in pool.map(run, left):
                results[result["number"]] = result
                what = result.get("by") or ", ".join(result.get("suites", [])) or result["found"]
                print(result["number"], result["result"], what, result.get("seconds"), flush=True)
                write(options.output, known, results, campaign)


if __name__ == "__main__":
    main()
