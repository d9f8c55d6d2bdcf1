"""`block_attention` on a GPU: the points, the bytes that each must move, and PyTorch's rivals.

Drafts of public pairs (no mask) decode one block at several contexts and batches; all sequences of
a batch have the same context. Targets (causal) run prefill chunks. PyTorch allocates the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dflash_plugins.block_attention.cases import AttentionShape, draft_shape, make_cases
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import public_pairs
from dflash_plugins.testing.gpu import Call, TorchRunner, torch_type
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.errors import one_line

Tensors = dict[str, Any]
"""torch.Tensor by name."""

CONTEXTS = (1024, 8192, 32_768, 131_072)
BATCHES = (1, 8, 64)
CHUNK_ROWS, CHUNK_CONTEXTS = 512, (0, 8192, 130_560)
KV_SCALES = (0.5, 0.25)
RANDOM_ELEMENTS = 1 << 22
"""Random elements that are drawn once and repeated to fill a cache."""


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One measurement: `batch` sequences, each with `rows` query rows after `context` positions."""

    name: str
    shape: AttentionShape
    batch: int
    context: int
    rows: int

    @property
    def cases(self) -> list[Case]:
        return make_cases(self.name, self.shape, batch=self.batch, rows=self.rows)

    @property
    def is_chunk(self) -> bool:
        """Whether it is a prefill chunk: compute-bound, where a block is memory-bound."""
        return self.rows > self.shape.block_size

    @property
    def required_bytes(self) -> int:
        """Bytes of K and V at the visible positions and of q, read once, and of the result."""
        shape, held = self.shape, self.context + self.rows
        seen = min(held, shape.window + self.rows - 1) if shape.window else held
        kv = 2 * seen * shape.kv_heads * shape.cache.numpy.itemsize
        rows = 2 * self.rows * shape.query_heads * shape.compute.numpy.itemsize
        return self.batch * (kv + rows) * shape.head_dim

    @property
    def required_flops(self) -> int:
        """FLOPs of q k^T and of p v over each row's visible keys; a multiply-add counts as 2."""
        shape = self.shape
        seen = [self.context + self.rows] * self.rows
        if shape.is_causal:
            seen = [self.context + row + 1 for row in range(self.rows)]
        keys = sum(min(one, shape.window) if shape.window else one for one in seen)
        return 4 * self.batch * shape.query_heads * shape.head_dim * keys


