"""EAGLE-3 heads, DSpark drafts, and the lists of the tokens that a draft chooses among."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.checkpoints.conftest import draft_shapes, layer_shapes, merged, write_checkpoint
from tests.cli.bigram import BIGRAM_DRAFT, HIDDEN, MASK, TAPS, VOCAB
from tests.hostile.case import BUILT, HostileCase, draw_readers
from tests.hostile.headers import damaged
from tests.hostile.values import NUMBERS, changed, encode, odd_value, spoil_json
from tests.hostile.weights import damage_tensors

COUNT = 150
_CHOICES, _RANK = 24, 6
_SIZES = {key: one for key, one in BIGRAM_DRAFT.items() if key != "dflash_config"}
_EAGLE = merged(
    {key: one for key, one in _SIZES.items() if key != "block_size"},
    {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _CHOICES,
    },
)
_DSPARK = merged(
    _SIZES,
    {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 2, 3],
        "enable_confidence_head": True,
        "markov_rank": _RANK,
        "markov_head_type": "vanilla",
    },
)
_EAGLE_KEYS = (
    *("draft_vocab_size", "vocab_size", "eagle_config", "target_hidden_size", "norm_output"),
    *("norm_before_residual", "eagle_aux_hidden_state_layer_ids", "transformer_layer_config"),
    *("fc_norm", "parallel_draft", "quantization_config", "num_hidden_layers", "rope_scaling"),
)
_DSPARK_KEYS = (
    *("markov_rank", "markov_head_type", "block_size", "mask_token_id", "target_layer_ids"),
    *("enable_confidence_head", "confidence_head_with_markov", "gru_hidden_dim", "vocab_size"),
)
_EDGES = (2**63 - 1, -(2**63), VOCAB, VOCAB - 1, -1, -VOCAB, 2**31, 0)


def write_drafters(folder: Path, target: Path) -> None:
    """Writes eagle/ and dspark/, good drafts for the bigram target."""
    wide = {
        name: [shape[0], 2 * HIDDEN]
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        else shape
        for name, shape in layer_shapes(_EAGLE, "", qk_norm=False).items()
    }
    wide |= {"layers.0.hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    wide |= {"fc.weight": [HIDDEN, TAPS * HIDDEN], "lm_head.weight": [_CHOICES, HIDDEN]}
    write_checkpoint(folder / "eagle", _EAGLE, wide)
    spread = np.arange(_CHOICES, dtype=np.int64)
    known = np.isin(np.arange(VOCAB), 2 * spread)
    _add(folder / "eagle", {"d2t": spread, "t2d": known})
    heads = {f"markov_head.markov_w{one}.weight": [VOCAB, _RANK] for one in (1, 2)}
    heads |= {"confidence_head.proj.weight": [1, HIDDEN + _RANK], "confidence_head.proj.bias": [1]}
    write_checkpoint(folder / "dspark", _DSPARK, draft_shapes(_DSPARK, TAPS) | heads)
    owned = load_file(target / "model.safetensors")
    copies = {
        "embed_tokens": owned["model.embed_tokens.weight"],
        "lm_head": owned["lm_head.weight"],
    }
    _add(folder / "dspark", {f"{role}.weight": matrix for role, matrix in copies.items()})


def make(random: Random, number: int) -> HostileCase:
    """A draft of one of the kinds, changed; whatever it drafts, the text is the target's."""
    kind = ("eagle", "dspark", "tokens")[number % 3]
    commands = draw_readers(random)

    def damage(folder: Path) -> None:
        draft = folder / "pair" / "draft"
        if kind != "tokens" or random.random() < 0.1:
            shutil.rmtree(draft)
            (folder / "drafters" / ("dspark" if kind == "tokens" else kind)).rename(draft)
        _DAMAGES[kind](random, draft)

    intact = commands == BUILT
    return HostileCase(kind, ("pair", "drafters"), damage, commands, is_intact=intact)


def _damage_eagle(random: Random, draft: Path) -> None:
    way = random.randrange(6)
    if way <= 1:
        _add(draft, {"d2t": _tokens(random)})
    elif way == 2:
        _resize(random, draft, "lm_head.weight", "fc.weight", "d2t")
    else:
        _damage_any(random, draft, _EAGLE_KEYS)


