"""The check of `block_attention` on a GPU: bfloat16 products and FP8 caches included, and times.

The interpreter cannot show those. Drafts of public pairs (no mask) decode one block at several
contexts and batches; all sequences of a batch have the same context. Targets (causal) run prefill
chunks. PyTorch allocates the tensors that are timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dflash_plugins.block_attention.attention_inputs import attend, expect, make_inputs
from dflash_plugins.block_attention.cases import AttentionShape, draft_shape, make_cases
from dflash_plugins.block_attention.launch import FLOOR, TACTICS
from dflash_plugins.block_attention.reference import TENSOR_CORES, error_bound
from dflash_plugins.operation import Case, DType
from dflash_plugins.public import public_pairs
from dflash_plugins.testing.gpu import Call, TorchRunner, torch_type
from dflash_plugins.testing.guarded import Run
from dflash_plugins.testing.numeric import Accuracy, Array, attempt, judge, spread
from dflash_trt.core.limits import PAGE_SIZE
from dflash_trt.errors import one_line
from dflash_trt.hardware.kernels import ONE_LAUNCH, RUN

LONG = 2 * ONE_LAUNCH
"""Positions of most caches: every split has a run."""

TacticRun = Callable[..., Mapping[str, Array]]
"""A `Run` that also takes the keyword `tactic`."""


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    """One call: sequences of `lengths` positions with `rows` query rows each (None: block_size)."""

    name: str
    shape: AttentionShape
    lengths: tuple[int, ...]
    rows: int | None = None
    has_sinks: bool = False
    tactic: int = 0


def accuracy_cases() -> list[AccuracyCase]:
    """Each head size and form, at lengths where tiles, splits and pages end; each tactic."""
    heads = {
        "heads of 64": AttentionShape(16, 2, 64, LONG),
        "heads of 128": AttentionShape(8, 2, 128, LONG, block_size=16),
        "heads of 256": AttentionShape(8, 2, 256, LONG, block_size=16),
        "heads of 512": AttentionShape(8, 1, 512, LONG, block_size=16),
    }
    lengths = (16, 64, 65, RUN, RUN + 1, 1500, LONG)
    found = []
    for name, shape in heads.items():
        forms = {
            "draft": shape,
            "verify": replace(shape, is_causal=True),
            "window": replace(shape, window=100),
            "long window": replace(shape, window=ONE_LAUNCH + 100),
            "paged": replace(shape, page_size=32, is_causal=True),
            "window paged": replace(shape, page_size=24, window=5),
        }
        for form, one in forms.items():
            for compute in (DType.BFLOAT16, DType.FLOAT16):
                for cache in (compute, DType.FLOAT8):
                    typed = replace(one, compute=compute, cache=cache)
                    title = f"{name}, {form}, {compute.kernel_name}, {cache.kernel_name} cache"
                    has_sinks = form in ("verify", "window")
                    found.append(AccuracyCase(title, typed, lengths, has_sinks=has_sinks))
        floor = replace(shape, is_causal=True)
        found.append(AccuracyCase(f"{name}, tactic {FLOOR}", floor, lengths, tactic=FLOOR))
    verify = replace(heads["heads of 128"], is_causal=True)
    large = replace(verify, kv_heads=1)
    found += [
        AccuracyCase(f"groups of 8, tactic {tactic}", large, lengths, tactic=tactic)
        for tactic in TACTICS
    ]
    one_row = replace(verify, block_size=8)
    found.append(AccuracyCase("one row", one_row, (1, 64, 1500), 1))
    far = replace(verify, length=2 * LONG + RUN)
    found.append(AccuracyCase("splits of several runs", far, (far.length, far.length - 100)))
    return found + chunk_cases()


def chunk_cases() -> list[AccuracyCase]:
    """A target's prefill chunks with each tactic: several splits, one split, and one launch."""
    targets = {
        "heads of 64": AttentionShape(16, 2, 64, LONG, is_causal=True, page_size=32),
        "heads of 128": AttentionShape(
            8, 2, 128, LONG, block_size=16, is_causal=True, page_size=32
        ),
        "window": AttentionShape(16, 2, 64, LONG, is_causal=True, window=128, page_size=32),
    }
    return [
        AccuracyCase(
            f"{name}, {cache.kernel_name} cache, chunk of {rows}, tactic {tactic}",
            replace(shape, cache=cache),
            (rows, rows + 700),
            rows,
            has_sinks=True,
            tactic=tactic,
        )
        for name, shape in targets.items()
        for cache in (DType.BFLOAT16, DType.FLOAT8)
        for rows in (17, 100, 512)
        for tactic in TACTICS
    ]


def check_accuracy(run: TacticRun) -> Iterator[Accuracy]:
    """`check_bits`, then every case against float64."""
    yield from attempt("block_attention, bits", partial(check_bits, run))
    for case in spread(accuracy_cases()):
        yield from attempt(f"block_attention, {case.name}", partial(check_case, run, case))


def check_case(run: TacticRun, case: AccuracyCase) -> Accuracy:
    """One case against float64; whatever a kernel must not read is NaN."""
    run = partial(run, tactic=case.tactic) if case.tactic else run
    inputs = make_inputs(case.shape, case.lengths, case.rows, has_sinks=case.has_sinks)
    actual, expected = attend(run, case.shape, inputs), expect(case.shape, inputs)
    bound = error_bound(case.shape, inputs, expected, TENSOR_CORES)
    return judge(f"block_attention, {case.name}", actual, expected, bound)


def check_bits(run: Run) -> Accuracy:
    """Whether results have the same bits for a sequence alone, and for a causal row alone.

    Both calls have few rows, so as many splits.
    """
    shape = AttentionShape(2, 1, 64, ONE_LAUNCH, is_causal=True)
    inputs = make_inputs(shape, (700, 33))
    together = attend(run, shape, inputs)
    found = []
    for b, length in enumerate(inputs["key_value_lengths"]):
        names = ("q", "k_cache", "v_cache", "key_value_lengths")
        alone = inputs | {name: inputs[name][b : b + 1] for name in names}
        if attend(run, shape, alone).tobytes() != together[b : b + 1].tobytes():
            found.append(f"sequence {b} depends on its neighbours")
        for row in (0, 7):
            single = alone | {"q": np.ascontiguousarray(alone["q"][:, :, row : row + 1])}
            single["key_value_lengths"] = np.array([length - 7 + row], np.int32)
            if attend(run, shape, single).tobytes() != together[b : b + 1, :, row].tobytes():
                found.append(f"row {row} of sequence {b} depends on the rows beside it")
    mismatch = "; ".join(found) or None
    return Accuracy("block_attention, bits", float(len(found)), 0.0, mismatch)


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
