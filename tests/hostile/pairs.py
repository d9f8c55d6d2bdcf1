"""YAML files that name a pair, and generation configurations."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import yaml

from tests.hostile.case import HostileCase, draw_readers
from tests.hostile.values import changed, encode, spoil, spoil_json

COUNT = 150
_KEYS = (
    *("max_batch", "max_seq_len", "block_size", "precision", "exclude", "prompts", "profiles"),
    *("kv_layout", "kv_dtype", "target", "draft", "description", "name"),
)
_PROFILE = {
    "gpu": "b200",
    "gpus": 2,
    "tensor_parallel": 2,
    "expert_parallel": 1,
    "precision": "fp8",
}
_TAGS = (
    "!!python/object/apply:os.system [id]",
    "!!python/name:os.system",
    "!!binary aGk=",
    "!!set {a, b}",
    "&a [*a]",
    "{<<: 3}",
    "2026-11-23",
    "0x" + "f" * 5000,
    "1_000:59:59",
    "~",
    ".nan",
    "-.inf",
    '"\\ud800"',
    '"\\x00"',
    "|\n  " + "y" * 5000,
    "[" * 2000,
    "{a: " * 2000,
    "*nobody",
)
_GENERATION = {
    "eos_token_id": [256],
    "bos_token_id": 1,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "max_length": 2048,
    "stop_strings": ["x"],
    "do_sample": True,
}


def make(random: Random, number: int) -> HostileCase:
    """A pair's YAML, or the target's generation_config.json, in turn."""

    def damage(folder: Path) -> None:
        if number % 2:
            path = folder / "pair/pair.yaml"
            path.write_bytes(_damaged_yaml(random, path.read_bytes()))
            return
        data = encode(changed(random, _GENERATION, ("eos_token_id", "suppress_tokens")))
        data = spoil_json(random, data) if random.random() < 0.3 else data
        (folder / "pair/target/generation_config.json").write_bytes(data)

    name = "pair.yaml" if number % 2 else "generation_config.json"
    return HostileCase(name, ("pair",), damage, draw_readers(random))


def _damaged_yaml(random: Random, data: bytes) -> bytes:
    way = random.randrange(5)
    if way == 0 and random.random() < 0.2:
        return data + b"".join(b"k%d: 1\n" % number for number in range(80_000))
    if way == 0:
        return spoil(random, data)
    if way == 1:
        return data + f"{random.choice(_KEYS)}: {random.choice(_TAGS)}\n".encode()
    document = yaml.safe_load(data)
    if way == 2:
        document["profiles"] = {"own": changed(random, _PROFILE, ("nodes", "max_batch"))}
    else:
        document = changed(random, document, _KEYS)
    if random.random() < 0.5:  # JSON is YAML, nearly
        return json.dumps(document).encode()
    return yaml.dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")
