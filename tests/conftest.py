"""Fixtures that every folder of tests may use; heavy imports wait until one is asked for."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core; read when a library is loaded
    for _library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

import dflash_trt  # noqa: F401  before ONNX Runtime: it switches that one's telemetry off

# The same examples at every run of CI; elsewhere each run looks at new ones.
# No deadline in either: how long an example takes says something about the machine, not the code.
_UNTIMED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("ci", derandomize=True, **_UNTIMED)
settings.register_profile("anywhere", **_UNTIMED)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")

# Every process that a test starts would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts background jobs with SIGINT ignored, which tests of Ctrl-C would hand on.
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from dflash_trt.serving.server.tritonserver import TritonServerBinary
    from tests.pairs import PairFactory
    from tests.shared import Shared


def pytest_configure(config: pytest.Config) -> None:
    """Brings a folder's files together: pytest forgets its fixtures when it comes back to it."""
    config.args.sort()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports hundreds of modules, which stay: nothing of them is looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests go to one worker, so that its fixtures are made once.

    Everything that starts a Triton server goes to one worker: the servers are shared, and one
    after the other they don't compete for ports and cores.
    """
    from tests.covering import mark_exhaustive

    mark_exhaustive(items)
    for item in items:
        if "tritonserver" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("servers"))
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leaves out what has not begun at TESTS_END (seconds since 1970): a slow run ends.

    Lifts the bound on memory that an earlier test's command has put on this process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    if time.time() > float(os.environ.get("TESTS_END", "inf")):
        pytest.skip("the time until TESTS_END is over")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """What all workers of this run make once; see `tests.shared.Shared`."""
    from tests.shared import Shared

    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Shared(run / "shared")


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory, shared: Shared) -> PairFactory:
    """Builds tiny pairs, each once a session; see `tests.pairs.PairFactory`."""
    from tests.pairs import PairFactory

    return PairFactory(tmp_path_factory.mktemp("pairs"), shared)


@pytest.fixture(scope="session")
def tritonserver() -> TritonServerBinary:
    """The server that will be started; in CI its absence is a failure."""
    from dflash_trt.errors import DflashError
    from dflash_trt.serving.server.tritonserver import find_tritonserver

    try:
        return find_tritonserver()
    except DflashError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(error.message)
