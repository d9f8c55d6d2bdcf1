"""CUDA's driver over the stand-in device's memory: it knows one kernel, `accept`.

Arguments are read as the PTX's entry declares them, so that an order or a type that differs from
what a GPU would get shows as wrong tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real
from dflash_plugins.accept.accuracy import expect
from dflash_plugins.ptx import entry_parameters

from tests.standins.cuda import FakeCuda

OK = real.CUresult.CUDA_SUCCESS
KINDS = {"u64": ctypes.c_void_p, "u32": ctypes.c_int32}

Damage = Callable[[dict[str, Any]], None]


class FakeDriver:
    """`damage` may change what the kernel has written; `refuses` names a call that fails."""

    CUresult = real.CUresult
    CUfunction_attribute = real.CUfunction_attribute

    def __init__(
        self, cuda: FakeCuda, damage: Damage | None = None, refuses: str | None = None
    ) -> None:
        self._cuda, self._damage, self._refuses = cuda, damage, refuses
        self.loaded: list[str] = []
        self.launches: list[tuple[int, ...]] = []

    def _answer(self, name: str, *results: Any) -> tuple[Any, ...]:
        if name == self._refuses:
            return (real.CUresult.CUDA_ERROR_INVALID_PTX, *([None] * len(results)))
        return (OK, *results)

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:  # noqa: N802
        return OK, b"a PTX JIT compilation failed"

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert image.endswith(b"\0")
        self.loaded.append(image[:-1].decode())
        return self._answer("cuModuleLoadData", len(self.loaded) - 1)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert entry_parameters(self.loaded[module])[0] == name.decode()
        return self._answer("cuModuleGetFunction", module)

    def cuLaunchKernel(self, function: int, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        *sizes, _shared, stream, (values, types), extra = arguments
        name, parameters = entry_parameters(self.loaded[function])
        assert (name, extra, len(sizes)) == ("accept", 0, 6)
        assert stream in self._cuda.streams
        assert list(types) == [KINDS[kind] for kind in parameters]
        self.launches.append(tuple(sizes))
        self._cuda.submit(lambda: self._accept(sizes[0], *values))
        return self._answer("cuLaunchKernel")

    def _accept(self, batch: int, *arguments: int) -> None:
        tokens, choices, start, rows, *written = arguments
        block = (batch, rows)
        inputs = {
            "token_ids": self._cuda.array(tokens, block, np.int64),
            "choice_ids": self._cuda.array(choices, block, np.int64),
            "cache_start": self._cuda.array(start, (batch,), np.int64),
        }
        results = expect(inputs)
        views = {
            name: self._cuda.array(address, values.shape, values.dtype)
            for address, (name, values) in zip(written, results.items(), strict=True)
        }
        for name, values in results.items():
            views[name][...] = values
        if self._damage is not None:
            self._damage(views)
