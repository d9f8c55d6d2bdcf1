"""Build configurations: every mistake in a YAML file is one line with the key and a way out.

More files that are refused stand in tests/frozen/broken_files.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.building.named_pair import find_config
from dflash_trt.building.spec import Checkpoints
from dflash_trt.models.build_config import load_config, target_names
from tests.cli.conftest import refusal_of
from tests.frozen.broken_files import PAIR, YAML


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (PAIR + "max_sequence: 4\n", ["unknown key 'max_sequence'", "nearest: 'max_seq_len'"]),
        (PAIR + "zzz: 4\n", ["unknown key 'zzz'", "known: description"]),
        (
            PAIR + "shape: {target: {layrs: 3}}\n",
            ["errors: unknown key 'shape.target.layrs' (nearest: ", " more: ", "shape.draft, "],
        ),
        (
            PAIR.replace("checkpoint: t", "checkpont: t") + "max_batch: 0\nblock_size: 1\n",
            [
                "4 errors: ",
                "'target.checkpont'",
                "max_batch: ",
                "block_size: ",
                "draft.checkpoint: ",
            ],
        ),
        (
            "taget: t\ndraft: d\nprompts: p.jsonl\nmax_batch: 0\nexclude: [x]\n",
            ["5 errors: unknown key 'taget'", "max_batch: ", "exclude", "(nearest: 'target')"]
            + ["draft.checkpoint: there is no such", "prompts: there is no such file"],
        ),
        (PAIR + 'max_batch: "4"\n', ["max_batch", "integer", "got '4'"]),
        (PAIR + "max_batch: 4\nmax_batch: 8\n", ["'max_batch' is given twice"]),
        (PAIR + "precision: int4\n", ["precision", "'fp8'", "got 'int4'"]),
        (PAIR + 'profiles: {"/../../x": {gpu: b200}}\n', ["profiles", "got '/../../x'"]),
        (YAML["a bomb of aliases"], ["aliases"]),
        (YAML["nothing"], ["must be a YAML mapping"]),
        (YAML["too much"], ["is larger than 1 MiB"]),
    ],
)
def test_mistakes(tmp_path: Path, text: str, pieces: list[str]) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    message = refusal_of(find_config, str(path), Checkpoints())
    for piece in [str(path), *pieces]:
        assert piece in message


@pytest.mark.parametrize("name", ["qwen3-8", "", "../demo", "demo.json", "a\nb", "x" * 10_000])
def test_unknown_names(name: str) -> None:
    message = refusal_of(find_config, name, Checkpoints())
    assert "no target is called" in message and "dflash-trt targets" in message
    if name == "qwen3-8":
        assert "(nearest: 'qwen3-8b')" in message


def test_every_shipped_config_is_valid() -> None:
    assert "demo" in target_names()
    for name in target_names():
        config, path = load_config(name)
        assert path.stem == name
        assert config.verified
