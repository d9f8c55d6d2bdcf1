"""Draws the mutants: `python -m tests.mutation.draw [--tree FOLDER]` writes mutants.json again.

A mutant that is equivalent by inspection gets a reason in its `discarded`, by hand; drawing again
from the same tree keeps these reasons and draws others in their place.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

from tests.mutation.mutants import DRAWN, QUOTAS, Mutant, load_drawn, statements, text_of
from tests.mutation.operators import mutations

SEED = 20261122
MOST_PER_AREA = 16
AREAS = {area: [f"dflash_trt/{area}"] for area in QUOTAS}
AREAS["executors"].append("dflash_trt/engines")
# Functions whose whole value is a text for people.
WORDING = frozenset("__repr__ __str__ message describe".split())


def candidates(root: Path, folders: list[str]) -> dict[str, list[Mutant]]:
    """Everything that can be made wrong in the folders, by kind."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted(path for folder in folders for path in (root / folder).glob("**/*.py")):
        file = str(path.relative_to(root))
        seen: dict[tuple[str, str], int] = defaultdict(int)
        for name, statement in statements(ast.parse(path.read_bytes())):
            if WORDING & set(name.split(".")):
                continue
            if isinstance(statement, ast.Try | ast.Match):
                continue
            before = text_of(statement)
            occurrence = seen[name, before]
            seen[name, before] += 1
            if "TYPE_CHECKING" in before or before.startswith("__all__"):
                continue
            for kind, after in mutations(statement):
                by_kind[kind].append(Mutant("", file, name, kind, before, after, occurrence))
    return by_kind


def draw(root: Path, area: str, generator: random.Random) -> list[Mutant]:
    """Kinds in turn at random, then one of the kind; no function, and no kind, too often."""
    by_kind = candidates(root, AREAS[area])
    drawn: list[Mutant] = []
    kinds: list[str] = []
    while len(drawn) < MOST_PER_AREA:
        if not kinds:
            kinds = sorted(by_kind)
            generator.shuffle(kinds)
        mutant = generator.choice(by_kind[kinds.pop()])
        files = [other.file for other in drawn]
        functions = {(other.file, other.name) for other in drawn}
        if (mutant.file, mutant.name) in functions or files.count(mutant.file) == 2:
            continue
        drawn.append(replace(mutant, number=f"{area}-{len(drawn) + 1:02}"))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path.cwd(), help="the tree to draw from")
    root = parser.parse_args().tree
    reasons = {}
    if DRAWN.exists():
        reasons = {replace(mutant, discarded=None): mutant.discarded for mutant in load_drawn()}
    generator = random.Random(SEED)
    records = []
    for area, wanted in QUOTAS.items():
        for mutant in draw(root, area, generator):
            if wanted > 0:
                reason = reasons.get(mutant)
                wanted -= reason is None
                records.append(asdict(replace(mutant, discarded=reason)))
    text = json.dumps({"seed": SEED, "mutants": records}, indent=1, ensure_ascii=False)
    DRAWN.write_text(text + "\n")


if __name__ == "__main__":
    main()
