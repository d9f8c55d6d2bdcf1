"""Can this machine serve a variant of this deployment?

    python3 preflight.py [autoregressive|dflash]

Looks at TensorRT-LLM's version, at the packages that the variant imports once it runs, at the GPUs,
and whether the draft's config.json says what the files say of it. Tells what is wrong, a line each;
the exit code is 0 where nothing is.
"""

import importlib
import json
import os
import sys

VERSION = "1.4.0rc1"
# Modules and the packages they come from, by variant.
PACKAGES = {
    "autoregressive": {},
    "dflash": {
        "flash_attn": "flash-attn"
    }
}
ARCH, GPUS = "sm_120", 1
DRAFT = "z-lab/Qwen3-Coder-30B-A3B-DFlash"
STATED = {"target_layer_ids": [1, 12, 23, 34, 45], "mask_token_id": 151669, "block_size": 16}


def read_config(model):
    """The config.json of a folder, or of a name on the Hugging Face hub."""
    path = os.path.join(model, "config.json")
    if not os.path.isdir(model):
        path = importlib.import_module("huggingface_hub").hf_hub_download(model, "config.json")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def differences():
    """What the draft says of itself, and the files otherwise."""
    try:
        config = read_config(DRAFT)
    except Exception as error:  # of the hub, of many kinds
        print(f"note: the config.json of {DRAFT} cannot be read ({error})", file=sys.stderr)
        return
    config = {**config, **(config.get("dflash_config") or {})}
    for name, value in STATED.items():
        if config.get(name, value) != value:
            yield f"{DRAFT} has {name} {config[name]}, the files say {value}"


def missing(variant):
    try:
        found = importlib.import_module("tensorrt_llm").__version__
    except (ImportError, OSError) as error:
        yield f"tensorrt_llm cannot be imported ({error}); use the container of the README"
    else:
        if found != VERSION:
            yield f"this is TensorRT-LLM '{found}', the files are for {VERSION}"
    for module, package in PACKAGES[variant].items():
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            yield f"{variant} needs {module} of the package {package} ({error})"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return
    count = torch.cuda.device_count()
    if count < GPUS:
        yield f"there are {count} GPUs, the files are for {GPUS}"
    for index in range(min(count, GPUS)):
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
        if arch != ARCH:
            yield f"GPU {index} is {arch}, the files are for {ARCH}"


def main():
    variant = sys.argv[1] if len(sys.argv) > 1 else "dflash"
    if variant not in PACKAGES:
        sys.exit(f"error: there is no variant '{variant}', but {', '.join(PACKAGES)}")
    problems = [*missing(variant), *(differences() if variant == "dflash" else ())]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
