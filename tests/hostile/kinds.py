"""The kinds of hostile inputs: what is changed, how, and the commands that meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.cli.bigram import write_bigram_pair
from tests.hostile.files import (
    changed,
    damage_graph,
    damage_header,
    damage_tensors,
    encode,
    note,
    odd_value,
    spoil,
    spoil_json,
)
from tests.hostile.judge import Command, HostileCase

Damage = Callable[[Random, Path], None]
Make = Callable[[Random], HostileCase]

THREAD = ("--threads", "1")
PROMPT = ("--prompt", "cab", "--max-tokens", "4", *THREAD)
GENERATE: Command = ("generate", "bundle", *PROMPT)
BUILD: Command = ("build", "--target", "pair/pair.yaml", "-o", "out/b")
_BUILT: tuple[Command, ...] = (BUILD, ("generate", "out/b", *PROMPT))
_FIGURES = "--input-tokens 16 --output-tokens 16 --acceptance 3".split()
_FP8 = ("--precision", "fp8", "--calibration", "pair/prompts.jsonl")
_READERS: tuple[tuple[Command, ...], ...] = (
    *(_BUILT, _BUILT, _BUILT),
    (BUILD, ("generate", "out/b", "--temperature", "0.7", *PROMPT)),
    (("plan", "--target", "pair/pair.yaml", "--gpu", "b200", *_FIGURES),),
    (("quantize", "--checkpoint", "pair/target", "-o", "out/q", *_FP8),),
    ((*BUILD, *_FP8),),
    ((*BUILD[:-1], "out/d", "--executor", "trtllm", "--profile", "h100x1"),),
)
_VERIFY = ("verify", "bundle", "--repeats", "0", "--batch", "1", *PROMPT)
_OPENERS: tuple[Command, ...] = (
    *(GENERATE, GENERATE, ("inspect", "bundle"), _VERIFY),
    ("inspect", "bundle", "--verify", "--gpu", "b200"),
    ("package", "bundle", "-o", "out/r", *THREAD),
)


def write_base(folder: Path) -> None:
    """Writes the good files: pair/, and its bundle/."""
    from dflash_trt.cli.main import main

    config = write_bigram_pair(folder / "pair")
    assert main(["build", "--target", str(config), "-o", str(folder / "bundle")]) == 0


_ROPES = [
    {"rope_type": kind, "factor": factor, "rope_theta": 1e-300, "beta_fast": -1}
    for kind in ("llama3", "yarn", "longrope", "none")
    for factor in (8.0, 5e-324)
]
_CONFIG_ODD: tuple[tuple[str, Any], ...] = (
    *(("rope_scaling", one) for one in _ROPES),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 0]}),
    ("quantization_config", {"quant_method": "mxfp4", "modules_to_not_convert": ["(a+)+$"] * 50}),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 0}),
    *((key, 2**31) for key in ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim")),
    ("dflash_config", {"target_layer_ids": [-1, 3], "mask_token_id": 2**31}),
)
_CONFIG_KEYS = (
    *("layer_types", "sliding_window", "attention_bias", "hidden_act", "tie_word_embeddings"),
    *("eos_token_id", "num_experts", "num_experts_per_tok", "model_type", "block_size"),
    *("draft_vocab_size", "eagle_config", "markov_rank", "target_layer_ids"),
)
_PAIR_KEYS = ("max_batch", "max_seq_len", "block_size", "precision", "prompts", "profiles")
_TAGS = (
    *("!!python/object/apply:os.system [id]", "!!binary aGk=", "&a [*a]", "{<<: 3}", "*nobody"),
    *("0x" + "f" * 5000, "1_000:59:59", "~", ".nan", '"\\ud800"', "[" * 2000, "{a: " * 2000),
)
_SCHEDULE = {"schema_version": 1, "executor": "cpu", "blocks": [{"max_batch": 4, "block_size": 8}]}
_MANIFEST_KEYS = ("page_pool", "engines", "kv_dtype", "block_schedule", "executor", "files")


def damage_json(
    keys: tuple[str, ...] = (),
    odd: tuple[tuple[str, Any], ...] = (),
    absent: dict[str, Any] | None = None,
) -> Damage:
    """Changes values of a document, puts odd ones in, or spoils its text.

    `absent` is the document where there is none.
    """

    def damage(random: Random, path: Path) -> None:
        data = path.read_bytes() if path.exists() else encode(absent or {})
        way, document = random.random(), json.loads(data)
        if way < 0.2:
            path.write_bytes(spoil_json(random, data))
            return
        if odd and way < 0.6:
            key, value = random.choice(odd)
            document[key] = changed(random, value) if way < 0.4 else value
        else:
            document = changed(random, document, keys)
        path.write_bytes(encode(document))

    return damage


def _spoil(random: Random, path: Path) -> None:
    path.write_bytes(spoil(random, path.read_bytes()))


def _damage_yaml(random: Random, path: Path) -> None:
    data, way = path.read_bytes(), random.randrange(4)
    if way == 0:
        data = spoil(random, data)
    elif way == 1:
        data += f"{random.choice(_PAIR_KEYS)}: {random.choice(_TAGS)}\n".encode()
    else:
        document = yaml.safe_load(data) | {"profiles": {"own": {"gpu": "b200", "gpus": 2}}}
        text = yaml.dump(changed(random, document, _PAIR_KEYS), allow_unicode=True)
        data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(data)


def _damage_index(random: Random, path: Path) -> None:
    path.with_name("model.safetensors").rename(path.with_name("part-1.safetensors"))
    shard = random.choice(("part-1.safetensors",) * 3 + ("../draft/model.safetensors", "", "\0"))
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    path.write_bytes(encode(changed(random, index, ("weight_map",))))


def _damage_list(random: Random, path: Path) -> None:
    ids: list[Any] = sorted(random.sample(range(256), 24))
    odd = ([256], [2**31], [2**63], [-1], [1e3], [True], [ids], ids, [], [odd_value(random)])
    path.write_bytes(encode({"token_ids": ids + random.choice(odd)}))


def _of_files(
    needs: tuple[str, ...], files: dict[str, Damage], *commands: tuple[Command, ...]
) -> Make:
    """One of the files is changed, and one of the commands is given."""

    def make(random: Random) -> HostileCase:
        name, asked = random.choice(sorted(files)), random.choice(commands)
        return HostileCase(name, needs, lambda folder: files[name](random, folder / name), asked)

    return make


_SMALL = (
    *("draft.onnx", "target.onnx", "prompts.jsonl", "weights/tables.safetensors"),
    *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
    *(f"weights/{owner}/config.json" for owner in ("target", "draft")),
    *(f"weights/{owner}/shard-00000.safetensors" for owner in ("target", "draft")),
)


def _make_bundle(random: Random) -> HostileCase:
    """A file changed with the manifest's word, or without: then its text must be the right one."""
    name, way = random.choice(_SMALL), random.randrange(5)
    command = GENERATE if way == 3 else random.choice(_OPENERS)

    def damage(folder: Path) -> None:
        bundle = folder / "bundle"
        if way <= 1:
            damage_json(_MANIFEST_KEYS)(random, bundle / "manifest.json")
        elif way == 3:
            schedule = bundle / "block_schedule.json"
            damage_json(("measured", "bundle"), absent=_SCHEDULE)(random, schedule)
            note(bundle, schedule)
        else:
            _spoil(random, bundle / name)
            if way == 2:
                note(bundle, bundle / name)

    intact = way == 4 and command == GENERATE
    return HostileCase(f"{name}, way {way}", ("bundle",), damage, (command,), is_intact=intact)


