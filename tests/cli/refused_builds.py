"""What `build` refuses of targets of the newest families."""

from __future__ import annotations

import pytest

from dflash_trt.cli.main import main
from tests.pairs import TinyPair

_RTX = ("--executor", "tensorrt-rtx", "--arch", "sm_120")
REFUSED = [
    (("--kv-dtype", "fp8"), "for which FP8 KV caches cannot be built yet"),
]
NO_ENGINES = [(_RTX, "for which engines cannot be built yet")]
NO_KERNELS = [
    (
        ("--executor", "tensorrt", "--arch", "sm_120", "--plugins"),
        "for which engines with kernels of ours cannot be built yet; leave out --plugins",
    ),
    (
        ("--executor", "tensorrt", "--arch", "sm_120", "--plugins", "--kv-layout", "paged"),
        "for which engines with paged or FP8 caches cannot be built yet",
    ),
]


def check_refused(
    pair: TinyPair, options: tuple[str, ...], capfd: pytest.CaptureFixture[str], *words: str
) -> None:
    """Asserts that a build of the pair with `options` ends in one line with all `words`."""
    output = pair.folder / "refused"
    folders = ("target", "draft")
    given = [part for one in folders for part in (f"--{one}-checkpoint", str(pair.folder / one))]
    assert main(["build", *given, *options, "--max-seq-len", "128", "-o", str(output)]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()[-1:]
    assert all(one in line for one in words)
    assert not output.exists()
