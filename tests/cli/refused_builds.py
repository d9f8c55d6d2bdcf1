"""Builds of targets of the newest families: what is refused, and engines without their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.cli.main import main
from dflash_trt.graph.caches import native
from tests.pairs import TinyPair

REFUSED = [
    (("--kv-dtype", "fp8"), "for which FP8 KV caches cannot be built yet"),
]
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


def build_stub(pair: TinyPair, output: Path, *, largest: int = 256) -> Path:
    """A bundle of stub engines of the pair, where no kernel has heads of more than `largest`."""
    from tests.standins.stub_builder import StubBuilder

    options = ["--executor", "tensorrt-rtx", "--arch", "sm_120", "--max-seq-len", "128"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorrt_rtx.Builder", StubBuilder)
        patch.setattr(native, "FUSED_HEAD_DIMS", range(16, largest + 1, 8))
        assert main(["build", *_checkpoints(pair), *options, "-o", str(output)]) == 0
    return output


def check_refused(
    pair: TinyPair, options: tuple[str, ...], capfd: pytest.CaptureFixture[str], *words: str
) -> None:
    """Asserts that a build of the pair with `options` ends in one line with all `words`."""
    output = pair.folder / "refused"
    assert (
        main(["build", *_checkpoints(pair), *options, "--max-seq-len", "128", "-o", str(output)])
        == 2
    )
    (line,) = capfd.readouterr().err.strip().splitlines()[-1:]
    assert all(one in line for one in words)
    assert not output.exists()


def _checkpoints(pair: TinyPair) -> list[str]:
    folders = ("target", "draft")
    return [part for one in folders for part in (f"--{one}-checkpoint", str(pair.folder / one))]
