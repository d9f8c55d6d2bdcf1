"""How graphs write and read KV caches: one strategy a form, chosen here and nowhere else."""

from __future__ import annotations

from dflash_trt.graph.caches.linear import LinearStrategy
from dflash_trt.graph.caches.native import NativeStrategy
from dflash_trt.graph.caches.paged import PagedStrategy
from dflash_trt.graph.caches.strategy import CacheStrategy, KernelStrategy
from dflash_trt.graph.form import GraphForm


def cache_strategy(form: GraphForm) -> CacheStrategy:
    """What graphs of `form` do: of ONNX Runtime's in float32, else of TensorRT's."""
    if form.is_native:
        return KernelStrategy(form) if form.has_kernel_caches else NativeStrategy(form)
    return PagedStrategy(form) if form.is_paged else LinearStrategy(form)


def cache_head_dim(head_dim: int, has_sinks: bool, form: GraphForm) -> int:
    """The head size of a cache: larger than the model's where it has room for a sink."""
    return head_dim + (cache_strategy(form).sink_dims if has_sinks else 0)


def stores_sinks(has_sinks: bool, form: GraphForm) -> bool:
    """Whether the caches of a model that `has_sinks` have room for them."""
    return has_sinks and cache_strategy(form).sink_dims > 0
