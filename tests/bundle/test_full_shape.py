"""gpt-oss-120b in its true shapes: what a build costs, and that it refers to every tensor."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.checkpoints.safetensors_header import TensorEntry, read_header
from dflash_trt.cli.main import main
from dflash_trt.synthetic.gpt_oss import EOS_TOKEN_IDS, write_gpt_oss_120b
from tests.bundle.measured_build import BuildCost, build_synthetic

LENGTH = ("--max-seq-len", "131072")
MAX_SECONDS, MAX_BYTES, MAX_OWN_BYTES = 60, 2 << 30, 100e6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuildCost]:
    """The bundle, and what it took."""
    folder = tmp_path_factory.mktemp("full")
    assert write_gpt_oss_120b(folder) > 65e9
    bundle = folder / "bundle"
    return bundle, build_synthetic(folder, bundle, *LENGTH)


def test_a_build_reads_no_weights(built: tuple[Path, BuildCost]) -> None:
    bundle, cost = built
    assert cost.cpu_seconds < MAX_SECONDS
    assert cost.peak_resident < MAX_BYTES
    own = [path.stat() for path in bundle.rglob("*") if path.is_file()]
    assert sum(one.st_size for one in own if one.st_nlink == 1) < MAX_OWN_BYTES
    assert sum(one.st_size for one in own) > 65e9
    manifest = open_bundle(bundle).manifest
    assert manifest.target.parameters == 116_829_156_672
    assert list(manifest.target.eos_token_ids) == EOS_TOKEN_IDS


def test_engines_of_it_are_for_several_gpus(
    built: tuple[Path, BuildCost], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    bundle = built[0]
    command = ["build", "--target", str(bundle.with_name("pair.yaml")), *LENGTH, "--max-batch", "1"]
    output = bundle.with_name("engines")
    assert main([*command, "--executor", "tensorrt-rtx", "-o", str(output)]) == 2
    assert "or several GPUs with --executor trtllm" in capfd.readouterr().err
    assert not output.exists()


def test_graphs_refer_to_every_tensor_where_its_header_says(
    built: tuple[Path, BuildCost],
) -> None:
    bundle = built[0]
    headers: dict[str, list[TensorEntry]] = {}
    for path in sorted((bundle / "weights").rglob("*.safetensors")):
        headers[path.relative_to(bundle).as_posix()] = list(read_header(path).values())
    known = {
        (location, entry.offset, entry.length): entry.name
        for location, entries in headers.items()
        for entry in entries
    }
    used: set[str] = set()
    for graph in ("target", "draft", "target_only"):
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            place = {item.key: item.value for item in tensor.external_data}
            key = (place["location"], int(place["offset"]), int(place["length"]))
            used.add(known[key])
    assert used == set(known.values())
