"""`build`: bad input of every kind is one clear line, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.conftest import Outcome, Run

Break = Callable[[Path], None]


def _edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(fields))


def _shard(folder: Path) -> Path:
    """Turns the folder's one weights file into two shards with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(2):
        part = dict(sorted(tensors.items())[number::2])
        save_file(part, folder / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.fixture
def build(run: Run, own_pair: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Builds `own_pair` to tmp_path/out; on failure nothing may have appeared anywhere."""

    def call(*arguments: object) -> Outcome:
        before = sorted(tmp_path.rglob("*"))
        outcome = run("build", "--target", own_pair, "-o", tmp_path / "out" / "b", *arguments)
        if outcome.code:
            assert sorted(tmp_path.rglob("*")) == before
            assert outcome.out == ""
        return outcome

    return call


def test_a_build(build: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = build()
    assert outcome.code == 0
    assert outcome.out == (
        f"{tmp_path}/out/b: qwen3 target of 6 layers (103,840 parameters), "
        "DFlash draft of 2 (34,208), block 8, weights linked\n"
    )
    assert "linking weights" in outcome.err and "graphs" in outcome.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


def test_options_override_the_configuration(build: Callable[..., Outcome], tmp_path: Path) -> None:
    assert build("--max-batch", 2, "--max-seq-len", 100, "--block-size", 4).code == 0
    manifest = json.loads((tmp_path / "out" / "b" / "manifest.json").read_text())
    assert manifest["limits"] == {
        "max_batch": 2,
        "max_seq_len": 100,
        "block_size": 4,
        "prefill_chunk": 100,
    }


def test_checkpoint_folders_override_the_configuration(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(own_pair.parent / "target", elsewhere / "t")
    shutil.move(own_pair.parent / "draft", elsewhere / "d")
    folders = ["--target-checkpoint", elsewhere / "t", "--draft-checkpoint", elsewhere / "d"]
    assert run("build", "--target", own_pair, "-o", tmp_path / "b", *folders).code == 0


def test_the_default_output_is_here(
    run: Run, own_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("build", "--target", own_pair).code == 0
    assert (tmp_path / "here" / "pair-bundle" / "manifest.json").is_file()


def _truncate(pair: Path) -> None:
    path = pair / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _lie(pair: Path) -> None:
    path = pair / "draft" / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _missing_shard(pair: Path) -> None:
    _shard(pair / "target")
    (pair / "target" / "part-1.safetensors").unlink()


def _escaping_shard(pair: Path) -> None:
    index = _shard(pair / "target")
    shutil.move(pair / "target" / "part-1.safetensors", pair)
    index.write_text(index.read_text().replace("part-1", "../part-1"))


def _wrong_dtype(pair: Path) -> None:
    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.astype(np.int8) for name, tensor in tensors.items()}, path)


def _nan_block(pair: Path) -> None:
    _edit(pair / "draft" / "config.json", block_size=float("nan"))


def _vocabulary(pair: Path) -> None:
    _edit(pair / "draft" / "config.json", vocab_size=301)


def _mask_token(pair: Path) -> None:
    _edit(
        pair / "draft" / "config.json",
        dflash_config={"mask_token_id": 300, "target_layer_ids": [1, 2, 3]},
    )


def _pickle(pair: Path) -> None:
    (pair / "target" / "model.safetensors").rename(pair / "target" / "pytorch_model.bin")


def _no_config(pair: Path) -> None:
    (pair / "draft" / "config.json").unlink()


def _bad_json(pair: Path) -> None:
    (pair / "draft" / "config.json").write_text('{"architectures": [')


def _no_prompts(pair: Path) -> None:
    (pair / "prompts.jsonl").unlink()


def _bad_prompts(pair: Path) -> None:
    (pair / "prompts.jsonl").write_text('{"prompt": 1}')


def _swap(pair: Path) -> None:
    (pair / "target").rename(pair / "x")
    (pair / "draft").rename(pair / "target")
    (pair / "x").rename(pair / "draft")


@pytest.mark.parametrize(
    ("damage", "code", "pieces"),
    [
        (_truncate, 1, ["target/model.safetensors", "truncated"]),
        (_lie, 1, ["draft/model.safetensors", "header claims"]),
        (_missing_shard, 1, ["index.json", "part-1.safetensors", "not in the folder"]),
        (_escaping_shard, 1, ["index.json", "../part-1.safetensors"]),
        (_wrong_dtype, 1, ["target", "I8"]),
        (_nan_block, 1, ["draft/config.json", "block_size", "NaN"]),
        (_vocabulary, 1, ["vocab_size 301", "300"]),
        (_mask_token, 1, ["mask_token_id 300", "vocabulary of 300"]),
        (_pickle, 1, ["target", "pickle", "pytorch_model.bin"]),
        (_no_config, 1, ["draft", "config.json"]),
        (_bad_json, 1, ["draft/config.json", "not valid JSON"]),
        (_swap, 1, ["target", "DFlash"]),
        (_no_prompts, 2, ["prompts.jsonl", "No such file"]),
        (_bad_prompts, 2, ["prompts.jsonl:1", '"prompt"']),
    ],
)
def test_bad_checkpoints(
    build: Callable[..., Outcome], own_pair: Path, damage: Break, code: int, pieces: list[str]
) -> None:
    damage(own_pair.parent)
    build().fails(code, *pieces)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
        ({"architectures": ["DSparkDraftModel"]}, "DSpark"),
    ],
)
def test_relatives_of_dflash_are_named(
    build: Callable[..., Outcome], own_pair: Path, changes: dict[str, Any], name: str
) -> None:
    _edit(own_pair.parent / "draft" / "config.json", **changes)
    error = build().fails(1)
    assert name.lower() in error.lower()


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (["--block-size", 9], ["block size 9", "trained block of 8", "--block-size 8"]),
        (["--block-size", 1], ["--block-size", "1"]),
        (["--max-seq-len", 129], ["max_seq_len 129", "128 positions", "--max-seq-len 128"]),
        (["--max-seq-len", 8], ["max_seq_len 8", "block of 8", "--max-seq-len"]),
        (["--max-seq-len", "many"], ["--max-seq-len", "many"]),
        (["--max-batch", 0], ["--max-batch", "0"]),
        (["--max-batch", 10**12], ["--max-batch", str(10**12)]),
    ],
)
def test_limits_that_do_not_fit(
    build: Callable[..., Outcome], arguments: list[object], pieces: list[str]
) -> None:
    build(*arguments).fails(2, *pieces)


def test_no_such_folder(build: Callable[..., Outcome], tmp_path: Path) -> None:
    build("--target-checkpoint", tmp_path / "none").fails(1, str(tmp_path / "none"), "no such")
    file = tmp_path / "file"
    file.touch()
    build("--draft-checkpoint", file).fails(2, "file", "--draft-checkpoint")


def test_a_relative_folder_that_is_missing(run: Run, own_pair: Path, tmp_path: Path) -> None:
    own_pair.write_text(own_pair.read_text().replace("{checkpoint: draft}", "{checkpoint: drafd}"))
    run("build", "--target", own_pair, "-o", tmp_path / "b").fails(
        2, str(own_pair.parent / "drafd"), "no such checkpoint folder"
    )


def test_a_hub_name_without_a_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail(name: str, **options: Any) -> None:
        asked.append(name)
        assert all(
            "bin" not in pattern and "py" not in pattern for pattern in options["allow_patterns"]
        )
        raise ConnectionError("Temporary failure in name resolution\n(try again)")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    run("build", "--target", "qwen3-8b", "-o", tmp_path / "b").fails(
        1, "Qwen/Qwen3-8B", "name resolution (try again)", "--target-checkpoint"
    )
    assert asked == ["Qwen/Qwen3-8B"]
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused_before_any_download(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, **options: Any) -> None:
        raise AssertionError("downloads")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    run("build", "--target", "qwen3-8b", "-o", tmp_path).fails(2, "already exists")


def test_existing_output(run: Run, own_pair: Path, tmp_path: Path) -> None:
    output = tmp_path / "b"
    assert run("build", "--target", own_pair, "-o", output).code == 0
    inode = (output / "manifest.json").stat().st_ino
    run("build", "--target", own_pair, "-o", output).fails(2, str(output), "--overwrite")
    assert (output / "manifest.json").stat().st_ino == inode
    assert run("build", "--target", own_pair, "-o", output, "--overwrite").code == 0
    assert (output / "manifest.json").stat().st_ino != inode


def test_what_is_not_a_bundle_is_never_overwritten(
    run: Run, own_pair: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("…")
    run("build", "--target", own_pair, "-o", precious, "--overwrite").fails(2, "not a bundle")
    assert [path.name for path in precious.iterdir()] == ["chapter1.tex"]
    (tmp_path / "file").touch()
    run("build", "--target", own_pair, "-o", tmp_path / "file").fails(2, "file")
    run("build", "--target", own_pair, "-o", tmp_path / "file" / "b").fails(2, "is a file, not")
    run("build", "--target", own_pair, "-o", "/").fails(2, "already exists")


def test_a_broken_tokenizer_is_found_before_anything_is_built(
    build: Callable[..., Outcome], own_pair: Path
) -> None:
    (own_pair.parent / "target" / "tokenizer.json").write_text("{}")
    build().fails(1, "tokenizer.json", "not a readable tokenizer")


def test_an_end_token_outside_the_vocabulary(build: Callable[..., Outcome], own_pair: Path) -> None:
    path = own_pair.parent / "target" / "generation_config.json"
    path.write_text('{"eos_token_id": [1, 1000000]}')
    build().fails(1, "eos_token_id", "1000000", "vocabulary")


def test_a_context_whose_tables_would_be_absurd(
    build: Callable[..., Outcome], own_pair: Path
) -> None:
    for part in ("target", "draft"):
        _edit(own_pair.parent / part / "config.json", max_position_embeddings=2**30)
    build("--max-seq-len", 2**24).fails(2, "RoPE tables", "--max-seq-len")
