"""The JSON of ModelOpt's unified Hugging Face layout, as its 0.47 writes it.

`algorithm` is ModelOpt's `quant_algo`; `kept` are modules, or patterns of them, that stay in
floating point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_trt.checkpoints.quantization import WEIGHTS_ONLY
from dflash_trt.core.formats import NVFP4_BLOCK
from dflash_trt.quantization.linears import Algorithm
from dflash_trt.version import __version__

PRODUCER = {"name": "dflash-trt", "version": __version__}


def quantization_config(algorithm: str, kept: Sequence[str]) -> dict[str, Any]:
    """config.json's `quantization_config`, by which loaders know a quantised checkpoint."""
    element: dict[str, Any] = {"dynamic": False, "type": "float"}
    if algorithm == Algorithm.FP8:
        element["num_bits"] = 8
    else:
        element |= {"num_bits": 4, "group_size": NVFP4_BLOCK}
    group: dict[str, Any] = {"weights": element, "targets": ["Linear"]}
    if algorithm != WEIGHTS_ONLY:
        group = {"input_activations": element, **group}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "quant_algo": algorithm,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def hf_quant_config(algorithm: str, kept: Sequence[str], kv_cache: str | None) -> dict[str, Any]:
    """hf_quant_config.json, which older loaders read.

    `kv_cache` is what the scales of the KV cache are for: the source's, copied, or new ones.
    """
    quantization: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": kv_cache}
    if algorithm != Algorithm.FP8:
        quantization["group_size"] = NVFP4_BLOCK
    quantization["exclude_modules"] = list(kept)
    return {"producer": PRODUCER, "quantization": quantization}
