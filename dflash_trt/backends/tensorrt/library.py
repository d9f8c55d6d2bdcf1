"""TensorRT-RTX and TensorRT: imported when first needed, messages kept for the one error line.

TensorRT-RTX builds for GPUs that are not there; TensorRT builds for the one that is. Their Python
interfaces are the same for what this project uses, but for what `is_rtx` tells apart.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.errors import DflashError, closest, install_extra, one_line
from dflash_trt.hardware.gpus import Arch, arches

EngineExecutor = Literal["tensorrt-rtx", "tensorrt"]
OperationForm = Literal["native", "plugin", "function"]
"""How an engine runs a graph's function: a layer of its own, a kernel of ours, or its body."""


@dataclass(frozen=True, slots=True)
class Library:
    """One of the two: `executor` is its name in a manifest and on the command line.

    `oldest` is the first version whose interface was read for what this project calls of it.
    """

    executor: EngineExecutor
    name: str
    module: str
    install: str
    oldest: tuple[int, int]

    @property
    def is_rtx(self) -> bool:
        """Whether it builds ahead of time, and compiles kernels for a shape at run time."""
        return self.executor == "tensorrt-rtx"


TENSORRT_RTX = Library("tensorrt-rtx", "TensorRT-RTX", "tensorrt_rtx", install_extra("rtx"), (1, 7))
TENSORRT = Library(
    "tensorrt",
    "TensorRT",
    "tensorrt",
    "install the tensorrt wheel of NVIDIA's package index (the one on PyPI is a placeholder); "
    "the extra tensorrt brings cuda-python alone, which engines run with",
    (11, 1),
)
TORCH = "torch"
"""The executor that runs the graphs themselves with PyTorch, wherever that runs."""
LIBRARIES: dict[str, Library] = {library.executor: library for library in (TENSORRT_RTX, TENSORRT)}


def library_arches(library: Library) -> dict[str, Arch]:
    """The architectures that `library` can build for, on some machine, by name."""
    return {
        name: arch for name, arch in arches().items() if arch.tensorrt_rtx or not library.is_rtx
    }


def find_arch(name: str, library: Library = TENSORRT_RTX) -> Arch:
    """The architecture called `name`.

    Raises:
        DflashError: engines of `library` are not built for it; names the nearest.
    """
    known = library_arches(library)
    if name in known:
        return known[name]
    close = closest(name, list(known))
    hint = f" (nearest: {close!r})" if close else ""
    raise DflashError(
        f"no {library.name} engines for {name[:40]!r}{hint}",
        where="--arch",
        fix=f"choose one of {', '.join(known)}",
        usage=True,
    )


def load_library(library: Library = TENSORRT_RTX) -> Any:
    """The library's Python module.

    Raises:
        DflashError: not installed, too old, or its shared libraries do not load.
    """
    name, fix = library.name, library.install
    try:
        trt = importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        what = f"{name} is not installed ({one_line(error, 80)})"
        raise DflashError(what, fix=fix) from error
    except (ImportError, OSError) as error:
        raise DflashError(f"{name} does not load: {one_line(error)}", fix=fix) from error
    version = str(getattr(trt, "__version__", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2 or not hasattr(trt, "Builder"):
        raise DflashError(f"{name} is not installed: {library.module} is an empty package", fix=fix)
    if numbers < library.oldest:
        needed = ".".join(map(str, library.oldest))
        raise DflashError(f"{name} {version} is too old, {needed} or newer is needed", fix=fix)
    return trt


def make_logger(trt: Any) -> Any:
    """A logger that prints nothing; its `errors` are the error messages in order."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)

    return Logger()


class RefusedError(DflashError):
    """A library did not do what it was asked to; it may have given no `cause`.

    The first of its errors is the cause; those after it are its echoes.
    """

    def __init__(
        self, library: Library, doing: str, where: str, errors: list[str], *, fix: str | None = None
    ) -> None:
        self.cause = one_line(errors[0]) if errors else None
        what = f"{library.name} cannot {doing}: {self.cause or 'it gives no reason'}"
        super().__init__(what, where=where, fix=fix)
