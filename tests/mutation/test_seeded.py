"""The faults that `run --seeded` tries are still in the code to be seeded, and have a test each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, load_seeded, locate

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", load_seeded(), ids=lambda one: f"{one.number} {one.kind}")
def test_a_fault_has_a_place_and_a_test_that_is_meant_to_find_it(fault: Mutant) -> None:
    place, how = locate(fault, ROOT)
    assert place is not None, how
    assert fault.meant is not None
    file, _, test = fault.meant.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(), fault.meant
