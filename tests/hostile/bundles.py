"""Bundles whose files are not the ones that were built, with the manifest's word or without."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

from tests.hostile.case import PROMPT, THREAD, Command, HostileCase
from tests.hostile.values import NUMBERS, TEXTS, changed, encode, odd_value, spoil, spoil_json

COUNT = 230
GENERATE: Command = ("generate", "bundle", *PROMPT)
COMMANDS: tuple[Command, ...] = (
    GENERATE,
    GENERATE,
    ("inspect", "bundle"),
    ("inspect", "bundle", "--verify", "--gpu", "b200"),
    ("verify", "bundle", "--repeats", "0", "--batch", "1", *PROMPT),
    ("package", "bundle", "-o", "out/r", *THREAD),
)
_SMALL = (
    *("draft.onnx", "target.onnx", "prompts.jsonl", "weights/tables.safetensors"),
    *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
    *("weights/target/config.json", "weights/draft/config.json"),
    *(f"weights/{owner}/model.safetensors.index.json" for owner in ("target", "draft")),
)
_SHARDS = tuple(f"weights/{owner}/shard-00000.safetensors" for owner in ("target", "draft"))
_MANIFEST_KEYS = (
    "page_pool",
    "engines",
    "kv_dtype",
    "block_schedule",
    "executor",
    "schema_version",
)
_SCHEDULE = {
    "schema_version": 1,
    "executor": "cpu",
    "blocks": [{"max_batch": 4, "block_size": 8}],
}


def make(random: Random, number: int) -> HostileCase:
    """One of eight ways; a text that comes from what was changed unsaid must be the right one."""
    way, command = random.randrange(10), random.choice(COMMANDS)
    unsaid = way in (4, 5)  # the manifest still has the hash of what was built
    if way == 9:
        command = GENERATE

    def damage(folder: Path) -> None:
        _damage(random, folder / "bundle", way)

    intact = unsaid and command == GENERATE
    return HostileCase(f"bundle, way {way}", ("bundle",), damage, (command,), is_intact=intact)


def _damage(random: Random, bundle: Path, way: int) -> None:
    manifest = bundle / "manifest.json"
    if way <= 2:
        document = json.loads(manifest.read_bytes())
        manifest.write_bytes(encode(changed(random, document, _MANIFEST_KEYS)))
    elif way == 3:
        manifest.write_bytes(spoil_json(random, manifest.read_bytes()))
    elif way == 4:
        path = bundle / random.choice(_SMALL)
        path.write_bytes(spoil(random, path.read_bytes()))
    elif way == 5:
        _move(random, bundle)
    elif way == 6:
        path = bundle / random.choice(_SMALL)
        path.write_bytes(spoil(random, path.read_bytes()))
        note(bundle, path)
    elif way == 7:
        path = bundle / random.choice(_SHARDS)
        path.write_bytes(spoil(random, path.read_bytes()))
        if random.random() < 0.5:
            note(bundle, path)
    elif way == 8:
        _change_entry(random, manifest)
    else:
        schedule = encode(changed(random, _SCHEDULE, ("measured", "bundle")))
        schedule = spoil_json(random, schedule) if random.random() < 0.2 else schedule
        path = bundle / "block_schedule.json"
        path.write_bytes(schedule)
        note(bundle, path)


def note(bundle: Path, path: Path) -> None:
    """Gives the manifest the size and hashes that a file of the bundle has now."""
    manifest = bundle / "manifest.json"
    document = json.loads(manifest.read_bytes())
    name, data = str(path.relative_to(bundle)), path.read_bytes()
    entry: dict[str, Any] = {"path": name, "bytes": len(data), "header_sha256": None}
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    if name.endswith(".safetensors") and "shard" in name:
        header = data[: 8 + int.from_bytes(data[:8], "little") % (1 << 30)]
        entry |= {"header_sha256": hashlib.sha256(header).hexdigest(), "sha256": None}
    others = [one for one in document["files"] if one["path"] != name]
    document["files"] = sorted([*others, entry], key=lambda one: str(one["path"]))
    manifest.write_text(json.dumps(document))


def _move(random: Random, bundle: Path) -> None:
    first, second = (bundle / name for name in random.sample((*_SMALL, *_SHARDS), 2))
    way = random.randrange(5)
    if way == 0:
        first.unlink()
    elif way == 1:
        first.rename(second)
    elif way == 2:
        shutil.copy(first, bundle / "third")
        first.unlink()
        os.link(second, first)
    elif way == 3:
        (bundle / "target.onnx").rename(bundle / "kept")
        shutil.copy(bundle / "target_only.onnx", bundle / "target.onnx")
    else:
        os.truncate(first, random.choice((0, first.stat().st_size + 1, first.stat().st_size - 1)))


def _change_entry(random: Random, manifest: Path) -> None:
    document = json.loads(manifest.read_bytes())
    entry = random.choice(document["files"])
    key = random.choice(sorted(entry))
    paths = ("../outside", "/etc/passwd", ".", "weights", "a\0b", "a/../target.onnx", *TEXTS[:8])
    values = {"path": (*paths, entry["path"].upper()), "bytes": NUMBERS}
    entry[key] = random.choice(
        (*values.get(key, (None, "", "0" * 64, "g" * 64)), odd_value(random))
    )
    if random.random() < 0.2:
        document["files"].append(dict(entry))
    manifest.write_bytes(encode(document))
