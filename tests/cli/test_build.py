"""`build --precision`: what `quantize` and `build` would make, in one go, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import onnx
import pytest
from tokenizers import Tokenizer

from dflash_trt.building.quantize import choose_precisions
from dflash_trt.building.spec import PrecisionOptions
from dflash_trt.graph.form import Precision
from dflash_trt.models.build_config import load_config
from tests.cli.bigram import write_tokenizer
from tests.cli.conftest import Build, Run, write_config
from tests.quantization.running import quantize_in_place

FP8 = ["--precision", "fp8"]
GRAPHS = ("target", "draft", "target_only")


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


def _linears(build: Build) -> dict[str, Any]:
    owners = {owner: build.manifest[owner]["quantization"] for owner in ("target", "draft")}
    return {owner: (found or {}).get("linears") for owner, found in owners.items()}


def _build_in_two(run: Run, config: Path, folder: Path, options: list[str]) -> Path:
    """Both checkpoints quantised, then built."""
    models = config.parent
    build_config, _ = load_config(str(config))
    texts = models / (build_config.calibration or build_config.prompts or "")
    build = ["build", "--target", config]
    for role in ("target", "draft"):
        given = [*options, "--checkpoint", models / role, "--calibration", texts]
        if role == "draft":
            given = [one for one in given if one != "--quantize-lm-head"]
            given += ["--target-checkpoint", models / "target"]
        run.well("quantize", *given, "-o", folder / role)
        build += [f"--{role}-checkpoint", folder / role]
    run.well(*build, "-o", folder / "bundle")
    return folder / "bundle"


@pytest.mark.parametrize(
    ("pair", "options"),
    [("bigram", [*FP8, "--quantize-lm-head"]), ("llama", ["--precision", "nvfp4"])],
)
def test_it_is_quantize_and_build(
    run: Run,
    build: Build,
    bigram_config: Path,
    llama: Path,
    tmp_path: Path,
    pair: str,
    options: list[str],
) -> None:
    config = bigram_config if pair == "bigram" else llama
    built = build.well(config, *options)
    quantizing = f"target: quantizing to {options[1].upper()}"
    for stage in ("observing activations", quantizing, "draft: reading"):
        assert stage in built.err
    expected = _build_in_two(run, config, tmp_path / "two", options)
    found, wanted = _files(build.folder), _files(expected)
    assert list(found) == list(wanted)
    assert [name for name in found if found[name] != wanted[name]] == []
    manifest, other = build.manifest, json.loads((expected / "manifest.json").read_text())
    assert manifest.pop("weights") == "quantized" and other.pop("weights") == "linked"
    assert manifest == other
    # Files of its own, each there once, and nothing beside the bundle.
    assert {path.stat().st_nlink for path in build.folder.rglob("*.safetensors")} == {1}
    assert [path.name for path in build.folder.parent.iterdir()] == ["b"]


def test_what_is_shown(run: Run, build: Build, bigram_config: Path) -> None:
    lines = build.well(bigram_config, *FP8).out.splitlines()
    assert lines[0].endswith(", block 8, target in FP8, draft in FP8, weights quantized")
    assert lines[1].startswith("quantised target: 42 linears in FP8; excluded lm_head")
    assert lines[2].startswith("quantised draft: 14 linears in FP8; excluded fc")
    shown = run("inspect", build.folder, "--verify").out
    assert "42 linears in FP8" in shown and "14 linears in FP8" in shown
    assert "weights quantized: target" in shown
    run.well("generate", build.folder, "--prompt", "cab", "--max-tokens", 4)
    # A draft in a float type stays as it is: linked, like a target that nobody asked about.
    built = build.well(bigram_config, *FP8, "--draft-precision", "bf16", "--overwrite")
    assert "target in FP8, draft in F32" in built.out
    assert _linears(build) == {"target": {"FP8": 42}, "draft": None}
    source = bigram_config.parent / "draft" / "model.safetensors"
    assert (build.folder / "weights/draft/shard-00000.safetensors").samefile(source)
    built = build.well(bigram_config, "--draft-precision", "fp8", "--overwrite")
    assert "target in F32, draft in FP8" in built.out
    # fp32 is what the CPU does anyway.
    build.well(bigram_config, "--precision", "fp32", "--overwrite")
    assert build.manifest["weights"] == "linked"


def test_int8_is_a_precision_of_the_cpu(
    run: Run, build: Build, llama: Path, tmp_path: Path
) -> None:
    from tests.reference.checkpoints import write_draft

    models = llama.parent
    shape: dict[str, Any] = {"intermediate": 100, "target_layer_ids": [0, 1]}
    odd = write_draft(tmp_path / "odd", models / "target", **shape)
    int8 = ["--precision", "int8"]
    shown = build.well(llama, *int8, "--draft-checkpoint", odd).out.splitlines()
    assert shown[0].endswith(", block 8, target in INT8, draft in INT8, weights linked")
    assert shown[1].startswith("quantised target: 15 products in INT8, blocks of 32, 0.2 MiB")
    assert shown[2].endswith("in floats: layers.0.down_proj, layers.1.down_proj")
    told = run("inspect", build.folder, "--verify").out
    assert shown[1].partition(": ")[2] in told and "weights/int8.safetensors" in told
    floats = [onnx.load(build.folder / f"{one}.onnx", load_external_data=False) for one in GRAPHS]
    files, left = [], []
    for model in floats:
        files += [one for one in model.graph.initializer if one.name.endswith(".codes")]
        left += [node.name for node in model.graph.node if node.op_type == "Gemm"]
    assert {one.external_data[0].value for one in files} == {"weights/int8.safetensors"}
    assert left == ["draft_layers.0/mlp/down_proj", "draft_layers.1/mlp/down_proj"]
    told = run.well("verify", build.folder, "--prompt", "cab", "--max-tokens", 20).out
    assert told.count("identical: ") == 3 and "acceptance length" in told
    # One model alone; what else is refused leaves the bundle as it was.
    build.well(llama, *int8, "--draft-precision", "fp32", "--overwrite")
    assert {one for one in ("target", "draft") if "int8" in build.manifest[one]} == {"target"}
    for executor in ("tensorrt", "tensorrt-rtx"):
        again = ("--executor", executor, "--overwrite")
        build(llama, *int8, *again).fails(2, "int8 is what the CPU executor alone computes in")
    build(llama, *int8, "--quantize-lm-head", "--overwrite").fails(2, "does nothing")


def test_int8_of_a_configuration_is_for_the_cpu() -> None:
    config, path = load_config("smollm2-135m")
    none, floats = PrecisionOptions(), Precision.FLOAT32
    assert choose_precisions(config, none, path, "cpu") == (floats, {}, {"target", "draft"})
    bf16 = Precision.BFLOAT16
    assert choose_precisions(config, none, path, "tensorrt-rtx") == (bf16, {}, frozenset())


def test_the_configuration_has_a_recipe(build: Build, own_pair: Path) -> None:
    text = own_pair.read_text()
    recipe = "precision: nvfp4\ndraft_precision: fp8\nexclude: ['model.*.down_proj']\n"
    own_pair.write_text(text + recipe)
    for options, target, draft in (
        ([], {"NVFP4": 36}, {"FP8": 14}),
        (["--draft-precision", "bf16"], {"NVFP4": 36}, None),
        # Another precision is another recipe: its draft and its patterns were for this one.
        (FP8, {"FP8": 42}, {"FP8": 14}),
        (["--precision", "fp32"], None, None),
    ):
        build.well(own_pair, *options, "--overwrite")
        assert _linears(build) == {"target": target, "draft": draft}
    own_pair.write_text(f"{text}precision: nvfp4\nexclude: ['*_proj']\n")
    build(own_pair, "--overwrite").fails(2, "nothing is left to quantize")
    own_pair.write_text(text + "precision: bf16\n")
    build(own_pair, "--overwrite").fails(2, f"{own_pair}, precision: 'bf16' is for engines", "fp32")


@pytest.mark.parametrize(
    ("owner", "fix"),
    [("target", "leave out --precision"), ("draft", "add --draft-precision bf16")],
)
def test_what_is_quantised_already(build: Build, own_pair: Path, owner: str, fix: str) -> None:
    folder = quantize_in_place(own_pair, owner)
    line = build(own_pair, *FP8).fails(1, f"{folder}: is quantized already")
    # Only gpt-oss's MXFP4 could be written anew.
    assert line.endswith(f"{fix} to build it as it is")
    said = f"{folder}: is quantized already: {42 if owner == 'target' else 14} linears are in FP8"
    build(own_pair, "--precision", "int8").fails(1, said, "build it as it is, or pass the checkp")


def test_a_build(build: Build, own_pair: Path) -> None:
    outcome = build.well(own_pair)
    assert outcome.out == (
        f"{build.folder}: qwen3 target of 6 layers (103,840 parameters), "
        "DFlash draft of 2 (34,208), block 8, weights linked\n"
        "weights in memory 614.2 KiB; with --precision int8 268.7 KiB, and other answers "
        "(docs/quantisation.md)\n"
    )
    assert "linking weights" in outcome.err and "graphs" in outcome.err
    assert [path.name for path in build.folder.parent.iterdir()] == ["b"]


def test_the_default_output_is_here(
    run: Run, own_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run.well("build", "--target", own_pair)
    assert (tmp_path / "here" / "pair-bundle" / "manifest.json").is_file()


def test_a_hub_name_without_a_network(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(name: str, **options: Any) -> None:
        asked.append(name)
        patterns = options["allow_patterns"]
        assert all("bin" not in pattern and "py" not in pattern for pattern in patterns)
        raise ConnectionError("Temporary failure in name resolution\n(try again)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    build("qwen3-8b").fails(
        1, "Qwen/Qwen3-8B", "name resolution (try again)", "--target-checkpoint"
    )
    assert asked == ["Qwen/Qwen3-8B"]


def test_the_tokenizers_end_of_text_counts(build: Build, own_pair: Path, run: Run) -> None:
    """Tuned for chats: the configs name the base model's end, the tokenizer the turns' own."""
    folder = own_pair.parent / "target"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = json.loads((folder / "config.json").read_text())["eos_token_id"]
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    own = tokenizer.token_to_id("b")
    outcome = build.well(own_pair)
    assert f"eos_token {own} too" in outcome.err and f"(they name {named})" in outcome.err
    assert f"ends a text with {named}, {own}\n" in run.well("inspect", build.folder).out
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, named]}))
    assert "note" not in build.well(own_pair, "--overwrite").err
    assert f"ends a text with {own}, {named}\n" in run.well("inspect", build.folder).out
    told = run.well("generate", build.folder, "--prompt", "a", "--max-tokens", 9, "--json").json
    assert told["token_ids"][-1:] == [own]


def test_a_hostile_tokenizer_is_one_line(build: Build, own_pair: Path) -> None:
    file = own_pair.parent / "target" / "tokenizer.json"
    hostile = json.loads(file.read_text()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
    file.write_text(json.dumps(hostile))
    build(own_pair).fails(1, str(file), "makes the tokenizers library panic")
