"""CUDA's driver over the stand-in device's memory: it knows one kernel, `accept`.

Arguments are read as the PTX's entry declares them, so that an order or a type that differs from
what a GPU would get shows as wrong tokens. A block that takes over 48 KiB of shared memory, static
and dynamic together, is launched only by a function that was opted in.
"""

from __future__ import annotations

import ctypes
import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real
from dflash_plugins.accept.checks import expect

from dflash_trt.core.user_cache import user_cache_file
from tests.plugins.conftest import entry_parameters
from tests.standins.cuda import FakeCuda

OK = real.CUresult.CUDA_SUCCESS
KINDS = {"u64": ctypes.c_void_p, "u32": ctypes.c_int32}

Damage = Callable[[dict[str, Any]], None]


class FakeDriver:
    """`damage` may change what the kernel has written; `refuses` names a call that fails.

    `static_shared` is the bytes of shared memory that the kernel's machine code declares itself.
    """

    CUresult = real.CUresult
    CUfunction_attribute = real.CUfunction_attribute

    def __init__(
        self,
        cuda: FakeCuda,
        damage: Damage | None = None,
        refuses: str | None = None,
        static_shared: int = 0,
    ) -> None:
        self._cuda, self._damage, self._refuses = cuda, damage, refuses
        self._static_shared = static_shared
        self._most_shared = 48 * 1024 - static_shared
        self.opted_in: list[int] = []
        self.loaded: list[str] = []
        self.launches: list[tuple[int, ...]] = []

    def _answer(self, name: str, *results: Any) -> tuple[Any, ...]:
        if name == self._refuses:
            return (real.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, *([None] * len(results)))
        return (OK, *results)

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:  # noqa: N802
        if error == real.CUresult.CUDA_ERROR_INVALID_VALUE:
            return OK, b"invalid argument"
        return OK, b"no kernel image is available"

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        """Machine code; the cache of kernels has the PTX that it was made of."""
        kept = [json.loads(path.read_text()) for path in user_cache_file("kernels").glob("*.json")]
        (kernel,) = (one for one in kept if one["cubin"] == b64encode(image).decode())
        self.loaded.append(kernel["ptx"])
        return self._answer("cuModuleLoadData", len(self.loaded) - 1)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert entry_parameters(self.loaded[module])[0] == name.decode()
        return self._answer("cuModuleGetFunction", module)

    def cuFuncSetAttribute(self, function: int, kind: Any, value: int) -> tuple[Any, ...]:  # noqa: N802
        assert kind == real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        assert value + self._static_shared <= 227 * 1024
        self.opted_in.append(value)
        self._most_shared = value
        return self._answer("cuFuncSetAttribute")

    def cuLaunchKernel(self, function: int, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        *sizes, shared, stream, (values, types), extra = arguments
        if shared > self._most_shared:
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        name, parameters = entry_parameters(self.loaded[function])
        assert name.startswith("accept_sm_") and (extra, len(sizes)) == (0, 6)
        assert stream in self._cuda.streams
        assert list(types) == [KINDS[kind] for kind in parameters]
        self.launches.append(tuple(sizes))
        self._cuda.submit(stream, lambda: self._accept(sizes[0], *values))
        return self._answer("cuLaunchKernel")

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuEventCreate", object())

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        assert stream in self._cuda.streams
        return self._answer("cuEventRecord")

    def cuEventElapsedTime(self, begin: Any, end: Any) -> tuple[Any, ...]:  # noqa: N802
        """A millisecond."""
        return self._answer("cuEventElapsedTime", 1.0)

    def cuEventDestroy(self, event: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuEventDestroy")

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
