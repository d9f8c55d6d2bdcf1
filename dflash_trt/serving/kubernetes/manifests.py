"""Fills the templates of a cluster's manifests, and writes them to a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.bundle.memory.memory import bundle_memory
from dflash_trt.core.publish import StagedKind, staged_folder
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.serving.dynamo.local import MIGRATIONS
from dflash_trt.serving.dynamo.packages import RELEASE
from dflash_trt.version import __version__

MANIFESTS = StagedKind("folder of manifests", "manifests.yaml")
OUR_IMAGE = f"dflash-trt-dynamo:{__version__}"
_SHARED = {"claim": "dflash-trt-models", "version": __version__}
_DYNAMO = {"release": RELEASE, "migrations": MIGRATIONS, "dynamo": True}
_LONGEST_NAME = 28  # Grove adds a component's name and its role, and takes 45 characters in all
_CORES = 4
_PROCESS_BYTES = 1 << 30
"""Of a worker, beside weights and caches: an allowance, not a measurement."""


def resource_name(name: str) -> str:
    """`name` as a cluster takes it for a resource and a label; DflashError where it cannot."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found[:1].isalpha() or len(found) > _LONGEST_NAME:
        what = f"cannot be a name in a cluster: a letter first, at most {_LONGEST_NAME} characters"
        raise DflashError(what, where=name, fix="build it under another name", usage=True)
    return found


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template of that name with `values`; texts from outside go through `tojson` there."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dflash_trt.serving.kubernetes"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render({**_SHARED, **values})


def fill_graph(template: str, values: Mapping[str, Any]) -> dict[str, str]:
    """A graph for Dynamo's operator and what Prometheus's operator takes, by files' names."""
    names = {MANIFESTS.marker: template, "podmonitor.yaml": "podmonitor.yaml.j2"}
    return {file: fill(one, {**_DYNAMO, **values}) for file, one in names.items()}


def bundle_graph(
    bundle: Bundle, arguments: Sequence[str], threads: ThreadChoice, image: str | None
) -> dict[str, str]:
    """A frontend and workers of `bundle`, which the claim holds in a folder of its name.

    `arguments` are those of `dflash-trt dynamo-worker` behind the bundle; a step takes `threads`.

    Raises:
        DflashError: a bundle without a tokenizer, or one that our image cannot run (usage).
    """
    load_tokenizer(bundle)
    manifest, pool = bundle.manifest, bundle.manifest.page_pool
    wanted = {"cpu": str(threads if isinstance(threads, int) else _CORES)}
    if manifest.is_on_cpu:
        memory = bundle_memory(manifest)
        growing = memory.caches if pool is None else 0  # a linear one is there twice for moments
        most = math.ceil((memory.total + growing + _PROCESS_BYTES) / (1 << 30))
        wanted["memory"] = f"{most}Gi"
    elif image is None:
        what = f"{OUR_IMAGE} runs bundles for the CPU, this is one for {manifest.executor}"
        fix = "pass --image of one that has its packages too, as deploy/dynamo/Dockerfile makes it"
        raise DflashError(what, where=bundle.folder, fix=fix, usage=True)
    else:
        wanted["nvidia.com/gpu"] = "1"
    values = {
        "name": resource_name(manifest.name),
        "folder": bundle.folder.name,
        "image": image or OUR_IMAGE,
        "page": None if pool is None else pool.page_size,
        "arguments": arguments,
        "wanted": wanted,
    }
    return fill_graph("bundle-graph.yaml.j2", values)


def write_manifests(destination: Path, made: Mapping[str, str], *, overwrite: bool) -> list[str]:
    """Writes files to `destination`, whole or not at all; returns the kinds in them.

    Raises:
        DflashError: a destination that may not be written.
    """
    with staged_folder(destination, overwrite=overwrite, kind=MANIFESTS) as folder:
        for name, text in made.items():
            (folder / name).write_text(text, "utf-8")
    found = (one for text in made.values() for one in yaml.safe_load_all(text))
    return [one["kind"] for one in found]
