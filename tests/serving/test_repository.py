"""The model repository: its files to the byte, whole or absent, complete in itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.errors import DflashError
from dflash_trt.serving.server import ensemble_model, generation
from dflash_trt.serving.server.inputs import ModelSettings
from dflash_trt.serving.server.repository import BUNDLE_FOLDER
from tests.cli.conftest import Run
from tests.serving.served import GOLDEN, SERVER_PORTS, package


def _read_config(folder: Path, model: str) -> str:
    return (folder / model / "config.pbtxt").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_config_to_the_byte(bundle: Bundle, tmp_path: Path, model: str) -> None:
    """The contracts: names, types, shapes. A change here is a change for every client."""
    folder = package(bundle.folder, tmp_path / "repository", max_queue_size=10, threads=3)
    golden = (GOLDEN / f"{model}.config.pbtxt").read_text(encoding="utf-8")
    assert _read_config(folder, model) == golden
    baseline = package(
        bundle.folder, tmp_path / "baseline", drafter="none", max_queue_size=10, threads=3
    )
    on, off = (
        f'{{ key: "speculation"  value: {{ string_value: "{one}" }} }}' for one in ("on", "off")
    )
    assert _read_config(baseline, model) == golden.replace(on, off)
    assert (on in golden) == (model == "tensorrt_llm")


@pytest.mark.parametrize("given", ["on", "yes?", None])
def test_settings(given: str | None) -> None:
    parameters = {} if given is None else {"speculation": {"string_value": given}}
    config = {"model_config": json.dumps({"parameters": parameters})}
    settings = ModelSettings(config | {"model_repository": "/r", "model_version": "1"})
    if given == "on":
        assert settings.read("speculation", bool) is True
    else:
        with pytest.raises(DflashError, match=f"parameters: speculation: .*got {given!r}"[:-2]):
            settings.read("speculation", bool)


def test_every_refused_input_is_declared(repository: Path) -> None:
    """One that is not would be refused by Triton server, without our advice."""
    for model, names in (
        ("tensorrt_llm", set(generation.UNIMPLEMENTED)),
        ("ensemble", set(ensemble_model.UNIMPLEMENTED) | set(ensemble_model.RENAMED)),
    ):
        config = _read_config(repository, model)
        assert not {name for name in names if f'name: "{name}"' not in config}


def test_files(bundle: Bundle, tmp_path: Path) -> None:
    folder = package(bundle.folder, tmp_path / "repository")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    inner = {f"tensorrt_llm/1/bundle/{file.path}" for file in bundle.manifest.files}
    assert files == inner | {
        "tensorrt_llm/config.pbtxt",
        "tensorrt_llm/1/model.py",
        "tensorrt_llm/1/bundle/manifest.json",
        "ensemble/config.pbtxt",
        "ensemble/1/model.py",
    }
    inside = open_bundle(folder / BUNDLE_FOLDER)
    assert inside.manifest == bundle.manifest
    weights = "weights/target/shard-00000.safetensors"
    assert (inside.folder / weights).samefile(bundle.folder / weights)
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_a_repository_has_decided(run: Run, bundle: Bundle, tmp_path: Path) -> None:
    options = ["--max-queue-size", "3", "--request-seconds", "60", "--drafter", "none"]
    outcome = run("package", bundle.folder, "-o", tmp_path / "repository", *options)
    said = "a queue of 3, threads by the machine that serves, 60 s for a request, no speculation\n"
    assert outcome.code == 0 and outcome.out.endswith(said)
    config = (tmp_path / "repository" / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8")
    assert '"request_seconds"  value: { string_value: "60" }' in config
    for option in (["--max-queue-size", "3"], ["--request-seconds", "1"], ["--drafter", "none"]):
        refused = run("serve", tmp_path / "repository", *option, *SERVER_PORTS)
        refused.fails(2, f"error: {option[0]}: is a model repository, whose config.pbtxt says")
        assert f"`dflash-trt package {option[0]}`" in refused.err
