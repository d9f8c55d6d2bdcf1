"""What a bundle takes of a machine's memory, and how many users a GPU holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.memory.cache_bytes import (
    USUAL_CONTEXTS,
    cache_bytes_by_window,
    cache_bytes_per_token,
    state_bytes,
    state_copies,
)
from dflash_trt.bundle.memory.engine_bytes import (
    LOGITS_ITEM_BYTES,
    RUNTIME_BYTES,
    EngineMemory,
    engine_memory,
)
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.hardware.kernels import SPLIT_ATTENTION
from dflash_trt.models.sizes import DecoderSizes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes for `batch` sequences of `context` tokens each.

    On the CPU weights count in the compute type, experts as stored; `draft_head` is the target's
    output head, which the draft's session packs once more. Engines count as their files weigh.
    Caches count the tokens; linear ones on the CPU may take twice that, paged ones a page more per
    sequence, and where windowed layers have pages of their own no more than those hold.
    `target_state` is that of recurrent layers, in slots that hold it at any length, and with pages
    in three copies for prefixes for each of the bundle's slots.
    """

    batch: int
    context: int
    target_weights: int
    draft_weights: int
    draft_head: int
    target_cache: int
    draft_cache: int
    target_state: int = 0

    @property
    def total(self) -> int:
        weights = self.target_weights + self.draft_weights + self.draft_head
        return weights + self.target_cache + self.draft_cache + self.target_state


def cache_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes per token of the target's and the draft's caches, in the type that they have."""
    target, draft, form = manifest.target.sizes, manifest.draft.sizes, manifest.graph_form
    return cache_bytes_per_token(target, form), cache_bytes_per_token(draft, form)


def page_kinds(manifest: Manifest) -> dict[int | None, tuple[int, int]]:
    """How many pages there are of each kind, by window, and the bytes of each; both models'."""
    pool = manifest.page_pool
    if pool is None:
        return {}
    sizes, form = (manifest.target.sizes, manifest.draft.sizes), manifest.graph_form
    by_window = [cache_bytes_by_window(one, form) for one in sizes]
    return {
        window: (pages, pool.page_size * sum(one.get(window, 0) for one in by_window))
        for window, pages in pool.kinds.items()
    }


def engine_bytes(manifest: Manifest) -> dict[str, int]:
    """Size of each engine's file, by graph; empty for a CPU bundle."""
    sizes = {file.path: file.bytes for file in manifest.files}
    engines = manifest.engines.files if manifest.engines else []
    return {engine.graph: sizes[engine.path] for engine in engines}


def estimate_memory(manifest: Manifest, batch: int, context: int) -> MemoryEstimate:
    """Memory of a running pair: see MemoryEstimate."""
    pool = manifest.page_pool
    target, draft = manifest.target, manifest.draft
    item = Precision(manifest.compute_dtype).item_bytes
    engines = engine_bytes(manifest)
    experts = target.experts
    decoded = target.parameters - (experts.parameters if experts else 0)
    stored = experts.weight_bytes if experts else 0
    tokens_drafted = draft.token_count or target.vocab_size
    return MemoryEstimate(
        batch=batch,
        context=context,
        target_weights=engines.get("target", stored + decoded * item),
        draft_weights=engines.get("draft", draft.parameters * item),
        draft_head=0
        if engines or draft.traits.is_chain
        else tokens_drafted * target.hidden_size * item,
        target_cache=_cached_bytes(manifest, target.sizes, batch, context),
        draft_cache=_cached_bytes(manifest, draft.sizes, batch, context),
        target_state=(batch + state_copies(target.sizes, manifest.limits, pool))
        * state_bytes(target.sizes, manifest.graph_form),
    )


def bundle_memory(manifest: Manifest) -> EngineMemory:
    """Counts what a bundle takes of its device from the start, whatever it runs on."""
    engines = [] if manifest.engines is None else manifest.engines.files
    operations = [name for one in engines for name in one.operations]
    one = estimate_memory(manifest, 1, 1)
    return engine_memory(
        manifest.target.sizes,
        manifest.draft.sizes,
        one.target_weights + one.draft_weights + one.draft_head,
        manifest.limits,
        manifest.graph_form,
        pool=manifest.page_pool,
        splits=any(name.startswith(SPLIT_ATTENTION) for name in operations),
    )


@dataclass(frozen=True, slots=True)
class BundleFit:
    """Bytes of a bundle on one GPU, in the type that it computes in, and who fits beside them.

    Args:
        weights: of target and draft, a head that the draft holds of its own included.
        workspace: runtime, the logits of a full batch of blocks, the shares of split attention,
            the scores of decomposed attention.
        token: of both caches, for one token of one sequence.
        users: by context, sequences of so many tokens.
    """

    gpu: str
    gpu_memory: int
    weights: int
    workspace: int
    token: int
    users: dict[int, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def fit_bundle(manifest: Manifest, gpu: Gpu, context: int) -> BundleFit:
    """What fits on `gpu` at `context` tokens and at usual lengths that the target covers.

    Caches shrink to a sliding window where the bundle's pages do. Paged ones count by the pages
    that such a sequence holds, whatever the bundle's own pool has.
    """
    took = bundle_memory(manifest)
    rows = manifest.limits.max_batch * manifest.limits.block_size
    workspace = RUNTIME_BYTES + rows * manifest.target.vocab_size * LOGITS_ITEM_BYTES + took.shares
    if manifest.engines is not None:
        workspace += took.scores
    free = max(0, gpu.memory_bytes - took.weights - workspace)
    longest = manifest.target.max_position_embeddings
    contexts = sorted({context, *(length for length in USUAL_CONTEXTS if length <= longest)})
    step = manifest.page_pool.page_size if manifest.page_pool else 1
    state = took.states // manifest.limits.max_batch
    models = (manifest.target.sizes, manifest.draft.sizes)

    def sequence(length: int) -> int:
        """Bytes of one sequence in whole pages, and of its states with a slot's copies."""
        whole = -(-length // step) * step
        of_both = (_cached_bytes(manifest, one, 1, whole, of_pool=False) for one in models)
        return state + sum(of_both)

    users = {length: free // sequence(length) for length in contexts}
    token = sum(cache_bytes(manifest))
    return BundleFit(gpu.title, gpu.memory_bytes, took.weights, workspace, token, users)


def _cached_bytes(
    manifest: Manifest, sizes: DecoderSizes, batch: int, context: int, *, of_pool: bool = True
) -> int:
    """Bytes of sequences in the caches of a model of `sizes`; `of_pool`: as far as it has pages."""
    pool = manifest.page_pool
    total = 0
    for window, token in cache_bytes_by_window(sizes, manifest.graph_form).items():
        tokens = batch * _positions(manifest, window, context)
        if of_pool and pool is not None:
            tokens = min(tokens, pool.kinds[window] * pool.page_size)
        total += tokens * token
    return total


def _positions(manifest: Manifest, window: int | None, context: int) -> int:
    """Positions that a sequence of `context` tokens holds at most of layers of `window`."""
    pool = manifest.page_pool
    if pool is None or window is None:
        return context
    return min(context, manifest.limits.window_pages(window, pool.page_size) * pool.page_size)
