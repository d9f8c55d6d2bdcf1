"""TensorRT-RTX itself: imported when first needed, its messages kept for the one error line."""

from __future__ import annotations

import importlib
from typing import Any

from dflash_trt.errors import DflashError, one_line

MODULE = "tensorrt_rtx"
EXTRA = "pip install 'dflash-trt[rtx]'"


def load_library() -> Any:
    """The tensorrt_rtx module.

    Raises:
        DflashError: not installed, or its shared libraries do not load.
    """
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        what = f"TensorRT-RTX is not installed ({one_line(error, 80)})"
        raise DflashError(what, fix=EXTRA) from error
    except (ImportError, OSError) as error:
        raise DflashError(f"TensorRT-RTX does not load: {one_line(error)}", fix=EXTRA) from error


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


def refused(doing: str, graph: str, errors: list[str]) -> DflashError:
    """The first error is the cause; those after it are its echoes."""
    cause = one_line(errors[0]) if errors else "it gives no reason"
    return DflashError(f"TensorRT-RTX cannot {doing} it: {cause}", where=f"{graph}.onnx")
