"""Runs hostile inputs and prints, by kind, how many there were and how they ended.

Each runs in a process forked for it, through the command line's own entry: a fork of a process that
has imported everything starts in milliseconds, dies alone, and its memory and processor time can be
read when it has ended.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import multiprocessing
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.judge import Ending, HostileCase, find_fault
from tests.hostile.kinds import GENERATE, KINDS, write_base

PATIENCE_S = 300.0
"""On the clock: a busy machine gives minutes of waiting for a second; processor time is judged."""
_MOST_ADDRESSES, _LARGEST_FILE, _MOST_OUTPUT = 8 << 30, 1 << 30, 1 << 20
_PRELOADED = (
    *("onnx", "onnxruntime", "tokenizers", "safetensors.numpy"),
    *(
        f"dflash_trt.cli.{name}"
        for name in "build generate import_gguf inspect package serve verify plan quantize".split()
    ),
)
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

Name = tuple[str, int]
"""Kind and number: with the seed, a case is found again."""


def main() -> int:
    """Exit code 1 when an input ended as none may."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all inputs")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"), help="only this one")
    options = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what is told of a case may hold anything
        sys.stdout.reconfigure(errors="backslashreplace")
    names: list[Name] = []
    for kind, (count, _) in KINDS.items():
        chosen = Random(f"{options.seed} {kind}").sample(
            range(count), max(1, round(count * options.share))
        )
        names += [(kind, number) for number in chosen]
    if options.case:
        names = [(options.case[0], int(options.case[1]))]
    counts: dict[str, Counter[str]] = {kind: Counter() for kind, _ in names}
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        root = Path(folder)
        os.environ |= {"XDG_CACHE_HOME": str(root / "cache"), "HF_HOME": str(root / "hub")}
        for name in _PRELOADED:
            importlib.import_module(name)
        good = _make_base(root)
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            run = partial(_judge, root, good, options.seed)
            for (kind, _), end in pool.imap_unordered(run, names):
                counts[kind][end if end in ("accepted", "refused") else "faults"] += 1
                if end not in ("accepted", "refused"):
                    print(end, flush=True)
    total: Counter[str] = sum(counts.values(), Counter())
    for kind, ends in {**counts, "all": total}.items():
        print(f"{kind}: {ends['refused']} refused, {ends['accepted']} accepted")
    print(f"{len(names)} inputs, {total['faults']} faults")
    return int(total["faults"] > 0)


def _make_base(root: Path) -> str:
    """Writes the good files that cases copy; returns the text that their bundle gives."""
    (root / "base").mkdir()
    made = HostileCase("base", (), lambda folder: write_base(root / "base"), ())
    for case in (made, HostileCase("nothing", ("bundle",), lambda folder: None, (GENERATE,))):
        ending = _run(case, root, root / "good")
        if ending.code != 0:
            raise RuntimeError(ending.err)
    return ending.out


def _judge(root: Path, good: str, seed: int, name: Name) -> tuple[Name, str]:
    """How a case ended, or what is wrong with that."""
    kind, number = name
    case = KINDS[kind][1](Random(f"{seed} {kind} {number}"))
    try:
        ending = _run(case, root, root / f"worker-{os.getpid()}")
    except Exception as error:
        error.add_note(f"making {name}")  # a pool says nothing of whose work failed
        raise
    fault = find_fault(case, ending, good)
    if fault is None:
        return name, "refused" if ending.code else "accepted"
    tail = "\n    ".join(ending.err.splitlines()[-6:])
    return name, f"--seed {seed} --case {kind} {number} ({case.about}): {fault}\n    {tail}"


def _run(case: HostileCase, root: Path, place: Path) -> Ending:
    """Makes the input, runs the commands in a fork, and takes everything away again."""
    for name in ("input/out", "tmp"):
        (place / name).mkdir(parents=True)
    try:
        for name in case.needs:
            shutil.copytree(root / "base" / name, place / "input" / name)
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                _enter(case, place)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(70)
        watch = os.pidfd_open(child)
        try:
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            poll.poll(PATIENCE_S * 1000)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
        finally:
            os.close(watch)
        return _collect(place, status, used)
    finally:
        shutil.rmtree(place)


def _enter(case: HostileCase, place: Path) -> None:
    """In the child: makes the input, runs the commands, and notes how the last one ended."""
    from dflash_trt.cli.main import main as run_command

    os.environ["TMPDIR"] = str(place / "tmp")
    os.chdir(place / "input")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):  # libraries write to the numbers
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    case.damage(place / "input")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_ADDRESSES, _MOST_ADDRESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    before = _tree(place)
    code = 0
    for command in case.commands:
        before = _tree(place)
        code = run_command(list(command))
        sys.stdout.flush()
        sys.stderr.flush()
        if code != 0:
            break
    report = {"code": code, "left": sorted(_tree(place) - before) if code else []}
    (place / "report").write_text(json.dumps(report))


def _tree(place: Path) -> set[str]:
    """Names of what commands could have left, relative to `place`."""
    folders = (place / "input", place / "tmp")
    return {str(path.relative_to(place)) for folder in folders for path in folder.rglob("*")}


def _collect(place: Path, status: int, used: Any) -> Ending:
    report: dict[str, Any] = {"code": None, "left": []}
    if (place / "report").exists():
        report = json.loads((place / "report").read_text())
    elif os.WIFEXITED(status):
        report["code"] = os.WEXITSTATUS(status)  # an exception that escaped
    outputs = []
    for name in ("stdout", "stderr"):
        data = (place / name).read_bytes()[:_MOST_OUTPUT] if (place / name).exists() else b""
        outputs.append(data.decode("utf-8", "replace"))
    return Ending(
        code=report["code"],
        out=outputs[0],
        err=outputs[1],
        seconds=used.ru_utime + used.ru_stime,
        max_bytes=used.ru_maxrss << 10,
        left=report["left"],
    )


if __name__ == "__main__":
    sys.exit(main())
