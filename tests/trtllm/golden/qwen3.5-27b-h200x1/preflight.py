"""Can this machine serve a variant of this deployment?

    python3 preflight.py [autoregressive|dflash]

Looks at TensorRT-LLM's version, at the packages that the variant imports once it runs, at the GPUs,
and whether the draft's config.json says what the YAML files say of it. Tells what is wrong, a line
each; the exit code is 0 where nothing is. Notes are of what could not be looked at.
"""

import functools
import importlib
import json
import os
import sys

VERSION = "1.4.0rc1"
# Modules and the packages they come from, by variant.
PACKAGES = {
    "autoregressive": {},
    "dflash": {
        "flash_attn.cute.interface": "flash-attn-4",
        "flashinfer": "flashinfer-python"
    }
}
ARCH, GPUS = "sm_90", 1
# Bytes of a GPU, as its data sheet counts them, and the share of it that drivers leave at least.
MEMORY, LEAST_SHARE = 141000000000, 0.9
FILES = ["serve/dflash.yaml", "triton/dflash/tensorrt_llm/1/model.yaml"]
DRAFT = "z-lab/Qwen3.5-27B-DFlash"
# What the build wrote of it.
STATED = {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070, "block_size": 16}
# A broken package may raise anything, and some end the program.
FAILURES = (Exception, SystemExit)


def say(kind, text):
    """One line on stderr: what a file says is not to command a terminal."""
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    print(f"{kind}: {shown}", file=sys.stderr)


def describe(error):
    return f"{type(error).__name__}: {error}"


@functools.lru_cache(maxsize=None)
def read_config(model):
    """The config.json of a folder, or of a name on the Hugging Face hub; None if unreadable."""
    try:
        path = os.path.join(model, "config.json")
        if not os.path.isdir(model):
            path = importlib.import_module("huggingface_hub").hf_hub_download(model, "config.json")
        with open(path, encoding="utf-8") as file:
            return {"config.json": json.load(file)}
    except FAILURES as error:
        say("note", f"the config.json of {model} cannot be read ({describe(error)})")
        return None


@functools.lru_cache(maxsize=None)
def find_yaml():
    try:
        return importlib.import_module("yaml")
    except FAILURES as error:
        say("note", f"PyYAML cannot be imported ({describe(error)}): edited files are not seen")
        return None


def read_speculation(name):
    """What the file says of speculation, as it is now."""
    if find_yaml() is None:
        return STATED
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    with open(path, encoding="utf-8") as file:
        speculation = find_yaml().safe_load(file)["speculative_config"]
    return {**speculation, "block_size": STATED["block_size"]}  # of which the file only has a part


def differences():
    """What the draft says of itself, and the files otherwise."""
    silent = {}
    for name in FILES:
        try:
            stated = read_speculation(name)
        except FAILURES as error:
            yield f"{name} cannot be read ({describe(error)})"
            continue
        model = str(stated.get("speculative_model", DRAFT))
        read = read_config(model)
        if read is None:
            continue
        config = read["config.json"]
        own = config.get("dflash_config") or {} if isinstance(config, dict) else None
        if not isinstance(own, dict):
            yield f"the config.json of {model} is not that of a draft"
            continue
        config = {**config, **own}
        silent[model] = [key for key in STATED if key not in config]
        for key in STATED:
            if key in config and config[key] != stated.get(key):
                yield f"{model} has {key} {config[key]!r}, {name} is for {stated.get(key)!r}"
    for model, keys in silent.items():
        if keys:
            say("note", f"the config.json of {model} says nothing of {', '.join(keys)}")


def missing(variant):
    try:
        found = getattr(importlib.import_module("tensorrt_llm"), "__version__", None)
    except FAILURES as error:
        yield f"tensorrt_llm cannot be imported ({describe(error)}); use the README's container"
    else:
        if found != VERSION:
            yield f"this is TensorRT-LLM {found!r}, the files are for {VERSION}"
    for module, package in PACKAGES[variant].items():
        try:
            importlib.import_module(module)
        except FAILURES as error:
            yield f"{variant} needs {module} of the package {package} ({describe(error)})"
    try:
        yield from lacking_gpus(importlib.import_module("torch").cuda)
    except FAILURES as error:
        yield f"the GPUs cannot be looked at ({describe(error)})"


def lacking_gpus(cuda):
    count = cuda.device_count()
    if count < GPUS:
        yield f"there are {count} GPUs, the files are for {GPUS}"
    for index in range(min(count, GPUS)):
        arch = "sm_{}{}".format(*cuda.get_device_capability(index))
        if arch != ARCH:
            yield f"GPU {index} is {arch}, the files are for {ARCH}"
        memory = cuda.get_device_properties(index).total_memory
        if memory < LEAST_SHARE * MEMORY:
            yield f"GPU {index} has {memory:,} bytes, the files are for {MEMORY:,}"


def main():
    variant = sys.argv[1] if len(sys.argv) > 1 else "dflash"
    if variant not in PACKAGES:
        sys.exit(f"error: there is no variant {variant!r}, but {', '.join(PACKAGES)}")
    problems = [*missing(variant), *(differences() if variant == "dflash" else ())]
    for problem in problems:
        say("error", problem)
    if not problems:
        print(f"ok: nothing is missing to serve {variant}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
