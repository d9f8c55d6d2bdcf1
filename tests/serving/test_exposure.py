"""What of a Triton server others reach: nothing that registers memory, writes files or unloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from dflash_trt.serving.server.addresses import RESTRICTED, choose_http_host, restriction_options
from dflash_trt.serving.server.launcher import ServerAddresses
from tests.serving.client import LLM, ask_grpc, make_fields
from tests.serving.served import fetch

CLOSED_OVER_HTTP = (
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("POST", "/v2/cudasharedmemory/region/x/register"),
    ("POST", "/v2/trace/setting"),
    ("POST", f"/v2/models/{LLM}/trace/setting"),
    ("POST", "/v2/logging"),
    ("POST", "/v2/repository/index"),
    ("POST", f"/v2/repository/models/{LLM}/unload"),
)
CLOSED_OVER_GRPC: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("register_system_shared_memory", ("x", "/x", 64)),
    ("get_system_shared_memory_status", ()),
    ("register_cuda_shared_memory", ("x", b"eA==", 0, 64)),
    ("update_trace_settings", ()),
    ("update_log_settings", ({"log_file": "/tmp/x"},)),
    ("get_model_repository_index", ()),
    ("load_model", (LLM,)),
    ("unload_model", (LLM,)),
)


def test_what_is_not_for_clients_is_closed(addresses: ServerAddresses) -> None:
    for method, path in CLOSED_OVER_HTTP:
        status, content, _ = fetch(addresses.http, path, {}, method)
        assert status == 403 and b"restricted" in content, (path, content)
    with grpcclient.InferenceServerClient(addresses.grpc) as client:
        for name, arguments in CLOSED_OVER_GRPC:
            with pytest.raises(InferenceServerException, match="restricted"):
                getattr(client, name)(*arguments)
    assert ask_grpc(addresses.grpc, LLM, make_fields(LLM, "host", max_tokens=2)).error is None


def test_the_word_that_opens_them_is_never_the_same() -> None:
    first, second = restriction_options(), restriction_options()
    assert len(first) == 2 and not set(first) & set(second)


def test_what_others_start_closes_the_same() -> None:
    """The script beside a TensorRT-LLM deployment."""
    folder = Path(__file__).parents[2] / "dflash_trt" / "deploy" / "trtllm" / "templates"
    text = (folder / "serve-triton.sh.j2").read_text(encoding="utf-8")
    assert f"{','.join(RESTRICTED)}:" in text and "--http-address=127.0.0.1" in text
    for option in ("--http-restricted-api=", "--grpc-restricted-protocol="):
        assert option in text, option


@pytest.mark.parametrize(
    ("host", "expose", "chosen"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("::1", False, "::1"),
        ("0.0.0.0", False, "127.0.0.1"),
        ("::", False, "127.0.0.1"),
        ("no such host", False, "127.0.0.1"),
        ("0.0.0.0", True, "0.0.0.0"),
    ],
)
def test_http_faces_others_when_asked(host: str, expose: bool, chosen: str) -> None:
    assert choose_http_host(host, expose=expose) == chosen
