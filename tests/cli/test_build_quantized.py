"""`build --precision`: what `quantize` and `build` would make, in one go, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.recipe import choose_recipe
from dflash_trt.building.request import PrecisionOptions
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.calibration import observe_pair
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.config import PrecisionName, load_config
from dflash_trt.graph.form import Precision
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.linears import Algorithm, QuantizeOptions
from dflash_trt.quantization.scales import Activations
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.cli.bigram import write_tokenizer
from tests.cli.conftest import Run, write_config
from tests.pairs import SilentProgress
from tests.quantization.running import quantize_in_place

RTX = ["--executor", "tensorrt-rtx"]
# The bigram pair's feed-forward is 24 wide, which has no whole blocks.
NVFP4 = ["--precision", "nvfp4", "--exclude", "*.down_proj"]
FP8 = ["--precision", "fp8"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML of a tiny Llama pair in two shards, bf16, that no test changes."""
    from tests.reference.checkpoints import write_draft, write_target

    folder = tmp_path_factory.mktemp("llama")
    size: dict[str, Any] = {"num_layers": 2, "head_dim": 64, "vocab": 300, "dtype": "bfloat16"}
    write_target(folder / "target", "llama", **size, shards=2, max_positions=128)
    draft = {"num_layers": 1, "target_layer_ids": [0, 1], "dtype": "bfloat16"}
    write_draft(folder / "draft", folder / "target", **draft)
    write_tokenizer(folder / "target")
    (folder / "texts.jsonl").write_text('{"prompt": "calibrate"}\n{"prompt": "with this"}\n')
    return write_config(folder, max_seq_len=128, max_batch=2, calibration="texts.jsonl")


def _files(folder: Path) -> dict[str, bytes]:
    """Everything in a bundle but its manifest, which says how the weights came there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def _linears(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return {
        owner: (manifest[owner]["quantization"] or {}).get("linears")
        for owner in ("target", "draft")
    }


def _build_in_two(config: Path, folder: Path, algorithm: Algorithm, **options: Any) -> Path:
    """Both checkpoints quantised with the pair's activations, then built."""
    models = config.parent
    pair = check_pair(read_target(models / "target"), read_draft(models / "draft"))
    tokenizer = BundleTokenizer(models / "target")
    build_config, _ = load_config(str(config))
    texts = models / (build_config.calibration or build_config.prompts or "")
    prompts = [json.loads(line)["prompt"] for line in texts.read_text().splitlines()]
    amax = observe_pair(pair, [tokenizer.encode(text) for text in prompts], SilentProgress())
    head = options.pop("quantize_lm_head", False)
    target = QuantizeOptions(algorithm, quantize_lm_head=head, **options)
    draft = QuantizeOptions(algorithm, **options)
    for spec, one, known in (
        (pair.target, target, amax.target),
        (pair.draft, draft, amax.draft),
    ):
        output = folder / spec.checkpoint.path.name
        quantize_checkpoint(spec, one, Activations.known(known), output, SilentProgress())
    quantized = check_pair(read_target(folder / "target"), read_draft(folder / "draft"))
    prompts_file = models / build_config.prompts if build_config.prompts else None
    build_bundle(
        quantized,
        build_config,
        "pair",
        folder / "bundle",
        BuildOptions(),
        SilentProgress(),
        prompts=prompts_file,
    )
    return folder / "bundle"


@pytest.mark.parametrize(
    ("algorithm", "arguments", "options"),
    [
        (Algorithm.FP8, [*FP8, "--quantize-lm-head"], {"quantize_lm_head": True}),
        (Algorithm.NVFP4, NVFP4, {"exclude": ("*.down_proj",)}),
    ],
)
@pytest.mark.parametrize("pair", ["bigram", "llama"])
def test_it_is_quantize_and_build(
    run: Run,
    bigram_config: Path,
    llama: Path,
    tmp_path: Path,
    pair: str,
    algorithm: Algorithm,
    arguments: list[str],
    options: dict[str, Any],
) -> None:
    config = bigram_config if pair == "bigram" else llama
    output = tmp_path / "out" / "b"
    built = run.well("build", "--target", config, *arguments, "-o", output)
    for stage in ("observing activations", f"target: quantizing to {algorithm}", "draft: reading"):
        assert stage in built.err
    expected = _build_in_two(config, tmp_path / "two", algorithm, **options)
    found, wanted = _files(output), _files(expected)
    assert list(found) == list(wanted)
    assert [name for name in found if found[name] != wanted[name]] == []
    manifest, other = (
        json.loads((folder / "manifest.json").read_text()) for folder in (output, expected)
    )
    assert manifest.pop("weights") == "quantized" and other.pop("weights") == "linked"
    assert manifest == other
    # Files of its own, each there once, and nothing beside the bundle.
    assert {path.stat().st_nlink for path in output.rglob("*.safetensors")} == {1}
    assert [path.name for path in output.parent.iterdir()] == ["b"]


