"""`build --precision`: what `quantize` and `build` would make, in one go, whole or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dflash_trt.bundle.quantize as bundle_quantize
from dflash_trt.bundle.build import BuildOptions, build_bundle
from dflash_trt.bundle.tokenizer import BundleTokenizer
from dflash_trt.calibration import memory, observe_pair
from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import read_target
from dflash_trt.commands.precision import choose_recipe
from dflash_trt.config import PrecisionName, load_config
from dflash_trt.graph.form import Precision
from dflash_trt.quantization.checkpoint import quantize_checkpoint
from dflash_trt.quantization.linears import Algorithm, QuantizeOptions
from dflash_trt.quantization.scales import Activations
from tests.commands.bigram import write_tokenizer
from tests.commands.conftest import Outcome, Run
from tests.pairs import SilentProgress
from tests.quantization.running import quantize

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
    (folder / "pair.yaml").write_text(
        "description: tiny\ntarget: {checkpoint: target}\ndraft: {checkpoint: draft}\n"
        "max_seq_len: 128\nmax_batch: 2\ncalibration: texts.jsonl\n"
    )
    return folder / "pair.yaml"


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
    built = run("build", "--target", config, *arguments, "-o", output)
    assert built.code == 0, built.err
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
    built = run(*command, *FP8, "--draft-precision", "nvfp4", "--exclude", "layers.*.down_proj")
    assert built.code == 0, built.err
    lines = built.out.splitlines()
    assert lines[0].endswith(", block 8, target in FP8, draft in NVFP4, weights quantized")
    assert lines[1].startswith("quantised target: 42 linears in FP8; excluded lm_head")
    assert lines[2].startswith("quantised draft: 12 linears in NVFP4; excluded fc")
    shown = run("inspect", tmp_path / "b", "--verify").out
    assert "42 linears in FP8" in shown and "12 linears in NVFP4" in shown
    assert "weights quantized: target" in shown
    assert run("generate", tmp_path / "b", "--prompt", "cab", "--max-tokens", 4).code == 0
    # A draft in a float type stays as it is: linked, like a target that nobody asked about.
    built = run(*command, *FP8, "--draft-precision", "bf16")
    assert "target in FP8, draft in F32" in built.out
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": None}
    source = bigram_config.parent / "draft" / "model.safetensors"
    assert (tmp_path / "b" / "weights/draft/shard-00000.safetensors").samefile(source)
    built = run(*command, "--draft-precision", "fp8")
    assert "target in F32, draft in FP8" in built.out
    # fp32 is what the CPU does anyway.
    assert run(*command, "--precision", "fp32").code == 0
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["weights"] == "linked"


def test_the_configuration_has_a_recipe(run: Run, own_pair: Path, tmp_path: Path) -> None:
    text = own_pair.read_text()
    recipe = "precision: nvfp4\ndraft_precision: fp8\nexclude: ['model.*.down_proj']\n"
    own_pair.write_text(text + recipe)
    command = ["build", "--target", own_pair, "-o", tmp_path / "b", "--overwrite"]
    assert run(*command).code == 0
    assert _linears(tmp_path / "b") == {"target": {"NVFP4": 36}, "draft": {"FP8": 14}}
    assert run(*command, "--exclude", "model.*_proj").fails(2, "nothing is left to quantize")
    assert run(*command, "--draft-precision", "bf16").code == 0
    assert _linears(tmp_path / "b") == {"target": {"NVFP4": 36}, "draft": None}
    # Another precision is another recipe: its draft and its patterns were for this one.
    assert run(*command, *FP8).code == 0
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": {"FP8": 14}}
    assert run(*command, "--precision", "fp32").code == 0
    assert _linears(tmp_path / "b") == {"target": None, "draft": None}
    own_pair.write_text(text + "precision: bf16\n")
    run(*command).fails(2, f"{own_pair}, precision: 'bf16' is for engines", "fp32")


@pytest.mark.parametrize(
    ("name", "target"), [("demo-nvfp4", {"NVFP4": 32 * 3}), ("demo-fp8", {"FP8": 32 * 7})]
)
def test_the_shipped_recipes(run: Run, tmp_path: Path, name: str, target: dict[str, int]) -> None:
    built = run("build", "--target", name, "-o", tmp_path / "b")
    assert built.code == 0, built.err
    assert _linears(tmp_path / "b") == {"target": target, "draft": {"FP8": 2 * 7}}


@pytest.fixture
def build(run: Run, own_pair: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Builds `own_pair` to tmp_path/out/b, which fails and leaves nothing anywhere."""

    def call(*arguments: object) -> Outcome:
        before = sorted(tmp_path.rglob("*"))
        outcome = run("build", "--target", own_pair, "-o", tmp_path / "out" / "b", *arguments)
        assert outcome.code and outcome.out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return outcome

    return call


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--calibration", "x.jsonl"], ["--calibration", "does nothing without a precision"]),
        (["--exclude", "*"], ["--exclude", "does nothing", "--precision fp8 or nvfp4"]),
        (["--quantize-lm-head"], ["--quantize-lm-head", "does nothing"]),
        (["--quantize-lm-head", "--draft-precision", "fp8"], ["--quantize-lm-head"]),
        (["--precision", "fp32", "--exclude", "*"], ["--exclude", "does nothing"]),
        (["--draft-precision", "bf16"], ["--draft-precision", "neither model is quantised"]),
        (["--precision", "bf16"], ["--precision", "for engines", "float32"]),
        (["--precision", "int4"], ["--precision", "int4"]),
        ([*FP8, "--exclude", "*.nothing"], ["'*.nothing' matches no linear of target or draft"]),
        ([*FP8, "--exclude", "*"], ["nothing is left to quantize"]),
        (
            ["--draft-precision", "fp8", "--exclude", "model.*"],
            ["'model.*' matches no linear of draft"],
        ),
        (["--precision", "nvfp4"], ["down_proj", "24 input columns", "--exclude '*.down_proj'"]),
        ([*FP8, "--calibration", "no-such.jsonl"], ["no-such.jsonl", "cannot be read"]),
    ],
)
def test_options_that_do_not_go_together(
    build: Callable[..., Outcome], arguments: list[object], pieces: list[str]
) -> None:
    build(*arguments).fails(2, *pieces)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ('{"text": "a"}', '"prompt"'),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": "a"}\nnot json', "texts.jsonl:2"),
        ('{"prompt": "a"}', "no sequence is long enough for a draft block"),
    ],
)
def test_calibration_texts_that_cannot_be_used(
    build: Callable[..., Outcome], tmp_path: Path, text: str, piece: str
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(text)
    build(*FP8, "--calibration", texts).fails(2, piece)


def test_texts_are_looked_at_before_any_download(run: Run, tmp_path: Path) -> None:
    command = ["build", "--target", "qwen3-8b", *FP8, "-o", tmp_path / "b"]
    run(*command).fails(2, "qwen3-8b.yaml has neither calibration texts nor prompts")
    run(*command, "--calibration", tmp_path / "x.jsonl").fails(2, "x.jsonl: cannot be read")


def test_no_texts_at_all(build: Callable[..., Outcome], own_pair: Path) -> None:
    own_pair.write_text(own_pair.read_text().replace("prompts: prompts.jsonl\n", ""))
    build(*FP8).fails(2, "--calibration", "pair.yaml has neither calibration texts nor prompts")


def test_a_target_without_a_tokenizer(build: Callable[..., Outcome], own_pair: Path) -> None:
    (own_pair.parent / "target" / "tokenizer.json").unlink()
    build(*FP8).fails(1, "has no tokenizer.json, which calibration texts need")


def _quantize_in_place(config: Path, owner: str) -> Path:
    folder, new = config.parent / owner, config.parent / "quantized"
    quantize(read_target(folder) if owner == "target" else read_draft(folder), new, Algorithm.FP8)
    shutil.rmtree(folder)
    new.rename(folder)
    return folder


@pytest.mark.parametrize(
    ("owner", "fix"),
    [("target", "leave out --precision"), ("draft", "add --draft-precision bf16")],
)
def test_what_is_quantised_already(
    build: Callable[..., Outcome], own_pair: Path, owner: str, fix: str
) -> None:
    folder = _quantize_in_place(own_pair, owner)
    build(*FP8).fails(1, f"{folder}: is quantized already", fix)


def test_a_quantised_target_with_a_draft_to_quantise(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    _quantize_in_place(own_pair, "target")
    command = ["build", "--target", own_pair, "--draft-precision", "fp8", "-o", tmp_path / "b"]
    assert run(*command).code == 0
    assert _linears(tmp_path / "b") == {"target": {"FP8": 42}, "draft": {"FP8": 14}}


def test_damaged_quantised_checkpoints(build: Callable[..., Outcome], own_pair: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _quantize_in_place(own_pair, "target")
    path, name = folder / "model.safetensors", "model.layers.3.mlp.up_proj.input_scale"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    build("--draft-precision", "fp8").fails(1, name, "which is missing")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "W4A8_AWQ"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    build("--draft-precision", "fp8").fails(1, "W4A8_AWQ", "supported are ModelOpt's FP8")


def test_a_disk_that_is_too_small(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(bundle_quantize, "shutil", usage)
    line = build(*FP8).fails(1, "the quantized weights need", "1,000 are free")
    assert f"{tmp_path}/out/b: " in line and "building-" not in line


def test_a_machine_that_is_too_small(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 10)
    build(*FP8).fails(1, "observing activations in float32 needs about", "0.0 GiB are available")


def test_a_failed_write_is_about_the_bundle(
    build: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_trt.quantization.shards.ShardWriter.write", fail)
    line = build(*FP8).fails(1, "No space left on device", "nothing was left behind")
    assert f"{tmp_path}/out/b: " in line


# Runs in a process of its own: waits at the stage named, until it is killed.
WAITING_BUILD = """
import sys, time
from dflash_trt.cli import main
from dflash_trt.commands.progress import StageBars

real = StageBars.stage

def stage(self, name, *more):
    real(self, name, *more)
    if name.startswith(sys.argv[1]):
        print("waiting", flush=True)
        time.sleep(60)

StageBars.stage = stage
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def start(own_pair: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a build of `own_pair` in FP8 and waits until it has reached a stage."""
    running: list[subprocess.Popen[str]] = []

    def call(stage: str, output: Path) -> subprocess.Popen[str]:
        command = ["build", "--target", str(own_pair), *FP8, "-o", str(output)]
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING_BUILD, stage, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        return process

    yield call
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("stage", ["observing", "draft: quantizing"])
def test_a_kill_leaves_no_bundle_and_the_next_build_sweeps(
    run: Run,
    own_pair: Path,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
    stage: str,
) -> None:
    output = tmp_path / "out" / "b"
    process = start(stage, output)
    process.kill()
    process.wait()
    (left,) = output.parent.iterdir()
    assert left.name.startswith(".b.building-") and (left / "quantized").is_dir()
    assert run("build", "--target", own_pair, *FP8, "-o", output).code == 0
    assert [path.name for path in output.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("stage", ["observing", "target: quantizing"])
def test_a_polite_kill_leaves_nothing(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], stage: str
) -> None:
    process = start(stage, tmp_path / "out" / "b")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()


def test_engines_with_quantised_products(run: Run, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    output = tmp_path / "b"
    command = ["build", "--target", llama, *RTX, "-o", output]
    built = run(*command, "--precision", "nvfp4", "--draft-precision", "fp8")
    assert built.code == 0, built.err
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
    recipe = choose_recipe(config, path, *names, (), engines=True)
    assert recipe.compute is compute and recipe.algorithms == algorithms


@pytest.mark.parametrize(
    ("arch", "options", "pieces"),
    [
        ("sm_89", ["--precision", "nvfp4"], ["target", "NVFP4", "sm_89 cannot", "sm_120, sm_121"]),
        ("sm_89", [*FP8, "--draft-precision", "nvfp4"], ["draft", "NVFP4", "sm_89 cannot"]),
        ("sm_86", FP8, ["target", "FP8", "sm_86 cannot compute"]),
    ],
)
def test_architectures_without_the_format_are_refused_before_anything_runs(
    run: Run,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    options: list[str],
    pieces: list[str],
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

    def fail(*arguments: object, **keywords: object) -> None:
        raise AssertionError("observes")

    monkeypatch.setattr("dflash_trt.commands.precision.observe_pair", fail)
    output = tmp_path / "out" / "b"
    run("build", "--target", llama, *RTX, "--arch", arch, *options, "-o", output).fails(2, *pieces)
    assert not output.parent.exists()
