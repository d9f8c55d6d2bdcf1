"""Checks that this machine can serve: python3 preflight.py [autoregressive|eagle3|dflash]"""

import json
import os
import sys
from importlib import import_module

VERSION, ARCH, GPUS, MEMORY = "1.4.0rc1", "sm_103", 8, 270000000000
# Modules that each variant imports once it runs, and the packages they come from.
PACKAGES = {
    "autoregressive": {},
    "eagle3": {},
    "dflash": {
        "flashinfer": "flashinfer-python"
    }
}
DRAFT, WRITTEN_FOR = "z-lab/gpt-oss-120b-DFlash", {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 200000, "block_size": 10}
FAILURES = (Exception, SystemExit)  # a broken package may raise anything, or end the program


def check_packages(variant):
    for module, package in {"tensorrt_llm": "tensorrt_llm", **PACKAGES[variant]}.items():
        try:
            found = getattr(import_module(module), "__version__", None)
            if module == "tensorrt_llm" and found != VERSION:
                yield "error", f"this is TensorRT-LLM {found!r}, the files are for {VERSION}"
        except FAILURES as error:
            yield "error", f"{variant} needs {module} of the package {package} ({error!r})"
    try:
        cuda = import_module("torch").cuda
        if cuda.device_count() < GPUS:
            yield "error", f"there are {cuda.device_count()} GPUs, the files are for {GPUS}"
        for index in range(min(cuda.device_count(), GPUS)):
            arch = "sm_{}{}".format(*cuda.get_device_capability(index))
            memory = cuda.get_device_properties(index).total_memory
            if arch != ARCH or memory < 0.9 * MEMORY:  # drivers take the rest
                yield "error", f"GPU {index}: {arch}, {memory:,} bytes, not {ARCH}, {MEMORY:,}"
    except FAILURES as error:
        yield "error", f"the GPUs cannot be looked at ({error!r})"


def check_draft():
    kind, path = "note", os.path.join(DRAFT, "config.json")
    try:
        if not os.path.isdir(DRAFT):
            path = import_module("huggingface_hub").hf_hub_download(DRAFT, "config.json")
        with open(path, encoding="utf-8") as file:
            config, kind = json.load(file), "error"
        config = {**config, **(config.get("dflash_config") or {})}
        for key, value in WRITTEN_FOR.items():
            if config.get(key) != value:
                kind = "error" if key in config else "note"
                yield kind, f"{DRAFT} has {key} {config.get(key)!r}, not {value!r} as the files"
    except FAILURES as error:
        yield kind, f"the config.json of {DRAFT} cannot be read as a draft's ({error!r})"


name = sys.argv[1] if len(sys.argv) > 1 else "dflash"
if name not in PACKAGES:
    sys.exit(f"error: there is no variant {name!r}, but {', '.join(PACKAGES)}")
results = [*check_packages(name), *(check_draft() if name == "dflash" else ())]
for kind, text in results:
    print(f"{kind}: {''.join(c if c.isprintable() else '?' for c in text)}", file=sys.stderr)
if "error" in dict(results):
    sys.exit(1)
print(f"ok: nothing is missing to serve {name}")
