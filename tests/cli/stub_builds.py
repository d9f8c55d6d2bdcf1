"""Builds of targets of the newest families: engines without their code."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.backends.tensorrt.build import builder
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.cli.main import main
from dflash_trt.graph.caches import native
from tests.pairs import TinyPair

KERNELS = ("--executor", "tensorrt", "--precision", "bf16", "--plugins")


def build_with_kernels(
    pair: TinyPair, folder: Path, *options: str, largest: int = 256
) -> dict[str, dict[str, str]]:
    """A bundle of stub engines with kernels, in `folder`/bundle; by graph, how operations run.

    No kernel of TensorRT's has heads of more than `largest`, ours have any.
    """
    from tests.standins.plugin_tensorrt import stand_in_builder

    output = folder / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        stand_in_builder(patch, folder)
        patch.setattr(native, "FUSED_HEAD_DIMS", range(16, largest + 1, 8))
        for module in (native, builder):
            patch.setattr(module, "HEAD_DIMS", (16, 32))
        command = ["build", *_checkpoints(pair), *KERNELS, "--max-seq-len", "128", *options]
        assert main([*command, "-o", str(output)]) == 0
    engines = open_bundle(output).manifest.engines
    assert engines is not None
    return {str(one.graph): dict(one.operations) for one in engines.files}


def _checkpoints(pair: TinyPair) -> list[str]:
    folders = ("target", "draft")
    return [part for one in folders for part in (f"--{one}-checkpoint", str(pair.folder / one))]
