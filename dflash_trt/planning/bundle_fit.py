"""How many users of a bundle a GPU holds, by context."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.bundle.engine_memory import bundle_scratch
from dflash_trt.bundle.manifest import Manifest
from dflash_trt.bundle.summary import estimate_memory
from dflash_trt.hardware.gpu import Gpu
from dflash_trt.planning.memory import LOGITS_ITEM_BYTES, RUNTIME_BYTES

_CONTEXTS = (2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class BundleFit:
    """Bytes of a bundle on one GPU, in the type that it computes in, and who fits beside them.

    Args:
        weights: of target and draft, a head that the draft holds of its own included.
        workspace: runtime, the logits of a full batch of blocks, the shares of split attention.
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

    Caches count whole: they do not shrink to a sliding window. Paged ones count by the pages
    that such a sequence holds, whatever the bundle's own pool has.
    """
    one = estimate_memory(manifest, 1, 1)
    weights = one.target_weights + one.draft_weights + one.draft_head
    rows = manifest.limits.max_batch * manifest.limits.block_size
    workspace = RUNTIME_BYTES + rows * manifest.target.vocab_size * LOGITS_ITEM_BYTES
    workspace += bundle_scratch(manifest)
    token = one.target_cache + one.draft_cache
    free = max(0, gpu.memory_bytes - weights - workspace)
    longest = manifest.target.max_position_embeddings
    contexts = sorted({context, *(length for length in _CONTEXTS if length <= longest)})
    step = manifest.page_pool.page_size if manifest.page_pool else 1
    users = {length: free // (token * -(-length // step) * step) for length in contexts}
    return BundleFit(gpu.title, gpu.memory_bytes, weights, workspace, token, users)
