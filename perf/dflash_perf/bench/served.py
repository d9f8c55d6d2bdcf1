"""Starts Triton servers for benchmarks, and runs the load generator once against one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_perf.harness.config import SweepConfig
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep import SweepObserver, run_sweep
from dflash_trt.core.progress import SilentProgress
from dflash_trt.serving.server.launcher import ServerOptions, TritonServer
from dflash_trt.serving.server.repository import RepositoryOptions, write_repository

READY_TIMEOUT_S = 300


@contextmanager
def serve(bundle: Path, repository: Path, packaging: RepositoryOptions) -> Iterator[str]:
    """A Triton server of `bundle` on free ports; writes its model repository to `repository`.

    Yields its gRPC address once it is ready.
    """
    write_repository(bundle, repository, packaging, SilentProgress())
    options = ServerOptions(repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server:
        server.wait_ready(READY_TIMEOUT_S)
        yield server.addresses.grpc


def sweep_once(
    folder: Path, configuration: dict[str, Any], prompts: Path, concurrency: int, **load: Any
) -> ResultStore:
    """One run of a served `configuration` at one concurrency; `load` has a SweepConfig's keys."""
    settings = {
        "configurations": [configuration],
        "input_file": str(prompts),
        "concurrency": [concurrency],
        "repeats": 1,
        **load,
    }
    return run_sweep(SweepConfig.model_validate(settings), folder, SweepObserver(), "")
