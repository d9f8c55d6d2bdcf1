"""Any JSON value under any config key ends in a spec or in one clear line, never elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.target import read_target
from dflash_trt.errors import DflashError
from tests.checkpoints.conftest import MakeCheckpoint
from tests.checkpoints.helpers import json_values

ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"]
INNER_KEYS = ["block_size", "mask_token_id", "target_layer_ids", "causal", "use_swa"]
INNER_KEYS += ["swa_window_size", "projector_type", "attention_sink_bias"]
TOP_KEYS = ["architectures", "vocab_size", "hidden_size", "num_hidden_layers", "head_dim"]
TOP_KEYS += ["num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps"]
TOP_KEYS += ["max_position_embeddings", "eos_token_id", "layer_types", "sliding_window"]
TOP_KEYS += ["use_sliding_window", "max_window_layers", "attention_bias", "tie_word_embeddings"]
TOP_KEYS += ["hidden_act", "quantization_config", "num_target_layers", *ROPE_KEYS, *INNER_KEYS]

VALUES = json_values(
    ["llama3", "default", "silu", "full_attention", "sliding_attention"], ROPE_KEYS + INNER_KEYS
)
CHANGES = st.dictionaries(
    st.sampled_from([*TOP_KEYS, "rope_scaling", "rope_parameters", "dflash_config"]),
    VALUES,
    min_size=1,
    max_size=3,
)
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def folders(make_target: MakeCheckpoint, make_draft: MakeCheckpoint) -> tuple[Path, Path]:
    return make_target(), make_draft()


@FUZZ
@given(changes=CHANGES)
def test_configs_never_break_out(folders: tuple[Path, Path], changes: dict[str, Any]) -> None:
    for folder, read in zip(folders, (read_target, read_draft), strict=True):
        original = (folder / "config.json").read_text()
        (folder / "config.json").write_text(json.dumps(json.loads(original) | changes))
        try:
            read(folder)
        except DflashError as error:
            assert str(error).isprintable()
        finally:
            (folder / "config.json").write_text(original)


@FUZZ
@given(weight_map=VALUES | st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_indexes_never_break_out(folders: tuple[Path, Path], weight_map: Any) -> None:
    target, _ = folders
    single = target / "model.safetensors"
    if single.exists():
        single.unlink()
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DflashError) as caught:
        read_target(target)
    assert str(caught.value).isprintable()
