"""Builders that parse and configure for real, and write a few bytes where an engine would be.

The contract they believe: a build hands its engine to the stream writer in pieces and returns
whether it succeeded. TensorRT has no compute capabilities to set.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX (the rtx extra) is not installed")

import tensorrt_rtx as real

RTX_ONLY = {"num_compute_capabilities", "set_compute_capability"}
_engines = count()


class StubBuilder:
    """TensorRT-RTX's builder, up to the build itself."""

    def __init__(self, logger: Any) -> None:
        self._builder = RealBuilder(logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def build_serialized_network_to_stream(self, network: Any, config: Any, writer: Any) -> bool:
        assert config.num_optimization_profiles in (1, 2, 3)
        # Neighbours differ, and all are of one size, whatever was built before.
        return bool(writer.write(f"stub engine {chr(ord('0') + next(_engines) % 64)}".encode()))


RealBuilder = real.Builder


class FullTensorRt:
    """TensorRT as far as `build` can tell: TensorRT-RTX without what only that has."""

    Builder: Any

    def __init__(self, version: str = "11.4.0") -> None:
        self.__version__ = version
        self.Builder = FullBuilder

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


class FullBuilder(StubBuilder):
    def create_builder_config(self) -> FullConfig:
        return FullConfig(self._builder.create_builder_config())


class FullConfig:
    def __init__(self, config: Any) -> None:
        self.__dict__.update(config=config)

    def __getattr__(self, name: str) -> Any:
        assert name not in RTX_ONLY
        return getattr(self.config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in RTX_ONLY
        setattr(self.config, name, value)
