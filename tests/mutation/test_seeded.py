"""The faults that `run --seeded` tries are still in the code to be seeded, and have a test each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import FOLDER, Mutant, load_seeded, locate

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", load_seeded(), ids=lambda one: f"{one.number} {one.kind}")
def test_a_fault_has_a_place_and_a_test_that_is_meant_to_find_it(fault: Mutant) -> None:
    _, place, how = locate(fault, ROOT)
    assert place is not None, how
    assert fault.meant is not None
    file, _, test = fault.meant.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(), fault.meant


def read_table() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((FOLDER / "caught.json").read_text())["mutants"]
    return rows


@pytest.mark.exhaustive
def test_the_table_has_every_fault_as_it_is_seeded() -> None:
    """Run `--seeded` for one that it lacks, or that was written anew since."""
    assert {
        one["number"]: (one["result"], one["before"], one["after"]) for one in read_table()
    } == {fault.number: ("killed", fault.before, fault.after) for fault in load_seeded()}


@pytest.mark.exhaustive
def test_what_found_a_fault_is_still_a_daily_test() -> None:
    """With the parameters that it had; run `--seeded` for faults of one that is gone."""
    killers = {one["by"] for one in read_table()}
    files = sorted({killer.partition("::")[0] for killer in killers})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert not killers.difference(done.stdout.splitlines())
