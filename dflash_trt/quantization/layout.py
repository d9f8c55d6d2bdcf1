"""The JSON of ModelOpt's unified Hugging Face layout, as its 0.47 writes it."""

from __future__ import annotations

from typing import Any

from dflash_trt import __version__
from dflash_trt.quantization.linears import Algorithm, Selection
from dflash_trt.quantization.nvfp4 import BLOCK

QUANT_CONFIG_NAME = "hf_quant_config.json"
PRODUCER = {"name": "dflash-trt", "version": __version__}


def quantization_config(algorithm: Algorithm, selection: Selection) -> dict[str, Any]:
    """config.json's `quantization_config`, by which loaders know a quantised checkpoint."""
    element: dict[str, Any] = {"dynamic": False, "type": "float"}
    if algorithm is Algorithm.FP8:
        element["num_bits"] = 8
    else:
        element |= {"num_bits": 4, "group_size": BLOCK}
    group = {"input_activations": element, "weights": element, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(selection.kept),
        "quant_algo": algorithm.value,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def hf_quant_config(algorithm: Algorithm, selection: Selection) -> dict[str, Any]:
    """hf_quant_config.json: the same in the form of older loaders."""
    quantization: dict[str, Any] = {"quant_algo": algorithm.value, "kv_cache_quant_algo": None}
    if algorithm is Algorithm.NVFP4:
        quantization["group_size"] = BLOCK
    quantization["exclude_modules"] = list(selection.kept)
    return {"producer": PRODUCER, "quantization": quantization}
