"""The support table: what the page shows, and what commands say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.support import EXECUTORS, TABLE, Feature, check_executor, render
from dflash_trt.core.limits import PagePool
from dflash_trt.deploy.other_engines import SERVED, serving_options
from dflash_trt.errors import DflashError
from tests.pairs import PairFactory, bundle_pair, caches

PAGE = Path(__file__).parents[2] / "docs" / "support-matrix.md"


def test_the_page_shows_the_table() -> None:
    assert "\n".join(render()) in PAGE.read_text(encoding="utf-8")


def test_the_page_of_deployments_shows_what_others_serve() -> None:
    page = PAGE.with_name("tensorrt-llm.md").read_text(encoding="utf-8")
    for kind in SERVED:
        assert all(f"- {kind}, {one}\n" in page for one in serving_options(kind, 7))


def test_each_executor_is_refused_what_it_lacks_and_nothing_else() -> None:
    for feature in Feature:
        for executor in EXECUTORS:
            check_executor(feature, executor, None)
            if executor not in TABLE[feature]:
                check_executor(feature, executor, "given")
                continue
            with pytest.raises(DflashError) as caught:
                check_executor(feature, executor, "given")
            assert caught.value.usage and caught.value.where == feature.option
            assert caught.value.fix and "{" not in caught.value.what


def test_plugins_are_a_remedy_where_the_table_says_so() -> None:
    check_executor(Feature.PAGED_CACHES, "tensorrt", True, plugins=True)
    with pytest.raises(DflashError, match="linear caches"):
        check_executor(Feature.PAGED_CACHES, "tensorrt-rtx", True, plugins=True)


@pytest.mark.parametrize(
    ("family", "target", "kind"),
    [
        ("qwen3_5", {"num_layers": 4, "head_dim": 32}, "is a hybrid with recurrent layers"),
        ("gemma4", {"num_layers": 3, "tie": True}, "is a Gemma 4 with heads of two kinds"),
    ],
)
def test_kinds_of_targets_without_fp8_caches(
    make_pair: PairFactory, family: str, target: dict[str, Any], kind: str
) -> None:
    last = target["num_layers"] - 1
    pair = make_pair(family, {"vocab": 64, **target}, {"target_layer_ids": [0, last]})
    with pytest.raises(DflashError) as caught:
        bundle_pair(pair.folder, BuildSpec(overwrite=True, caches=caches(kv_dtype="fp8")))
    assert kind in caught.value.what and "FP8 KV caches cannot be built yet" in caught.value.what


@pytest.mark.parametrize("caches", [{"page_pool": PagePool(16, 64)}, {"kv_dtype": "fp8"}])
def test_no_manifest_gives_tensorrt_rtx_other_caches(
    make_pair: PairFactory, caches: dict[str, Any]
) -> None:
    engines = SimpleNamespace(draws=False, cache_length=1 << 20)
    told = {"executor": "tensorrt-rtx", "compute_dtype": "float16", "engines": engines, **caches}
    manifest = make_pair("qwen3", {"vocab": 64}).bundle.manifest.model_copy(update=told)
    with pytest.raises(ValueError, match="paged or FP8 caches do not go with executor tensorrt"):
        manifest._fit_together()