def test_what_is_shown(run: Run, bigram_config: Path, tmp_path: Path) -> None:
    command = ["build", "--target", bigram_config, "-o", tmp_path / "b", "--overwrite"]
    built = run.well(
        *command, *FP8, "--draft-precision", "nvfp4", "--exclude", "layers.*.down_proj"
    )
    lines = built.out.splitlines()
    assert lines[0].endswith(", block 8, target in FP8, draft in NVFP4, weights quantized")
    assert lines[1].startswith("quantised target: 42 linears in FP8; excluded lm_head")
    assert lines[2].startswith("quantised draft: 12 linears in NVFP4; excluded fc")
    shown = run("inspect", tmp_path / "b", "--verify").out
    assert "42 linears in FP8" in shown and "12 linears in NVFP4" in shown
    assert "weights quantized: target" in shown
    run.well("generate", tmp_path / "b", "--prompt", "cab", "--max-tokens", 4)
    # A draft in a float type stays as it is: linked, like a target that nobody asked about.
    built = run(*command, *FP8, "--draft-precision", "bf16")
    assert "target in FP8, draft in F32" in built.out
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": None}
    source = bigram_config.parent / "draft" / "model.safetensors"
    assert (tmp_path / "b" / "weights/draft/shard-00000.safetensors").samefile(source)
    built = run(*command, "--draft-precision", "fp8")
    assert "target in F32, draft in FP8" in built.out
    # fp32 is what the CPU does anyway.
    run.well(*command, "--precision", "fp32")
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["weights"] == "linked"


def test_the_configuration_has_a_recipe(run: Run, own_pair: Path, tmp_path: Path) -> None:
    text = own_pair.read_text()
    recipe = "precision: nvfp4\ndraft_precision: fp8\nexclude: ['model.*.down_proj']\n"
    own_pair.write_text(text + recipe)
    command = ["build", "--target", own_pair, "-o", tmp_path / "b", "--overwrite"]
    run.well(*command)
    assert _linears(tmp_path / "b") == {"target": {"NVFP4": 36}, "draft": {"FP8": 14}}
    assert run(*command, "--exclude", "model.*_proj").fails(2, "nothing is left to quantize")
    run.well(*command, "--draft-precision", "bf16")
    assert _linears(tmp_path / "b") == {"target": {"NVFP4": 36}, "draft": None}
    # Another precision is another recipe: its draft and its patterns were for this one.
    run.well(*command, *FP8)
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": {"FP8": 14}}
    run.well(*command, "--precision", "fp32")
    assert _linears(tmp_path / "b") == {"target": None, "draft": None}
    own_pair.write_text(text + "precision: bf16\n")
    run(*command).fails(2, f"{own_pair}, precision: 'bf16' is for engines", "fp32")


@pytest.mark.parametrize(
    ("name", "target"), [("demo-nvfp4", {"NVFP4": 32 * 3}), ("demo-fp8", {"FP8": 32 * 7})]
)
def test_the_shipped_recipes(run: Run, tmp_path: Path, name: str, target: dict[str, int]) -> None:
    run.well("build", "--target", name, "-o", tmp_path / "b")
    assert _linears(tmp_path / "b") == {"target": target, "draft": {"FP8": 2 * 7}}


def test_a_quantised_target_with_a_draft_to_quantise(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    quantize_in_place(own_pair, "target")
    command = ["build", "--target", own_pair, "--draft-precision", "fp8", "-o", tmp_path / "b"]
    run.well(*command)
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": {"FP8": 14}}


def test_engines_with_quantised_products(run: Run, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    output = tmp_path / "b"
    command = ["build", "--target", llama, *RTX, "-o", output]
    built = run.well(*command, "--precision", "nvfp4", "--draft-precision", "fp8")
    assert "target in NVFP4, draft in FP8, weights quantized" in built.out
    assert "engines for sm_120 in bfloat16: target " in built.out
    files = run("inspect", output, "--json").json["engines"]["files"]
    products = {file["graph"]: file["quantized_products"] for file in files}
    # The target graph also fills the draft's cache, by its k_proj and v_proj.
    assert products == {
        "target": {"NVFP4": 14, "FP8": 2},
        "draft": {"FP8": 7},
        "target_only": {"NVFP4": 14},
    }


@pytest.mark.parametrize(
    ("names", "compute", "algorithms"),
    [
        ((None, None), Precision.BFLOAT16, {}),
        (("fp16", None), Precision.FLOAT16, {}),
        (("fp8", None), Precision.BFLOAT16, {"target": Algorithm.FP8, "draft": Algorithm.FP8}),
        (("nvfp4", "fp16"), Precision.FLOAT16, {"target": Algorithm.NVFP4}),
        (("fp16", "fp8"), Precision.FLOAT16, {"draft": Algorithm.FP8}),
    ],
)
def test_what_engines_compute_in(
    names: tuple[PrecisionName | None, PrecisionName | None],
    compute: Precision,
    algorithms: dict[str, Algorithm],
) -> None:
    config, path = load_config("demo")
    precision, draft_precision = names
    options = PrecisionOptions(precision=precision, draft_precision=draft_precision)
    recipe = choose_recipe(config, path, options, engines=True)
    assert recipe.compute is compute and recipe.algorithms == algorithms


def test_a_format_that_the_architecture_lacks_is_refused_before_anything_runs(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    monkeypatch.setattr("dflash_trt.building.recipe.observe_pair", pytest.fail)
    output = tmp_path / "out" / "b"
    options = [*RTX, "--arch", "sm_89", *FP8, "--draft-precision", "nvfp4"]
    run("build", "--target", llama, *options, "-o", output).fails(2, "draft", "NVFP4", "sm_89")
    assert not output.parent.exists()