def _tokens(random: Random) -> npt.NDArray[Any]:
    """Offsets from a token of the head to one of the target: outside, twice, or none at all."""
    d2t = np.arange(_CHOICES, dtype=np.int64)
    way = random.randrange(6)
    if way == 0:
        d2t[random.randrange(_CHOICES)] = random.choice(_EDGES)
    elif way == 1:
        d2t[:] = random.choice(_EDGES)
    elif way == 2:
        d2t = np.frombuffer(random.randbytes(8 * _CHOICES), np.int64)
    elif way == 3:
        d2t[random.randrange(1, _CHOICES)] -= random.choice((1, 2))
    elif way == 4:
        d2t = d2t.astype(random.choice((np.int32, np.float32, np.bool_, np.uint64, np.int8)))
    else:
        d2t = random.choice((d2t[:-1], np.tile(d2t, 2), d2t[:, None], d2t[:0], d2t[0]))
    return d2t


def _damage_dspark(random: Random, draft: Path) -> None:
    way = random.randrange(6)
    if way == 0:  # the rank that the config tells is another, or the head's matrices disagree
        config = json.loads((draft / "config.json").read_bytes())
        config["markov_rank"] = random.choice((0, 1, _RANK - 1, _RANK + 1, 1 << 14, *NUMBERS))
        (draft / "config.json").write_bytes(encode(config))
    elif way == 1:
        _resize(random, draft, "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    elif way == 2:
        name = random.choice(("embed_tokens.weight", "lm_head.weight"))
        matrix = np.ascontiguousarray(load_file(draft / "model.safetensors")[name][::-1])
        _add(draft, {name: random.choice((matrix, matrix[:9], matrix.astype(np.float16)))})
    else:
        _damage_any(random, draft, _DSPARK_KEYS)


def _damage_any(random: Random, draft: Path, keys: tuple[str, ...]) -> None:
    config, weights = draft / "config.json", draft / "model.safetensors"
    way = random.randrange(5)
    if way <= 1:
        config.write_bytes(encode(changed(random, json.loads(config.read_bytes()), keys)))
    elif way == 2:
        config.write_bytes(spoil_json(random, config.read_bytes()))
    elif way == 3:
        weights.write_bytes(damaged(random, weights.read_bytes()))
    else:
        damage_tensors(random, weights)


def _resize(random: Random, draft: Path, *names: str) -> None:
    """Gives a tensor other rows or columns, all of them zeros."""
    name = random.choice(names)
    old = load_file(draft / "model.safetensors")[name]
    shape = [random.choice((0, 1, size - 1, size + 1, 2 * size)) for size in old.shape]
    _add(draft, {name: np.zeros(shape, old.dtype)})


def _damage_list(random: Random, draft: Path) -> None:
    ids: list[Any] = sorted(random.sample(range(VOCAB), random.choice((1, 24, 299))))
    way = random.randrange(6)
    if way == 0:
        ids[random.randrange(len(ids))] = odd_value(random)
    elif way == 1:
        ids = random.choice((ids[::-1], ids * 2, [], [ids], [*ids, ids[-1]], [True, 5, 9]))
    elif way == 2:
        ids += random.choice(([VOCAB], [VOCAB - 1, 2**31 - 1], [2**31], [2**63], [1e3], [-1]))
    elif way == 3:
        ids = list(range(random.choice((VOCAB, VOCAB + 1, 70_000, 400_000))))
    document: Any = {"token_ids": ids}
    if way == 4:
        document = changed(random, document, ("token_ids", "x"))
    data = encode(document)
    data = spoil_json(random, data) if way == 5 else data
    (draft / "draft_tokens.json").write_bytes(data)


_DAMAGES: dict[str, Callable[[Random, Path], None]] = {
    "eagle": _damage_eagle,
    "dspark": _damage_dspark,
    "tokens": _damage_list,
}


def _add(draft: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Puts tensors into a draft's file, in place of those of the same names."""
    path = draft / "model.safetensors"
    kept = {**load_file(path), **tensors}
    save_file({name: np.ascontiguousarray(one) for name, one in kept.items()}, path)
