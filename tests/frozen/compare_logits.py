"""Logits to the bit, and times: of one machine, so they are kept outside the repository.

    python -m tests.frozen.compare_logits --save FILE
    python -m tests.frozen.compare_logits --against FILE

The first writes what the demo pairs compute; the second names what is no longer equal, and how
the times have changed. Logits are taken where ONNX Runtime writes them, so that nothing of the
project's own between a call and its outputs needs to be known.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime as ort

from tests.frozen.bundles import write_bundles
from tests.frozen.command_line import run_well
from tests.frozen.golden import differences
from tests.frozen.tokens import CASES, PROMPTS, SAMPLED

HASHED = ("logits", "choice_ids", "token_ids")
REPEATS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--save", type=Path, metavar="FILE")
    group.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(Path(folder))
    if options.save is not None:
        options.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    before = json.loads(options.against.read_text(encoding="utf-8"))
    logits = (dict(sorted(one["logits"].items())) for one in (before, found))
    changed = differences(*logits)
    print("\n".join(changed) or f"{len(found['logits'])} cases: every logit is the same")
    for case, seconds in found["seconds"].items():
        earlier = before["seconds"].get(case, math.nan)
        print(f"{case}: {earlier:.3f} s of CPU time became {seconds:.3f} s")
    return 1 if changed else 0


def _measure(folder: Path) -> dict[str, Any]:
    """Of each case the hash of all outputs in their order, and its CPU time, median of five."""
    write_bundles(folder)
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    logits, seconds = {}, {}
    for name in [*CASES, "demo-nvfp4"]:
        for more in ((), ("--no-speculation",), ("--block-size", "3")):
            words = ("generate", folder / name, "--prompt-file", file, "--max-tokens", "64")
            words = (*words, *SAMPLED, *more, "--json")
            case = " ".join([name, *more])
            with _hashed_outputs() as outputs:
                run_well(*words)
            logits[case] = f"{outputs.calls} calls {outputs.digest.hexdigest()}"
            seconds[case] = median(_cpu_seconds(words) for _ in range(REPEATS))
            print(case, logits[case], f"{seconds[case]:.3f} s", file=sys.stderr)
    return {"logits": logits, "seconds": seconds}


def _cpu_seconds(words: Sequence[object]) -> float:
    """CPU time of a command, which other work on the machine changes little."""
    started = time.process_time()
    run_well(*words)
    return time.process_time() - started


class _Outputs:
    """The bytes that calls wrote, hashed."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.calls = 0
        self._bound: dict[int, dict[str, tuple[int, int]]] = {}

    def bind(self, binding: ort.IOBinding, name: str, *place: Any) -> None:
        if name in HASHED:
            _, _, element, shape, address = place
            size = math.prod(shape) * np.dtype(element).itemsize
            self._bound.setdefault(id(binding), {})[name] = (address, size)

    def read(self, binding: ort.IOBinding) -> None:
        self.calls += 1
        for name, (address, size) in sorted(self._bound.get(id(binding), {}).items()):
            self.digest.update(name.encode() + ctypes.string_at(address, size))


@contextmanager
def _hashed_outputs() -> Iterator[_Outputs]:
    """What ONNX Runtime computes inside the block."""
    outputs = _Outputs()
    bind, run = ort.IOBinding.bind_output, ort.InferenceSession.run_with_iobinding
    kept: list[ort.IOBinding] = []  # whose ids then are nobody else's

    def bound(binding: ort.IOBinding, name: str, *place: Any) -> None:
        kept.append(binding)
        outputs.bind(binding, name, *place)
        bind(binding, name, *place)

    def ran(session: ort.InferenceSession, binding: ort.IOBinding, *more: Any) -> None:
        run(session, binding, *more)
        outputs.read(binding)

    with (
        mock.patch.object(ort.IOBinding, "bind_output", bound),
        mock.patch.object(ort.InferenceSession, "run_with_iobinding", ran),
    ):
        yield outputs


if __name__ == "__main__":
    sys.exit(main())
