"""The kinds of hostile inputs: what is changed, how, and the commands that meet it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.hostile.binary import damage_gguf, damage_graph, damage_header, damage_tensors, note
from tests.hostile.case import (
    BUILD,
    BUILT,
    OUTSIDE,
    PROMPT,
    THREAD,
    Command,
    HostileCase,
    draw_readers,
)
from tests.hostile.places import WAYS, spoil_place
from tests.hostile.programs import draw_template, draw_tokenizer
from tests.hostile.requests import (
    ASKED,
    damage_prompts,
    draw_prompt_commands,
    make_arguments,
    make_keys,
)
from tests.hostile.values import changed, encode, odd_value, spoil, spoil_json

Damage = Callable[[Random, Path], None]
"""Changes the file at a path."""
Make = Callable[[Random], HostileCase]

GENERATE: Command = ("generate", "bundle", *PROMPT)
_VERIFY = ("verify", "bundle", "--repeats", "0", "--batch", "1", *PROMPT)
_OPENERS: tuple[Command, ...] = (
    *(GENERATE, GENERATE, ("inspect", "bundle"), _VERIFY),
    ("inspect", "bundle", "--verify", "--gpu", "b200"),
    ("package", "bundle", "-o", "out/r", *THREAD),
)
_ROPES = [
    {"rope_type": kind, "factor": factor, "rope_theta": 1e-300, "beta_fast": -1}
    for kind in ("llama3", "yarn", "linear", "longrope", "none")
    for factor in (8.0, 5e-324)
]
_CONFIG_ODD: tuple[tuple[str, Any], ...] = (
    *(("rope_scaling", one) for one in _ROPES),
    ("rope_parameters", _ROPES[0]),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 0]}),
    ("quantization_config", {"quant_method": "mxfp4", "modules_to_not_convert": ["(a+)+$"] * 50}),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 0}),
    ("quantization_config", {"quant_method": "gptq", "bits": 10**30}),
    *((key, 2**31) for key in ("hidden_size", "num_hidden_layers", "vocab_size", "head_dim")),
    ("dflash_config", {"target_layer_ids": [-1, 3], "mask_token_id": 2**31}),
)
_CONFIG_KEYS = (
    *("layer_types", "sliding_window", "use_sliding_window", "attention_bias", "hidden_act"),
    *("tie_word_embeddings", "eos_token_id", "num_experts", "num_experts_per_tok", "model_type"),
    *("moe_intermediate_size", "num_local_experts", "block_size", "num_target_layers"),
    *(
        "draft_vocab_size",
        "eagle_config",
        "norm_before_residual",
        "markov_rank",
        "target_layer_ids",
    ),
)
_PAIR_KEYS = (
    *("max_batch", "max_seq_len", "block_size", "precision", "exclude", "prompts", "profiles"),
    *("kv_layout", "kv_dtype", "target", "draft", "description", "name"),
)
_TAGS = (
    *("!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a, b}", "&a [*a]"),
    *("{<<: 3}", "2026-11-23", "0x" + "f" * 5000, "1_000:59:59", "~", ".nan", "-.inf", "*nobody"),
    *('"\\ud800"', '"\\x00"', "|\n  " + "y" * 5000, "[" * 2000, "{a: " * 2000),
)
_GENERATION = {"eos_token_id": [256], "temperature": 0.6, "top_k": 20, "stop_strings": ["x"]}
_TOKENS = {"eos_token": "<end>", "bos_token": {"content": "<x>"}, "added_tokens_decoder": {"9": {}}}
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
        way = random.random()
        if way < 0.2:
            path.write_bytes(spoil_json(random, data))
            return
        document = json.loads(data)
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
        many = b"".join(b"k%d: 1\n" % number for number in range(80_000))
        data = data + many if random.random() < 0.2 else spoil(random, data)
    elif way == 1:
        data += f"{random.choice(_PAIR_KEYS)}: {random.choice(_TAGS)}\n".encode()
    else:
        document = yaml.safe_load(data) | {"profiles": {"own": {"gpu": "b200", "gpus": 2}}}
        text = yaml.dump(changed(random, document, _PAIR_KEYS), allow_unicode=True)
        data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(data)


def _damage_index(random: Random, path: Path) -> None:
    owner = path.parent
    (owner / "model.safetensors").rename(owner / "part-1.safetensors")
    shard = random.choice(("part-1.safetensors",) * 3 + ("../draft/model.safetensors", "", "\0"))
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    data = encode(changed(random, index, ("weight_map",)))
    path.write_bytes(spoil_json(random, data) if random.random() < 0.3 else data)


def _damage_list(random: Random, path: Path) -> None:
    ids: list[Any] = sorted(random.sample(range(256), 24))
    odd = ([256], [2**31], [2**63], [-1], [1e3], [True], [ids], ids, [], [odd_value(random)])
    ids = ids + random.choice(odd) if random.random() < 0.8 else list(range(400_000))
    data = encode({"token_ids": ids})
    path.write_bytes(spoil_json(random, data) if random.random() < 0.2 else data)


def _damage_template(random: Random, path: Path) -> None:
    text = draw_template(random)
    if random.random() < 0.5:
        path.with_name("chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        named = [{"name": "default", "template": text}, {"name": odd_value(random)}]
        template = named if random.random() < 0.5 else text
        path.write_bytes(encode({"eos_token": "<end>", "chat_template": template}))


def _damage_tokenizer(random: Random, path: Path) -> None:
    data = path.read_bytes()
    spoilt = draw_tokenizer(random, json.loads(data))
    path.write_bytes(spoil_json(random, data) if random.random() < 0.2 else encode(spoilt))


def _of_files(
    needs: tuple[str, ...],
    files: dict[str, Damage],
    commands: Callable[[Random], tuple[Command, ...]],
    *,
    drafters: bool = False,
) -> Make:
    """One of the files is changed; `drafters`: of a draft of another kind."""

    def make(random: Random) -> HostileCase:
        name = random.choice(sorted(files))
        asked, kind = commands(random), random.choice(("eagle", "dspark"))

        def damage(folder: Path) -> None:
            if drafters:
                shutil.rmtree(folder / "pair/draft")
                (folder / "drafters" / kind).rename(folder / "pair/draft")
            files[name](random, folder / name)

        # Whatever a draft proposes, the text is the target's.
        return HostileCase(name, needs, damage, asked, is_intact=drafters and asked == BUILT)

    return make


_SMALL = (
    *("draft.onnx", "target.onnx", "prompts.jsonl", "weights/tables.safetensors"),
    *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"),
    *(f"weights/{owner}/config.json" for owner in ("target", "draft")),
    *(f"weights/{owner}/model.safetensors.index.json" for owner in ("target", "draft")),
    *(f"weights/{owner}/shard-00000.safetensors" for owner in ("target", "draft")),
)


def _make_bundle(random: Random) -> HostileCase:
    """A file changed with the manifest's word, or without: then its text must be the right one."""
    name, way = random.choice(_SMALL), random.randrange(6)
    command = GENERATE if way == 3 else random.choice(_OPENERS)

    def damage(folder: Path) -> None:
        bundle = folder / "bundle"
        if way <= 1:
            damage_json(_MANIFEST_KEYS)(random, bundle / "manifest.json")
        elif way == 2:
            _spoil(random, bundle / name)
            note(bundle, bundle / name)
        elif way == 3:
            damage_json(("measured", "bundle"), absent=_SCHEDULE)(
                random, bundle / "block_schedule.json"
            )
            note(bundle, bundle / "block_schedule.json")
        elif way == 4:
            _spoil(random, bundle / name)
        else:
            other = random.choice([one for one in _SMALL if one != name])
            (bundle / name).rename(bundle / other)

    intact = way >= 4 and command == GENERATE
    return HostileCase(f"{name}, way {way}", ("bundle",), damage, (command,), is_intact=intact)


