"""Runs hostile inputs and prints, by kind, how many there were and how they ended."""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.hostile.case import find_fault
from tests.hostile.kinds import KINDS, Name, case_names, make_case
from tests.hostile.runner import ENVIRONMENT, Bench, in_child, preload


def main() -> int:
    """Exit code 1 when an input ended as none may."""
    options = _parse()
    started = time.monotonic()
    os.environ.update(ENVIRONMENT)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # what is told of a case may hold anything
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        os.environ |= {"XDG_CACHE_HOME": str(root / "cache"), "HF_HOME": str(root / "hub")}
        preload()
        base = _make_base(root)
        good = (base / "good.txt").read_text()
        names = case_names(options.seed, options.share, options.kinds or list(KINDS))
        if options.case:
            names = [Name(options.seed, kind, int(number)) for kind, number in options.case]
        counts = {kind: Counter[str]() for kind in dict.fromkeys(one.kind for one in names)}
        faults: list[str] = []
        run = partial(_run, root, base, good)
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for name, end, fault in pool.imap_unordered(run, names):
                counts[name.kind][end] += 1
                if fault is not None:
                    faults.append(fault)
                    print(fault, flush=True)
    _print_table(counts)
    print(f"{len(names):,} inputs, {len(faults)} faults, {time.monotonic() - started:.0f} s")
    return int(bool(faults))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", dest="kinds", action="append", choices=sorted(KINDS))
    parser.add_argument("--share", type=float, default=1.0, help="of all inputs")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--case", nargs=2, action="append", metavar=("KIND", "NUMBER"), help="only this one"
    )
    return parser.parse_args()


def _make_base(root: Path) -> Path:
    """The good files, and the text that their bundle gives."""
    from tests.hostile.base import write_base
    from tests.hostile.case import HostileCase
    from tests.hostile.kinds import GENERATE

    base = root / "base"
    base.mkdir()
    with (root / "making").open("w") as said:
        kept = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(said.fileno(), number)
        try:
            status, _ = in_child(lambda: write_base(base), 60.0)
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
    if status != 0:
        raise RuntimeError((root / "making").read_text())
    good = HostileCase("nothing", ("bundle",), lambda folder: None, (GENERATE,))
    (root / "good").mkdir()
    ending = Bench(base, root / "good").run(good)
    if ending.code != 0:
        raise RuntimeError(ending.err)
    (base / "good.txt").write_text(ending.out)
    return base


def _run(root: Path, base: Path, good: str, name: Name) -> tuple[Name, str, str | None]:
    """How a case ended, and what is wrong with that."""
    folder = root / f"worker-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    case = make_case(name)
    try:
        ending = Bench(base, folder).run(case)
    except Exception as error:
        error.add_note(f"making {name}")  # a pool says nothing of whose work failed
        raise
    fault = find_fault(case, ending, good)
    if fault is None:
        return name, "accepted" if ending.code == 0 else "refused", None
    tail = "\n    ".join(ending.err.splitlines()[-6:])
    said = f"--seed {name.seed} --case {name.kind} {name.number} ({case.about}): {fault}"
    return name, "faults", f"{said}\n    {tail}"


def _print_table(counts: dict[str, Counter[str]]) -> None:
    print("| inputs of | number | refused | accepted | faults |")
    print("|---|---|---|---|---|")
    counts = {**counts, "all": sum(counts.values(), Counter())}
    for kind, ends in counts.items():
        shown = (sum(ends.values()), ends["refused"], ends["accepted"], ends["faults"])
        print(f"| {kind} | {' | '.join(f'{one:,}' for one in shown)} |")


if __name__ == "__main__":
    sys.exit(main())
