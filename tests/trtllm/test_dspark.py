"""Deployments of DSpark drafts, with the fields that both versions document."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target
from tests.reference.deepspec import write_deepspec
from tests.trtllm.conftest import Run
from tests.trtllm.test_deployment import MOUNTED, build_deployment


@pytest.mark.parametrize("version", ["1.3.0rc27", "1.4.0rc1"])
def test_a_dspark_draft_is_deployed_as_one(
    run: Run, pair: Path, tmp_path: Path, version: str
) -> None:
    folder = pair.parent
    tables = torch.zeros(2, read_target(folder / "target").vocab_size, 4)
    markov = tables[0], tables[1]
    draft = write_deepspec(tmp_path / "dspark", folder / "draft", folder / "target", markov)
    own = ["--target", pair, "--profile", "one", "--draft-checkpoint", draft]
    shown = build_deployment(run, tmp_path / "d", *own, "--trtllm-version", version)
    assert shown["variants"] == ["autoregressive", "dspark"]
    arguments = yaml.safe_load((tmp_path / "d" / "serve" / "dspark.yaml").read_text())
    speculation, spec = arguments["speculative_config"], read_draft(draft)
    assert speculation == {
        "decoding_type": "DSpark",
        "max_draft_len": spec.block_size - 1,
        "speculative_model": f"{MOUNTED}/draft",
        "target_layer_ids": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "attention_backend": "TRTLLM",
        "block_size": spec.block_size - 1,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
    }
    assert arguments["kv_cache_config"]["enable_block_reuse"] is False
    readme = (tmp_path / "d" / "README.md").read_text(encoding="utf-8")
    assert "serve/dspark.yaml" in readme and "dflash.yaml" not in readme
    tail = ["--llm-arg", "speculative_config.context_recompute_tail=64"]
    run("build", "--executor", "trtllm", *own, *tail, "-o", tmp_path / "x").fails(
        2, "DSpark has no context_recompute_tail"
    )
    backend = ["--attention-backend", "FA4"]
    run("build", "--executor", "trtllm", *own, *backend, "-o", tmp_path / "x").fails(
        2, "documents attention backend FA4 for DFlash, not for DSpark"
    )


def test_a_draft_moved_by_a_slot_is_not_deployed(run: Run, pair: Path, tmp_path: Path) -> None:
    """DeepSpec's DFlash: no version documents whose slots those are."""
    folder = pair.parent
    draft = write_deepspec(tmp_path / "moved", folder / "draft", folder / "target", None)
    own = ["--target", pair, "--profile", "one", "--draft-checkpoint", draft]
    refused = run("build", "--executor", "trtllm", *own, "-o", tmp_path / "x")
    refused.fails(2, "DFlash draft moved by a slot")
