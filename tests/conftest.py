"""Fixtures that every folder of tests may use; heavy imports wait until one is asked for."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples at every run of CI; elsewhere each run looks at new ones.
# No deadline in either: how long an example takes says something about the machine, not the code.
_UNTIMED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, **_UNTIMED)
settings.register_profile("anywhere", **_UNTIMED)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")

# A shell starts background jobs with SIGINT ignored, which tests of Ctrl-C would hand on.
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from tests.pairs import PairFactory


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """Builds tiny pairs, each once a session; see `tests.pairs.PairFactory`."""
    from tests.pairs import PairFactory

    return PairFactory(tmp_path_factory.mktemp("pairs"))
