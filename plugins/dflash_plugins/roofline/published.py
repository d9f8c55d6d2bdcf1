"""What others have measured of attention, and how far off the formula is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.roofline.attention import AttentionWork, merge_work, split_work
from dflash_plugins.roofline.model import PredictedTime, attention_tile_seconds, predict
from dflash_plugins.roofline.rates import GpuRates, find_rates
from dflash_trt.core.yaml_files import parse_yaml

PUBLISHED_FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTime:
    """One measurement: the kernel's seconds on a GPU, and what was attended.

    `config` says where the kernel's configuration, which `work` has, is from.
    """

    name: str
    source: str
    config: str
    rates: GpuRates
    work: AttentionWork
    seconds: float

    @property
    def share(self) -> float:
        """Of the data sheet's bandwidth, for K and V read once."""
        return self.work.cache_bytes / self.seconds / self.rates.bandwidth

    @property
    def predicted(self) -> PredictedTime:
        work = self.work
        works = [split_work(work, self.rates)]
        if work.splits > 1:
            works.append(merge_work(work, self.rates))
        return predict(works, work.cache_bytes, self.rates)

    @property
    def predicted_share(self) -> float:
        return self.predicted.share(self.rates)

    @property
    def error(self) -> float:
        """Predicted less published share, in percentage points."""
        return 100 * (self.predicted_share - self.share)

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.name,
            "source": self.source,
            "gpu": self.rates.name,
            "batch": self.work.batch,
            "context": self.work.context,
            "seconds": self.seconds,
            "share": self.share,
            "predicted_seconds": self.predicted.seconds,
            "predicted_share": self.predicted_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedArithmetic:
    """Arithmetic of a whole long prompt, FLOP/s, which the tiles' phases bound.

    One program of an SM at a time. `by_hand` is what others reach whose phases overlap.
    """

    name: str
    source: str
    config: str
    by_hand_source: str
    rates: GpuRates
    rows: int
    positions: int
    head_dim: int
    flops: float
    by_hand: float

    @property
    def predicted(self) -> float:
        """FLOP/s where the phases of a tile are in a row."""
        tile = 4 * self.rows * self.positions * self.head_dim
        seconds = attention_tile_seconds(
            self.rates,
            rows=self.rows,
            positions=self.positions,
            head_dim=self.head_dim,
            is_converted=False,
        )
        return self.rates.sms * tile / seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.name,
            "source": self.source,
            "gpu": self.rates.name,
            "flops": self.flops,
            "predicted_flops": self.predicted,
            "flops_by_hand": self.by_hand,
        }


def published_times() -> list[PublishedTime]:
    """Decoding of published.yaml, in its order."""
    return [_read(one) for one in _published()["decode"]]


def published_arithmetic() -> list[PublishedArithmetic]:
    """Prompts of published.yaml, in its order."""
    return [
        PublishedArithmetic(
            **{key: one[key] for key in ("name", "source", "config", "by_hand_source")},
            **one["kernel"],
            rates=find_rates(one["gpu"]),
            flops=one["tflops"] * 1e12,
            by_hand=one["by_hand"] * 1e12,
        )
        for one in _published()["prompts"]
    ]


def _published() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = parse_yaml(
        PUBLISHED_FILE.read_text(encoding="utf-8"), PUBLISHED_FILE
    )
    return found


def _read(raw: dict[str, Any]) -> PublishedTime:
    other = {
        key: raw[name] * factor
        for name, key, factor in (
            ("sms", "sms", 1),
            ("bandwidth_tb", "bandwidth", 1e12),
            ("ghz", "clock", 1e9),
        )
        if name in raw
    }
    shape, kernel = raw["shape"], raw["kernel"]
    return PublishedTime(
        name=raw["name"],
        source=raw["source"],
        config=raw["config"],
        rates=find_rates(raw["gpu"], **other),
        work=AttentionWork(
            batch=shape["batch"],
            context=shape["context"],
            query_heads=shape["heads"],
            kv_heads=shape["kv_heads"],
            head_dim=shape["head_dim"],
            rows=shape.get("rows", 1),
            item_bytes=shape["bytes"],
            is_paged=shape.get("paged", False),
            tile_rows=kernel["rows"],
            tile_positions=kernel["positions"],
            buffers=kernel["buffers"],
            resident=kernel["resident"],
            splits=kernel["splits"],
        ),
        seconds=raw["us"] * 1e-6,
    )
