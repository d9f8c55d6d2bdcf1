"""The faults that `run --seeded` tries are still in the code to be seeded, and have a test each."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.exhaustive
def test_the_table_has_every_fault() -> None:
    """Run `--seeded` for one that it lacks."""
    table = json.loads((FOLDER / "caught.json").read_text())["mutants"]
    assert {one["number"]: one["result"] for one in table} == {
        fault.number: "killed" for fault in load_seeded()
    }
