"""Public pairs as data, and pairs read from their config.json: shapes without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dflash_trt.checkpoints.sizes import DecoderSizes, ExpertSizes, LayerSizes
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.memory.shape import DraftShape, ModelShape

MODELS_FILE = Path(__file__).with_name("models.yaml")


@dataclass(frozen=True, slots=True)
class PublishedTau:
    """An acceptance length, of which workload, and who says so."""

    tau: float
    workload: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A target with its DFlash draft; τ of DFlash and of an EAGLE-3 drafter where known.

    `eagle3_tree` is what that drafter drafts: levels, rows of each, rows that are verified.
    """

    name: str
    target: ModelShape
    draft: DraftShape
    dflash: PublishedTau | None = None
    eagle3: PublishedTau | None = None
    eagle3_tree: tuple[int, int, int] = (7, 10, 60)


def pair_names() -> list[str]:
    """Names that `find_pair` knows."""
    return list(_read())


def find_pair(name: str) -> PairShape:
    """The public pair called `name`.

    Raises:
        DflashError: none is; names the nearest.
    """
    known = _read()
    if name not in known:
        raise DflashError(
            f"no shapes are known of {one_line(name, 60)!r}{nearest(name, list(known))}",
            where="--target",
            fix="pass --target-checkpoint and --draft-checkpoint folders with their config.json",
            usage=True,
        )
    return known[name]


@cache
def _read() -> dict[str, PairShape]:
    return {name: _pair(name, raw) for name, raw in read_yaml(MODELS_FILE).items()}


def _pair(name: str, raw: dict[str, Any]) -> PairShape:
    target = _model(raw["target"])
    draft = dict(raw["draft"])
    block_size, taps = draft.pop("block_size"), draft.pop("taps")
    draft |= {"vocab": target.vocab, "max_context": target.max_context}
    eagle3 = dict(raw["eagle3"])
    depth, width, verified = eagle3.pop("tree")
    return PairShape(
        name=name,
        target=target,
        draft=DraftShape(
            model=_model(draft),
            block_size=block_size,
            taps=taps,
            target_hidden=target.sizes.hidden_size,
        ),
        dflash=PublishedTau(**raw["dflash"]),
        eagle3=PublishedTau(**eagle3),
        eagle3_tree=(depth, width, verified),
    )


def _model(raw: dict[str, Any]) -> ModelShape:
    fields = dict(raw)
    heads, kv_heads, head_dim = map(fields.pop, ("heads", "kv_heads", "head_dim"))
    width = fields.pop("intermediate")
    windows = [window or None for window in fields.pop("windows", [0])]
    experts, per_token = fields.pop("experts", None), fields.pop("experts_per_token", None)
    return ModelShape(
        sizes=DecoderSizes(
            hidden_size=fields.pop("hidden"),
            intermediate_size=width,
            layers=tuple(
                LayerSizes(heads, kv_heads, head_dim, window)
                for window in islice(cycle(windows), fields.pop("layers"))
            ),
            experts=None if experts is None else ExpertSizes(experts, per_token, width),
        ),
        **fields,
    )