def _make_graph(random: Random) -> HostileCase:
    name = f"{random.choice(('target', 'draft', 'target_only'))}.onnx"

    def damage(folder: Path) -> None:
        damage_graph(random, folder / "bundle" / name)
        note(folder / "bundle", folder / "bundle" / name)

    return HostileCase(name, ("bundle",), damage, (random.choice((GENERATE, _VERIFY)),))


_CONFIG = damage_json(_CONFIG_KEYS, _CONFIG_ODD)
_QUANTIZED = {"quantization": {"quant_algo": "NVFP4"}, "producer": {"name": "modelopt"}}
_GENERATION = {"eos_token_id": [256], "temperature": 0.6, "top_k": 20, "stop_strings": ["x"]}
_PAIR_FILES: dict[str, dict[str, Damage]] = {
    "headers": {
        "target/model.safetensors": damage_header,
        "draft/model.safetensors": damage_header,
    },
    "weights": {
        "target/model.safetensors": damage_tensors,
        "draft/model.safetensors": damage_tensors,
        "draft/draft_tokens.json": _damage_list,
    },
    "configs": {
        "target/config.json": _CONFIG,
        "draft/config.json": _CONFIG,
        "target/hf_quant_config.json": damage_json(absent=_QUANTIZED),
        "target/model.safetensors.index.json": _damage_index,
    },
    "pairs": {
        "pair.yaml": _damage_yaml,
        "target/generation_config.json": damage_json(absent=_GENERATION),
        "target/tokenizer_config.json": damage_json(),
    },
}
KINDS: dict[str, tuple[int, Make]] = {
    **{
        kind: (
            150,
            _of_files(("pair",), {f"pair/{path}": one for path, one in files.items()}, *_READERS),
        )
        for kind, files in _PAIR_FILES.items()
    },
    "bundles": (150, _make_bundle),
    "graphs": (100, _make_graph),
}