def points() -> list[AttentionPoint]:
    """Every pair, type of cache, layout, context and batch; caches are just long enough."""
    found: list[AttentionPoint] = []
    drafts = {name: draft_shape(pair, 0) for name, pair in public_pairs().items()}
    targets = {name: replace(shape, is_causal=True) for name, shape in drafts.items()}
    window = max(public_pairs()["gpt-oss"].target.windows)
    targets["gpt-oss window"] = replace(targets["gpt-oss"], window=window)

    def add(name: str, shape: AttentionShape, batch: int, context: int, rows: int) -> None:
        length = -(-(context + rows) // PAGE_SIZE) * PAGE_SIZE
        found.append(AttentionPoint(name, replace(shape, length=length), batch, context, rows))

    for cache, page_size in product((DType.BFLOAT16, DType.FLOAT8), (None, PAGE_SIZE)):
        kind = f"{cache.kernel_name}{' paged' if page_size else ''}"
        for pair, plain in drafts.items():
            shape = replace(plain, cache=cache, page_size=page_size)
            for context, batch in product(CONTEXTS, BATCHES):
                name = f"{pair} {kind}, {batch} × {context} positions"
                add(name, shape, batch, context, shape.block_size)
        for target, plain in targets.items():
            shape = replace(plain, cache=cache, page_size=page_size)
            for context in CHUNK_CONTEXTS:
                name = f"{target} target {kind}, chunk of {CHUNK_ROWS} at {context}"
                add(name, shape, 1, context, CHUNK_ROWS)
    return found


def measure(
    torch: Any, point: AttentionPoint, runner: TorchRunner, device: str = "cuda"
) -> dict[str, Any]:
    """Seconds of the kernels at `point` with the fastest tactic, and of each rival.

    `error` is the largest difference between any tactic and any rival, over the rival's maximum.
    """
    tensors = make_tensors(torch, point, device)
    operation = point.cases[0].operation
    runs = [_prepare(point, runner, tensors, tactic) for tactic in range(operation.tactics)]
    tactic_seconds = [runner.seconds(attend) for attend, _ in runs]
    seconds = min(tactic_seconds)
    error = None
    rival_seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    rivals = alternatives(torch, point, tensors)
    for name, rival in rivals.items():
        try:
            expected = rival().float()
            for _, attended in runs:
                difference = (attended.float() - expected).abs().max()
                error = max(error or 0.0, float(difference / expected.abs().max()))
            rival_seconds[name] = runner.seconds(rival)
        except Exception as reason:  # a rival out of memory, or that does not compile
            failed[name] = one_line(reason)
    if point.is_chunk:
        flops = point.required_flops
        work = {"required_flops": flops, "flops_per_second": flops / seconds}
    else:
        size = point.required_bytes
        work = {"required_bytes": size, "bytes_per_second": size / seconds}
    return {
        "operation": "block_attention",
        "case": point.name,
        "batch": point.batch,
        "context": point.context,
        "rows": point.rows,
        "launches": len(point.cases),
        "seconds": seconds,
        "tactic_seconds": tactic_seconds,
        **work,
        "error": error,
        "rival_seconds": rival_seconds,
        "failed_rivals": failed,
    }


def _prepare(
    point: AttentionPoint, runner: TorchRunner, tensors: Tensors, tactic: int
) -> tuple[Call, Any]:
    """A function that launches the kernels of `point` with `tactic`, and the result's tensor."""
    steps: list[Call] = []
    known = dict(tensors)
    for case in point.cases:
        work, outputs = runner.prepare(case, known, min(tactic, case.operation.tactics - 1))
        steps.append(work)
        known |= outputs

    def attend() -> None:
        for step in steps:
            step()

    return attend, known["attended"]


def make_tensors(torch: Any, point: AttentionPoint, device: str) -> Tensors:
    """Random inputs of `point`, with pages in random order."""
    first = point.cases[0]
    shape, generator = point.shape, torch.Generator(device=device).manual_seed(0)
    chunk = torch.randn(RANDOM_ELEMENTS, generator=generator, device=device)
    tensors: Tensors = {}
    for name in ("q", "k_cache", "v_cache"):
        spec = first.inputs[name]
        tensors[name] = torch.empty(spec.shape, dtype=torch_type(torch, spec), device=device)
        flat, scale = tensors[name].view(-1), shape.head_dim**-0.5 if name == "q" else 1.0
        values = (chunk * scale).to(flat.dtype)
        for begin in range(0, flat.numel(), RANDOM_ELEMENTS):
            part = flat[begin : begin + RANDOM_ELEMENTS]
            part.copy_(values[: part.numel()])
        chunk = chunk.roll(1)
    held = point.context + point.rows
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


def alternatives(torch: Any, point: AttentionPoint, tensors: Mapping[str, Any]) -> dict[str, Call]:
    """PyTorch's ways to compute the same attention, by name; none reads paged caches.

    An FP8 cache is converted to q's type first. `concatenate` is the way of a drafter that keeps
    context and block in two tensors: it copies both into one before every call.
    """
    if point.shape.page_size is not None:
        return {}
    q, held = tensors["q"], point.context + point.rows
    scaled_dot_product = torch.nn.functional.scaled_dot_product_attention
    mask = _mask(torch, point, q.device) if point.shape.is_causal else None

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

    found = {
        "sdpa": lambda: scaled_dot_product(q, *kv(), attn_mask=mask, scale=1.0, enable_gqa=True)
    }
    return found if point.is_chunk else found | {"concatenate": concatenate}


def _mask(torch: Any, point: AttentionPoint, device: Any) -> Any:
    """The causal mask, with the window if any."""
    from torch.nn.attention.bias import causal_lower_right

    rows, held, window = point.rows, point.context + point.rows, point.shape.window
    if not window:
        return causal_lower_right(rows, held)
    row, key = (torch.arange(count, device=device) for count in (rows, held))
    position = row[:, None] + point.context
    return (key <= position) & (key > position - window)
