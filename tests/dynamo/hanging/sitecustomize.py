"""On PYTHONPATH of a worker: SIGUSR1 lets its generator hang in its next step."""

import signal
import threading
from typing import Any


def _hang(*_: Any) -> None:
    from dflash_trt.decoding.generator import Generator

    Generator.step = lambda _: threading.Event().wait()  # type: ignore[assignment,method-assign]


signal.signal(signal.SIGUSR1, _hang)
