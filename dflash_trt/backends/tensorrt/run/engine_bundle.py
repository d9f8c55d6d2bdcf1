"""What a manifest says about a bundle's engines, and whether an engine bears it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import TensorProto

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.backends.tensorrt.build.profiles import profiles
from dflash_trt.backends.tensorrt.run.device_caches import DeviceCaches
from dflash_trt.backends.tensorrt.run.device_pages import DevicePages
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import (
    ACCEPTED,
    BLOCK_IDS,
    CACHE_START,
    CANDIDATE_IDS,
    CANDIDATE_LOGITS,
    CANDIDATES,
    CHOICE_IDS,
    DRAFT_TOKEN_IDS,
    LOGIT_ROWS,
    LOGITS,
    NEW_START,
    NEW_TOKENS,
    NEXT_BLOCK_IDS,
    PAGE_TABLE,
    SAMPLING,
    TOKEN_IDS,
    GraphName,
)
from dflash_trt.graph.form import GraphForm
from dflash_trt.graph.tensors import CacheLayout, CacheShape
from dflash_trt.hardware.device import Device

DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT8E4M3FN: "FP8",
}


@dataclass(frozen=True, slots=True)
class EngineBundle:
    """Engine files by graph, and what they were built for.

    `limits` are the runtime's, `layout` the caches of both, whose slots hold `cache_length`
    positions, `form` that of the graphs that the engines were built from.
    """

    paths: Mapping[GraphName, Path]
    limits: ExecutorLimits
    layout: CacheLayout
    cache_length: int
    form: GraphForm

    @property
    def columns(self) -> int:
        """Columns of a page table, for the longest sequence; 0 where caches are linear."""
        pool = self.limits.page_pool
        return 0 if pool is None else pool.cover(self.cache_length)

    def allocate_caches(self, device: Device) -> DeviceCaches | DevicePages:
        """The caches of target and draft on `device`.

        Raises:
            DflashError: it has no room.
        """
        shapes, slots = self.layout.shapes(), self.limits.max_batch
        item_bytes, pool = self.form.cache_item_bytes, self.limits.page_pool
        if pool is None:
            return DeviceCaches(device, shapes, slots, self.cache_length, item_bytes)
        return DevicePages(device, shapes, slots, pool, columns=self.columns, item_bytes=item_bytes)

    def cache_shape(self, cache: CacheShape) -> list[int]:
        """A layer's K or V cache as a tensor of an engine: a range of slots, or a whole pool."""
        pool = self.limits.page_pool
        if pool is None:
            return [-1, cache.kv_heads, self.cache_length, cache.head_dim]
        return [pool.pages + 1, pool.page_size, cache.kv_heads, cache.head_dim]

    @property
    def candidates(self) -> int:
        """How many candidates a row has."""
        return min(CANDIDATES, self.limits.vocab_size)

    def tensors(self, graph: GraphName) -> dict[str, list[int]]:
        """Every input and output of a graph's engine, dynamic axes as -1."""
        tensors: dict[str, list[int]] = {CACHE_START: [-1]}
        if graph == "draft":
            tensors |= {BLOCK_IDS: [-1, -1], DRAFT_TOKEN_IDS: [-1, -1]}
        else:
            tensors |= {name: [-1, -1] for name in (TOKEN_IDS, LOGIT_ROWS, CHOICE_IDS)}
            tensors[LOGITS] = [-1, -1, self.limits.vocab_size]
            if self.limits.draws:
                tensors[SAMPLING] = [-1, 4]
            else:
                kept = [-1, -1, self.candidates]
                tensors |= {CANDIDATE_IDS: kept, CANDIDATE_LOGITS: kept}
        if graph == "target" and self.limits.draws:
            tensors |= {name: [-1] for name in (ACCEPTED, NEW_START)}
            tensors |= {name: [-1, -1] for name in (NEW_TOKENS, NEXT_BLOCK_IDS)}
        if self.columns:
            tensors[PAGE_TABLE] = [-1, self.columns]
        caches = self.layout.shapes()
        for name, updated in self.layout.graph_caches()[graph]:
            tensors[name] = tensors[updated] = self.cache_shape(caches[name])
        return tensors

    def check(self, graph: GraphName, native: Any) -> None:
        """Refuses an engine that is not what the manifest describes.

        Binding would write past its tensors; caches that are not updated in place would be lost.

        Raises:
            DflashError: names the first thing that differs.
        """
        tensors = self.tensors(graph)
        names = {str(native.get_tensor_name(index)) for index in range(native.num_io_tensors)}
        if names != tensors.keys():
            others = ", ".join(sorted(names ^ tensors.keys()))
            raise _unlike(graph, f"its tensors differ in {others}")
        for name, wanted in tensors.items():
            shape = list(native.get_tensor_shape(name))
            if shape != wanted:
                raise _unlike(graph, f"{name} has shape {shape}, the manifest says {wanted}")
        for name, updated in self.layout.graph_caches()[graph]:
            found, wanted_type = native.get_tensor_dtype(name).name, DTYPES[self.form.cache_type]
            if found != wanted_type:
                raise _unlike(graph, f"{name} is {found}, the manifest says {wanted_type}")
            if native.get_aliased_input_tensor(updated) != name:
                raise _unlike(graph, f"{name} is not updated in place")
        built, expected = native.num_optimization_profiles, len(profiles(graph, self.limits))
        if built != expected:
            raise _unlike(graph, f"it has {built} profiles, not {expected}")


def _unlike(graph: GraphName, what: str) -> DflashError:
    return DflashError(
        f"is not the engine that the manifest describes: {what}",
        where=f"{graph}.engine",
        fix="build the bundle again",
    )
