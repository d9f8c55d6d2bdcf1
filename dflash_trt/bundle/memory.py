"""What a bundle takes of a machine's memory, and how many users a GPU holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.recurrent_dims import state_copies
from dflash_trt.graph.form import Precision
from dflash_trt.hardware.gpus import Gpu
from dflash_trt.kernels.attention import SPLIT_ATTENTION
from dflash_trt.memory.caches import USUAL_CONTEXTS, cache_bytes_per_token, state_bytes
from dflash_trt.memory.workspace import (
    LOGITS_ITEM_BYTES,
    RUNTIME_BYTES,
    decomposed_scratch,
    split_scratch,
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes for `batch` sequences of `context` tokens each.

    On the CPU weights count in the compute type, experts as stored; `draft_head` is the target's
    output head, which the draft's session packs once more. Engines count as their files weigh.
    Caches count the tokens; linear ones on the CPU may take twice that, paged ones a page more per
    sequence. `target_state` is that of recurrent layers, in slots that hold it at any length, and
    with pages in three copies for prefixes for each of the bundle's slots.
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


def engine_bytes(manifest: Manifest) -> dict[str, int]:
    """Size of each engine's file, by graph; empty for a CPU bundle."""
    sizes = {file.path: file.bytes for file in manifest.files}
    engines = manifest.engines.files if manifest.engines else []
    return {engine.graph: sizes[engine.path] for engine in engines}


def estimate_memory(manifest: Manifest, batch: int, context: int) -> MemoryEstimate:
    """Memory of a running pair: see MemoryEstimate."""
    tokens, pool = batch * context, manifest.page_pool
    if pool is not None:
        tokens = min(tokens, pool.positions)
    target, draft = manifest.target, manifest.draft
    item = Precision(manifest.compute_dtype).item_bytes
    engines = engine_bytes(manifest)
    target_token, draft_token = cache_bytes(manifest)
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
        target_cache=tokens * target_token,
        draft_cache=tokens * draft_token,
        target_state=(batch + state_copies(target.recurrent, manifest.limits, pool))
        * state_bytes(target.sizes, manifest.graph_form),
    )


def bundle_scratch(manifest: Manifest) -> int:
    """Bytes of `split_scratch` of a bundle; 0 where its engines do not split attention."""
    engines = manifest.engines
    if engines is None or not any(
        name.startswith(SPLIT_ATTENTION) for one in engines.files for name in one.operations
    ):
        return 0
    target, draft = manifest.target.sizes, manifest.draft.sizes
    form = manifest.graph_form
    return split_scratch(target, draft, manifest.limits, form, engines.cache_length)


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

    Caches do not shrink to a sliding window. Paged ones count by the pages that such a sequence
    holds, whatever the bundle's own pool has.
    """
    one = estimate_memory(manifest, 1, 1)
    weights = one.target_weights + one.draft_weights + one.draft_head
    rows = manifest.limits.max_batch * manifest.limits.block_size
    workspace = RUNTIME_BYTES + rows * manifest.target.vocab_size * LOGITS_ITEM_BYTES
    workspace += bundle_scratch(manifest)
    if manifest.engines is not None:
        capacity = manifest.engines.cache_length
        workspace += decomposed_scratch(manifest.target.sizes, manifest.limits, capacity)
    token = one.target_cache + one.draft_cache
    free = max(0, gpu.memory_bytes - weights - workspace)
    longest = manifest.target.max_position_embeddings
    contexts = sorted({context, *(length for length in USUAL_CONTEXTS if length <= longest)})
    step = manifest.page_pool.page_size if manifest.page_pool else 1
    state = state_bytes(manifest.target.sizes, manifest.graph_form)
    users = {length: free // (state + token * -(-length // step) * step) for length in contexts}
    return BundleFit(gpu.title, gpu.memory_bytes, weights, workspace, token, users)
