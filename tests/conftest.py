"""Fixtures that every folder of tests may use; heavy imports wait until one is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# The same examples at every run of CI; elsewhere each run looks at new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

if TYPE_CHECKING:
    from tests.pairs import PairFactory


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Builds tiny pairs, each once a session; see `tests.pairs.PairFactory`."""
    from tests.pairs import PairFactory

    return PairFactory(tmp_path_factory.mktemp("pairs"))
