"""`dflash-trt import-gguf`: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.cli.conftest import Build, Run, write_config
from tests.importing.files import VOCAB, write_gguf
from tests.reference.checkpoints import write_draft, write_target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(
        tmp_path_factory.mktemp("source") / "hf", "llama", num_layers=3, vocab=VOCAB, tie=True
    )


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    names = {"general.name": "Tiny", "general.license": "apache-2.0"}
    return write_gguf(tmp_path / "tiny.gguf", source, Kind.Q8_0, keys=names)


def test_what_it_says(run: Run, model: Path, tmp_path: Path) -> None:
    shown = run.well("import-gguf", model, "-o", tmp_path / "out").out.splitlines()
    assert shown[0].startswith(f"{tmp_path / 'out'}: llama target of 3 layers (")
    assert shown[0].endswith(" in bf16")
    assert shown[1].startswith("  tensors: 7 F32, 22 Q8_0; ") and "values rounded" in shown[1]
    assert shown[2].endswith("cut as gpt-2; ends at <|end|> (320); no chat template")
    assert shown[3:] == ["  licence: apache-2.0"]
    assert run.well("import-gguf", model, "-o", tmp_path / "SmolLM2-135M-Instruct-Q8").out.endswith(
        f"  draft: `dflash-trt build --target smollm2-135m --target-checkpoint {tmp_path}/SmolLM2-"
        "135M-Instruct-Q8` takes the draft that ships for HuggingFaceTB/SmolLM2-135M-Instruct\n"
    )
    exact = run.well("import-gguf", model, "-o", tmp_path / "exact", "--dtype", "fp32").out
    assert "every value is kept" in exact


def test_json(run: Run, model: Path, tmp_path: Path) -> None:
    told = run.well("import-gguf", model, "-o", tmp_path / "out", "--json").json
    assert told["source_bytes"] == model.stat().st_size and told["license"] == "apache-2.0"
    assert told["tensors"] == {"F32": 7, "Q8_0": 22}
    assert (told["tokenizer"]["tokens"], told["tokenizer"]["eos_token_ids"]) == (VOCAB, [320])


def test_a_build_takes_it(run: Run, build: Build, model: Path, tmp_path: Path) -> None:
    run.well("import-gguf", model, "-o", tmp_path / "target")
    write_draft(tmp_path / "draft", tmp_path / "target", target_layer_ids=[0, 1])
    build.well(write_config(tmp_path))
    told = run.well("generate", build.folder, "--prompt", "the key", "--max-tokens", "4", "--json")
    assert told.json


def test_without_the_package(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    shown = run("import-gguf", model, "-o", tmp_path / "out").fails(1, "needs gguf")
    assert shown.endswith("pip install -e '.[gguf]' in a checkout of dflash-trt")
