"""Manifests of a TensorRT-LLM deployment: behind Dynamo, or by trtllm-serve.

By trtllm-serve one node is a Deployment; several are a LeaderWorkerSet, whose leader starts the
others' processes by MPI over SSH (`templates/launch.sh`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, read_text
from dflash_trt.core.yaml_files import read_yaml
from dflash_trt.deploy.trtllm.arguments import MOUNT
from dflash_trt.deploy.trtllm.deployment_record import Deployment, read_deployment, yaml_files
from dflash_trt.deploy.trtllm.deployment_rules import check_deployment, refusal
from dflash_trt.deploy.trtllm.schema import KvCache, check_arguments
from dflash_trt.deploy.trtllm.versions import find_version
from dflash_trt.serving.dynamo.packages import RELEASE, TENSORRT_LLM
from dflash_trt.serving.kubernetes.manifests import MANIFESTS, fill, fill_graph, resource_name

_DYNAMO_IMAGE = f"nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{RELEASE}"


def deployment_manifests(folder: Path, image: str | None, *, dynamo: bool) -> dict[str, str]:
    """Files of the deployment in `folder`, whose YAML files may have been edited, by name.

    The pair's own draft is served. `image` is what pods run in place of NVIDIA's.

    Raises:
        DflashError: what TensorRT-LLM would refuse, other GPUs than the profile has, an image that
            cannot run it (usage).
    """
    record = read_deployment(folder)
    check_deployment(folder, record)
    path = folder / yaml_files(record.variants[-1])[0]
    version = find_version(record.tensorrt_llm)
    arguments = check_arguments(read_yaml(path, within=folder), version, path)
    nodes, cache = record.profile.nodes, arguments.kv_cache_config or KvCache()
    if image is None and dynamo and version.name != TENSORRT_LLM:
        what = f"is for TensorRT-LLM {version.name}, Dynamo {RELEASE}'s image has {TENSORRT_LLM}"
        fix = f"build it with --trtllm-version {TENSORRT_LLM}, or pass --image of one that has it"
        raise refusal(what, folder, fix)
    if image is None and not dynamo and nodes > 1:
        what = f"{nodes} nodes are started over SSH, and {version.image} has no SSH server"
        fix = "pass --image of one made from it, with `apt-get install -y openssh-server`"
        raise refusal(what, "--image", fix)
    texts, name = _read_texts(folder, record, dynamo=dynamo), resource_name(record.name)
    digest = hashlib.sha256("\0".join([*texts, *texts.values()]).encode()).hexdigest()
    models = (record.target, record.draft, record.eagle3)
    values: dict[str, Any] = {
        "name": name,
        "record": record,
        "variant": record.variants[-1],
        "nodes": nodes,
        "gpus": record.profile.gpus // nodes,
        "folder": folder.name,
        "local": any((one or "").startswith(f"{MOUNT}/") for one in models),
        "texts": texts,
        "config": f"{name}-{digest[:8]}",
        "image": image or (_DYNAMO_IMAGE if dynamo else version.image),
        # Without reuse there are no events to route by.
        "page": cache.tokens_per_block if cache.enable_block_reuse else None,
        "parser": arguments.reasoning_parser,
        "leads": True,
    }
    if dynamo:
        return fill_graph("trtllm-graph.yaml.j2", values)
    return {MANIFESTS.marker: fill("trtllm-serve.yaml.j2", {**values, "dynamo": False})}


def _read_texts(folder: Path, record: Deployment, *, dynamo: bool) -> dict[str, str]:
    """The folder's small files that a pod has, by name."""
    paths = [yaml_files(one)[0] for one in record.variants]
    # Two servers and a router are no variant of one worker's arguments.
    names = {Path(one).name: one for one in paths if one.startswith("serve/")}
    names["preflight.py"] = "preflight.py"
    texts = {
        name: read_text(folder / path, FileKind.YAML, within=folder) for name, path in names.items()
    }
    if not dynamo and record.profile.nodes > 1:
        texts["launch.sh"] = fill("launch.sh", {})
    return texts