def _make_graph(random: Random) -> HostileCase:
    name = f"{random.choice(('target', 'draft', 'target_only'))}.onnx"

    def damage(folder: Path) -> None:
        path = folder / "bundle" / name
        damage_graph(random, path)
        note(folder / "bundle", path)

    return HostileCase(name, ("bundle",), damage, (random.choice((GENERATE, _VERIFY)),))


_NAMED: dict[str, tuple[Command, ...]] = {
    "pair/pair.yaml": BUILT,
    "m.gguf": (("import-gguf", "m.gguf", "-o", "out/hf"),),
    "prompts.txt": ((*ASKED, "--prompt-file", "prompts.txt"),),
    "prompts.jsonl": (("verify", "bundle", "--repeats", "0", "--prompts", "prompts.jsonl"),),
    "schedule.json": ((*ASKED, "--prompt", "cab", "--block-schedule", "schedule.json"),),
}
_OF_PAIR = (
    *(f"target/{name}.json" for name in ("config", "tokenizer", "tokenizer_config")),
    *("target/generation_config.json", "target/hf_quant_config.json", "target/LICENSE"),
    *("target/model.safetensors", "target/chat_template.jinja", "target", "prompts.jsonl"),
    *("target/model.safetensors.index.json", "draft/config.json", "draft/model.safetensors"),
    *("draft/draft_tokens.json", "draft"),
)


