"""`block_attention` on a GPU: what is measured, the bytes that it must move, and its rivals.

The draft's attention (no mask) of public pairs, over contexts and batches of one length each.
PyTorch gives the memory and the rivals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_plugins.block_attention.cases import AttentionShape, make_cases
from dflash_plugins.operation import DType
from dflash_plugins.testing.gpu import TorchRunner, Work, torch_type
from dflash_trt.errors import one_line

Tensors = dict[str, Any]
"""By name, torch.Tensor."""

CONTEXTS = (1024, 8192, 32_768, 131_072)
BATCHES = (1, 8, 64)
PAGE_SIZE = 32
PAIRS = {
    "qwen3-8b": AttentionShape(32, 8, 128, 0, block_size=16),
    "gpt-oss": AttentionShape(64, 8, 64, 0, block_size=8),
}
KV_SCALES = (0.5, 0.25)
CHUNK = 1 << 22
"""Random elements that fill a cache over and over: more than any processor keeps beside it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: `batch` sequences that hold `context` positions before their block."""

    name: str
    shape: AttentionShape
    batch: int
    context: int

    @property
    def required_bytes(self) -> int:
        """K and V of the positions held, read once; q, read once; attended, written once."""
        shape, held = self.shape, self.context + self.shape.block_size
        kv = 2 * held * shape.kv_heads * shape.cache.numpy.itemsize
        rows = 2 * shape.block_size * shape.query_heads * shape.compute.numpy.itemsize
        return self.batch * (kv + rows) * shape.head_dim

    @property
    def allocated_bytes(self) -> int:
        """All inputs and outputs, what the split leaves for its merge included."""
        cases = make_cases(self.name, self.shape, batch=self.batch)
        specs = dict(cases[0].inputs)
        for case in cases:
            specs |= case.operation.output_specs(case.inputs)
        return sum(math.prod(one.shape) * one.dtype.numpy.itemsize for one in specs.values())


def points() -> list[Point]:
    """Every pair, type of cache, layout, context and batch; caches as long as they must be."""
    found = []
    for pair, shape in PAIRS.items():
        for cache in (DType.BFLOAT16, DType.FLOAT8):
            for page_size in (None, PAGE_SIZE):
                for context in CONTEXTS:
                    length = -(-(context + shape.block_size) // PAGE_SIZE) * PAGE_SIZE
                    sized = replace(shape, cache=cache, page_size=page_size, length=length)
                    kind = f"{pair} {cache.kernel_name}{' paged' if page_size else ''}"
                    found += [
                        Point(f"{kind}, {batch} × {context} positions", sized, batch, context)
                        for batch in BATCHES
                    ]
    return found


def measure(torch: Any, point: Point, runner: TorchRunner, device: str = "cuda") -> dict[str, Any]:
    """The kernels' time at `point` and their rivals', which compute the same.

    `error` is the largest difference from a rival, relative to the largest value.
    """
    tensors = make_tensors(torch, point, device)
    steps: list[Work] = []
    known = dict(tensors)
    for case in make_cases(point.name, point.shape, batch=point.batch):
        work, outputs = runner.prepare(case, known)
        steps.append(work)
        known |= outputs

    def attend() -> None:
        for step in steps:
            step()

    seconds = runner.seconds(attend)
    error = None
    rival_seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, rival in alternatives(torch, point, tensors).items():
        try:
            expected = rival().float()
            difference = (known["attended"].float() - expected).abs().max()
            error = max(error or 0.0, float(difference / expected.abs().max()))
            rival_seconds[name] = runner.seconds(rival)
        except RuntimeError as reason:  # a rival out of memory, or that does not compile
            failed[name] = one_line(reason)
    return {
        "operation": "block_attention",
        "case": point.name,
        "batch": point.batch,
        "context": point.context,
        "launches": len(steps),
        "seconds": seconds,
        "required_bytes": point.required_bytes,
        "bytes_per_second": point.required_bytes / seconds,
        "error": error,
        "rival_seconds": rival_seconds,
        "failed_rivals": failed,
    }


def make_tensors(torch: Any, point: Point, device: str) -> Tensors:
    """Random inputs of `point`, every page somewhere else."""
    (first, *_) = make_cases(point.name, point.shape, batch=point.batch)
    shape, generator = point.shape, torch.Generator(device=device).manual_seed(0)
    chunk = torch.randn(CHUNK, generator=generator, device=device)
    tensors: Tensors = {}
    for name in ("q", "k_cache", "v_cache"):
        spec = first.inputs[name]
        tensors[name] = torch.empty(spec.shape, dtype=torch_type(torch, spec), device=device)
        flat, scale = tensors[name].view(-1), shape.head_dim**-0.5 if name == "q" else 1.0
        values = (chunk * scale).to(flat.dtype)
        for begin in range(0, flat.numel(), CHUNK):
            part = flat[begin : begin + CHUNK]
            part.copy_(values[: part.numel()])
        chunk = chunk.roll(1)
    held = point.context + shape.block_size
    tensors["key_value_lengths"] = torch.full(
        (point.batch,), held, dtype=torch.int32, device=device
    )
    tensors["sinks"] = torch.full((shape.query_heads,), -math.inf, device=device)
    if "page_table" in first.inputs:
        table = first.inputs["page_table"].shape
        order = torch.randperm(math.prod(table), generator=generator, device=device)
        tensors["page_table"] = order.view(table).to(torch.int32)
    if "kv_scales" in first.inputs:
        tensors["kv_scales"] = torch.tensor(KV_SCALES, device=device)
    return tensors


def alternatives(torch: Any, point: Point, tensors: Mapping[str, Any]) -> dict[str, Work]:
    """The same attention by other means, by name; none for paged caches, which they cannot read.

    An FP8 cache is widened first. `concatenate` is what a drafter does that keeps its context and
    its block apart: it copies both into one.
    """
    if point.shape.page_size is not None:
        return {}
    from torch.nn.attention.flex_attention import flex_attention

    q, held = tensors["q"], point.context + point.shape.block_size
    scaled_dot_product = torch.nn.functional.scaled_dot_product_attention
    flex = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention

    def cache(name: str, scale: float) -> Any:
        rows = tensors[name][:, :, :held]
        return rows if rows.dtype == q.dtype else rows.to(q.dtype) * scale

    def kv() -> tuple[Any, Any]:
        return cache("k_cache", KV_SCALES[0]), cache("v_cache", KV_SCALES[1])

    def concatenate() -> Any:
        both = (
            torch.cat([one[:, :, : point.context], one[:, :, point.context :]], 2) for one in kv()
        )
        return scaled_dot_product(q, *both, scale=1.0, enable_gqa=True)

    return {
        "sdpa": lambda: scaled_dot_product(q, *kv(), scale=1.0, enable_gqa=True),
        "flex_attention": lambda: flex(q, *kv(), scale=1.0, enable_gqa=True),
        "concatenate": concatenate,
    }
