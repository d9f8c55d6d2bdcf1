"""Applies the mutants one by one and runs the tests: `python -m tests.mutation.run --help`.

Each mutant is written into a scratch copy of the tree, with a virtual environment of its own, so
that subprocesses of tests run the mutated code too. A test that fails is then run without the
mutant: one that fails there as well kills nothing and is left out from then on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.mutants import (
    Mutant,
    Place,
    apply,
    load_drawn,
    load_seeded,
    locate,
    write_source,
)

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_ENDS_WITHOUT_TESTS = 5
_LONGEST_HOW = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of pytest ended: the test that failed or hung, and how; None when all passed."""

    test: str | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class Scratch:
    """A copy of the tree with a virtual environment in it, which finds the copy's code first."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Scratch:
        """Makes the virtual environment; other packages are those of the running Python."""
        venv = root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        paths = [str(root), str(root / "perf"), str(root / "plugins"), *packages]
        (site / "00-scratch.pth").write_text("".join(f"{path}\n" for path in paths))
        script = venv / "bin" / "dflash-trt"
        script.write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -m dflash_trt "$@"\n')
        script.chmod(0o755)
        (root / "build").mkdir(exist_ok=True)
        return cls(root)

    def pytest(
        self, arguments: list[str], patience_s: float, *, without: list[str] | None = None
    ) -> Outcome:
        """Runs tests until one fails, for `patience_s` seconds at most."""
        command = [str(self.root / ".venv/bin/python"), "-m", "pytest", "-x", "-vv", "-rfE"]
        command += ["--tb=line", "-p", "no:cacheprovider", "--color=no", *arguments]
        command += [f"--deselect={test}" for test in without or []]
        # The same examples at every run; a wide line, since pytest cuts its summary to it.
        environment = os.environ | {"CI": "1", "COLUMNS": "400"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            started = [line for line in text.splitlines() if line.startswith("tests/")]
            test = started[-1].split(" ")[0] if started else "collection"
            return Outcome(test, f"hangs for {patience_s:.0f} s")
        if process.returncode in (0, _ENDS_WITHOUT_TESTS):
            return Outcome()
        if match := _FAILED.search(text):
            return Outcome(match[1].strip(), (match[2] or "").strip()[:_LONGEST_HOW])
        return Outcome("collection", " ".join(text.split())[-_LONGEST_HOW:])


# Tried before the other files are so much as collected.
_MOST_TELLING = 3
# Besides the folders that mirror the mutant's package.
_USUAL = {"lossless", "cli"}
# What an area's mutants are tried on besides.
_RELATED = {"executors": ["backends"], "quantization": ["checkpoints"]}


@dataclass(slots=True)
class Campaign:
    """What one run of the mutants was asked for, and the tests found red without any of them."""

    pytest_args: list[str]
    patience_s: float
    red: set[str] = field(default_factory=set)
    green: set[str] = field(default_factory=set)


def ordered_files(mutant: Mutant, place: Place, root: Path) -> list[str]:
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
    wanted = [path for path in paths if path.parts[1] in mirrors | _USUAL]
    ranked = sorted(wanted, key=rank)
    folders = list(dict.fromkeys(path.parts[1] for path in ranked[_MOST_TELLING:]))
    rest = sorted(ranked[_MOST_TELLING:], key=lambda path: (folders.index(path.parts[1]), path))
    return [str(path) for path in [*ranked[:_MOST_TELLING], *rest]]


def try_mutant(mutant: Mutant, scratch: Scratch, campaign: Campaign) -> str:
    """What became of one mutant."""
    place, how = locate(mutant, scratch.root)
    if place is None:
        return f"does not apply: {how}"
    files = ordered_files(mutant, place, scratch.root)
    meant = [] if mutant.meant is None else [mutant.meant]
    for stage in (meant, files[:_MOST_TELLING], files[_MOST_TELLING:]):
        if stage and (killer := _run_stage(place, stage, scratch, campaign)) is not None:
            return f"killed by {killer.test}: {killer.how}"
    return f"survived {', '.join(sorted({Path(file).parts[1] for file in files}))}"


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
            outcome = scratch.pytest(arguments, campaign.patience_s, without=sorted(campaign.red))
        finally:
            write_source(path, original)
        if outcome.test is None:
            return None
        if outcome.test in campaign.green:
            return outcome
        # What has no test's name is a file, or all of them, that cannot even be collected.
        is_test = "::" in outcome.test
        alone_arguments = [outcome.test] if is_test else [*files, "--collect-only"]
        alone = scratch.pytest([*alone_arguments, *campaign.pytest_args], campaign.patience_s)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--seeded", action="store_true", help="the faults of seeded.json, not "
                        "the mutants that were drawn")  # fmt: skip
    parser.add_argument("--only", default="", help="numbers of mutants or areas, with commas")
    parser.add_argument("--patience", type=float, default=3600, help="seconds for a mutant")
    parser.add_argument("--check", action="store_true", help="only find them; run no test")
    parser.add_argument("pytest_args", nargs="*", help="further arguments of pytest, behind --")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.split(",")))
    known = load_seeded() if options.seeded else load_drawn()
    mutants = [m for m in known if not wanted or {m.number, m.area} & wanted]
    if not mutants:
        parser.error(f"no mutant and no area is called {', '.join(sorted(wanted))}")
    if options.check:
        places = [(mutant, *locate(mutant, Path.cwd())) for mutant in mutants]
        for mutant, place, how in places:
            print(mutant.number, how, "" if place is None else f"{place.file} {place.name}")
        sys.exit(any(place is None for _, place, _ in places))
    campaign = Campaign(options.pytest_args, options.patience)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path.cwd(), Path(folder))
        scratch = Scratch.create(Path(folder))
        for mutant in mutants:
            print(mutant.number, try_mutant(mutant, scratch, campaign), flush=True)


if __name__ == "__main__":
    main()