def _make_place(random: Random) -> HostileCase:
    """A file of a pair, of a bundle, or one named on the command line, is no regular file."""
    way, owner = random.choice(WAYS), random.randrange(5)
    if owner <= 1:
        path, commands = f"pair/{random.choice(_OF_PAIR)}", draw_readers(random)
    elif owner <= 3:
        names = (*_SMALL, "manifest.json", "tokenizer", "weights", "block_schedule.json")
        path, commands = f"bundle/{random.choice(names)}", (random.choice(_OPENERS),)
    else:
        path = random.choice(sorted(_NAMED))
        commands = _NAMED[path]
    about = f"{path} {way}"
    return HostileCase(
        about,
        ("pair", "bundle"),
        lambda folder: spoil_place(way, folder / path, folder.parent / OUTSIDE),
        commands,
    )


_CONFIG = damage_json(_CONFIG_KEYS, _CONFIG_ODD)
_QUANTIZED = {"quantization": _CONFIG_ODD[13][1], "producer": {"name": "modelopt"}}
_WEIGHTS = tuple(f"pair/{owner}/model.safetensors" for owner in ("target", "draft"))
_AFTER = (
    ("generate", "out/b", *PROMPT),
    ("generate", "out/b", "--temperature", "0.7", *PROMPT),
    ("verify", "out/b", *PROMPT, "--repeats", "0", "--batch", "1"),
)
_TEXTS_ASKED = ("cab", "a" * 2000 + "!", "aaaa 🙂 é\n\n" * 100, " " * 3000 + "x", "1" * 2000 + "Z")


def _draw_asked(random: Random) -> tuple[Command, ...]:
    text = ("--prompt", random.choice(_TEXTS_ASKED), "--max-tokens", "2", *THREAD)
    return (BUILD, ("generate", "out/b", *text))


KINDS: dict[str, tuple[int, Make]] = {
    "headers": (170, _of_files(("pair",), dict.fromkeys(_WEIGHTS, damage_header), draw_readers)),
    "configs": (
        260,
        _of_files(
            ("pair",),
            {
                "pair/target/config.json": _CONFIG,
                "pair/draft/config.json": _CONFIG,
                "pair/target/hf_quant_config.json": damage_json(absent=_QUANTIZED),
                "pair/target/model.safetensors.index.json": _damage_index,
            },
            draw_readers,
        ),
    ),
    "pairs": (
        150,
        _of_files(
            ("pair",),
            {
                "pair/pair.yaml": _damage_yaml,
                "pair/target/generation_config.json": damage_json(absent=_GENERATION),
            },
            draw_readers,
        ),
    ),
    "drafters": (
        150,
        _of_files(
            ("pair", "drafters"),
            {
                "pair/draft/config.json": _CONFIG,
                "pair/draft/model.safetensors": damage_tensors,
                "pair/draft/draft_tokens.json": _damage_list,
            },
            draw_readers,
            drafters=True,
        ),
    ),
    "weights": (
        100,
        _of_files(
            ("pair",),
            dict.fromkeys(_WEIGHTS, damage_tensors),
            lambda random: (BUILD, random.choice(_AFTER)),
        ),
    ),
    "tokenizers": (
        180,
        _of_files(
            ("pair",),
            {
                "pair/target/tokenizer.json": _damage_tokenizer,
                "pair/target/tokenizer_config.json": damage_json(absent=_TOKENS),
            },
            _draw_asked,
        ),
    ),
    "templates": (
        110,
        _of_files(("pair",), {"pair/target/tokenizer_config.json": _damage_template}, draw_readers),
    ),
    "bundles": (230, _make_bundle),
    "graphs": (130, _make_graph),
    "gguf": (
        170,
        _of_files(
            ("hf",),
            {"hf/m.gguf": damage_gguf},
            lambda _: (("import-gguf", "hf/m.gguf", "-o", "out/hf"),),
        ),
    ),
    "files": (240, _make_place),
    "prompts": (100, _of_files(("bundle",), {"p.jsonl": damage_prompts}, draw_prompt_commands)),
    "keys": (60, make_keys),
    "arguments": (220, make_arguments),
}


@dataclass(frozen=True, slots=True)
class Name:
    """By which a case is found again."""

    seed: int
    kind: str
    number: int


def make_case(name: Name) -> HostileCase:
    """The case of that name: always the same, and the same input."""
    _, make = KINDS[name.kind]
    return make(Random(f"{name.seed} {name.kind} {name.number}"))


def case_names(seed: int, share: float, kinds: Collection[str]) -> list[Name]:
    """All of these kinds; of a `share` below 1 a sample of each."""
    names: list[Name] = []
    for kind in kinds:
        count, _ = KINDS[kind]
        every = [Name(seed, kind, number) for number in range(count)]
        names += (
            every
            if share == 1
            else Random(f"{seed} {kind}").sample(every, max(1, round(count * share)))
        )
    return names
