"""What a worker is made of, without Dynamo's packages."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_trt.cli.main import main
from dflash_trt.core.limits import PagePool
from dflash_trt.decoding import Generator, Request, TokenEvent
from dflash_trt.decoding.logprobs import TokenLogprob
from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import DflashError
from dflash_trt.serving.dynamo import packages, pulse
from dflash_trt.serving.dynamo.chunks import ChunkWriter, end_together
from dflash_trt.serving.dynamo.shared_pages import SharedPages
from dflash_trt.serving.dynamo.token_request import read_request
from tests.decoding.schedules import MAX_SEQ_LEN, TRAINED_BLOCK, VOCAB_SIZE
from tests.inspection import shareable_keys
from tests.standins.executor import PagedFakeExecutor
from tests.waiting import PATIENCE_S

SIZE, PAGES = 4, 24
ROOT = Path(__file__).parents[2]


def given(**parts: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6], "annotations": [], "sampling_options": {}} | parts


def test_a_request_is_read_as_it_was_meant() -> None:
    wishes = {"temperature": 0.800000011920929, "top_k": -1, "n": 2, "seed": -1}
    stops = {"max_tokens": 9, "stop_token_ids": [3], "stop_token_ids_visible": [3, 4]}
    extra = {"sampling_options": {"allowed_token_ids": [8]}, "nvext": {}}
    read = read_request(
        given(sampling_options=wishes, stop_conditions=stops, extra_args=extra),
        "id",
        {"top_p": 0.5},
    )
    first, second = read.choices
    assert first.sampling.temperature == 0.8 and first.sampling.top_k is None
    assert first.sampling.top_p == 0.5  # the checkpoint's
    assert (first.sampling.seed, second.sampling.seed) == (2**64 - 1, 0)
    assert first.stop_token_ids == (3, 4) and first.rules.allowed == (8,)
    seeds = {read_request(given(), name, {}).choices[0].sampling.seed for name in ("a", "a", "b")}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("parts", "where"),
    [
        ({"sampling_options": {"best_of": 2}}, "best_of"),
        ({"sampling_options": {"n": 200}}, "n"),
        ({"sampling_options": {"n": 2}, "stop_conditions": {"stop": ["a"]}}, "stop"),
        ({"sampling_options": {"min_p": 2.0}}, "min_p"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "structural_tag"),
        ({"annotations": ["dflash.block_size:x"]}, "dflash.block_size:x"),
        ({"annotations": ["dflash.speculate:1"]}, "dflash.speculate:1"),
        ({"annotations": ["dflash.block_size:3", "dflash.block_size:4"]}, "dflash.block_size:4"),
        ({"multi_modal_data": {"image": []}}, "prompt"),
        ({"extra_args": {"sampling_options": {"truncate_prompt": 1}}}, "truncate_prompt"),
    ],
)
def test_what_cannot_be_served_is_named(parts: dict[str, Any], where: str) -> None:
    with pytest.raises(DflashError) as error:
        read_request(given(**parts), "id", {})
    assert error.value.usage and str(error.value.where).endswith(where)


def test_ids_wait_for_their_log_probabilities() -> None:
    writer = ChunkWriter(1, logprobs=True)

    def event(*ids: int, scores: tuple[TokenLogprob, ...] = ()) -> TokenEvent:
        return TokenEvent(
            request_id=0, token_ids=ids, accepted_tokens=0, text="", pieces=(), logprobs=scores
        )

    assert not list(writer.write(event(7, 8)))
    scores = (
        TokenLogprob(7, -0.5, (9, 7), (-0.1, -0.5), 2),
        TokenLogprob(8, -4.0, (9,), (-1.0,), 6),
    )
    (chunk,) = writer.write(event(4, scores=scores))
    assert chunk["token_ids"] == [7, 8] and chunk["index"] == 1
    assert chunk["log_probs"] == [-0.5, -4.0]
    ranks = [[(one["rank"], one["token_id"]) for one in top] for top in chunk["top_logprobs"]]
    assert ranks == [[(1, 9), (2, 7)], [(6, 8), (1, 9)]]


def test_choices_end_together_and_lose_nothing() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "completion_tokens_details": {"a": 1}}
    ends = [
        {"token_ids": [4, 0], "index": 1, "finish_reason": "stop", "completion_usage": usage},
        {"token_ids": [5], "index": 0, "finish_reason": "length", "completion_usage": usage},
    ]
    *texts, last = end_together(ends)
    assert texts == [{"token_ids": [4], "index": 1}, {"token_ids": [5], "index": 0}]
    assert (last["token_ids"], last["finish_reason"]) == ([], "stop")
    assert last["completion_usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "completion_tokens_details": {"a": 2},
    }


class Router:
    """Keeps what a publisher was told, as a router does."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.removed = 0

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None:
        assert len(token_ids) == sum(num_block_tokens) == SIZE * len(block_hashes)
        for one in block_hashes:
            self.parents[one], parent_hash = parent_hash, one

    def publish_removed(self, block_hashes: list[int]) -> None:
        self.removed += len(block_hashes)
        for one in block_hashes:
            del self.parents[one]


def test_the_router_knows_what_can_be_shared() -> None:
    """After more prompts than the pool holds: the pages that the allocator would share."""
    pool = PagePool(SIZE, PAGES)
    limits = {"max_seq_len": MAX_SEQ_LEN, "block_size": TRAINED_BLOCK, "vocab_size": VOCAB_SIZE}
    generator = Generator(PagedFakeExecutor(pool, **limits))
    router, pages = Router(), SharedPages(pool)
    generator.observe_pages(pages)
    pages.connect(router)
    prompts = [(head, *range(13)) for head in (*range(8), 1, 2)]
    asked = [Request(prompt_ids=one, max_tokens=9, ignore_eos=True) for one in prompts]
    for request in asked:
        generator.generate([request])
    keys = {int.from_bytes(key[:8], "little", signed=True) for key in shareable_keys(generator)}
    assert router.removed and router.parents.keys() == keys
    roots = [one for one, parent in router.parents.items() if parent is None]
    assert roots and all(parent is None or parent in keys for parent in router.parents.values())
    pages.clear()
    assert not router.parents


def test_a_router_that_cannot_be_told_costs_no_request() -> None:
    pool = PagePool(SIZE, PAGES)
    limits = {"max_seq_len": MAX_SEQ_LEN, "block_size": TRAINED_BLOCK, "vocab_size": VOCAB_SIZE}
    request = Request(prompt_ids=tuple(range(13)), max_tokens=9, ignore_eos=True)
    alone = Generator(PagedFakeExecutor(pool, **limits)).generate([request])[0].token_ids
    tried: list[str] = []

    class Broken(Router):
        def publish_stored(self, *_: Any, **__: Any) -> None:
            tried.append("stored")
            raise OSError("no router")

        def publish_removed(self, *_: Any) -> None:
            tried.append("removed")
            raise OSError("no router")

    generator, pages = Generator(PagedFakeExecutor(pool, **limits)), SharedPages(pool)
    generator.observe_pages(pages)
    pages.connect(Broken())
    assert generator.generate([request])[0].token_ids == alone
    pages.clear()
    assert set(tried) == {"stored", "removed"}


@pytest.mark.parametrize("phase", ["TURN", "BROKEN"])
def test_a_generator_that_does_nothing_more_ends_the_process(phase: str) -> None:
    lines = (
        "import threading",
        "from dflash_trt.decoding.worker import Phase",
        "from dflash_trt.serving.dynamo import pulse",
        "pulse.LEAST_HANG_S = 0.5",
        "one = pulse.Pulse(1, lambda: None)",
        f"one.beat(Phase.{phase})",
        "one.calibrate()",
        "threading.Event().wait()",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert ("most recent call first" in done.stderr) is (phase == "TURN")


def test_long_turns_of_the_trial_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 0.1, 0.1, 40.1, 40.1, 40.3, 40.3])
    monkeypatch.setattr(pulse.time, "monotonic", lambda: next(clock))
    one = pulse.Pulse(most_rows=150, on_look=lambda: None)
    monkeypatch.setattr(one, "_thread", threading.Thread(target=lambda: None))
    for _ in range(3):  # of 0.1, 40 and 0.2 seconds
        one.beat(Phase.TURN)
        one.beat(Phase.IDLE)
    one.calibrate()
    assert one.hang_s == pytest.approx(15)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dynamo", "dynamo.common", "dynamo.common.backend", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for found in ("1.60.0", "1.5.2", "2.0"):
        monkeypatch.setattr(packages.metadata, "version", lambda _, found=found: found)
        with pytest.raises(DflashError, match=f"{found} is here"):
            packages.check_dynamo()
    monkeypatch.setattr(packages.metadata, "version", lambda _: "1.6.7")
    packages.check_dynamo()


def test_commands_say_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)  # where it is installed too
    bundle = str(tmp_path / "bundle")
    assert main(["build", "--target", "demo", "-o", bundle]) == 0
    assert main(["dynamo-worker", bundle, "--endpoint", "one.two"]) == 2
    assert main(["serve", bundle, "--dynamo", "2", "--grpc-port", "1"]) == 2
    assert "--grpc-port: is a Triton server's" in capsys.readouterr().err
    for command in (["dynamo-worker", bundle], ["serve", bundle, "--dynamo", "2"]):
        assert main([*command, "--drafter", "none", "--block-schedule", "4"]) == 2
        assert "--block-schedule: needs speculation" in capsys.readouterr().err
        assert main(command) == 1
        assert "deploy/dynamo/requirements.txt" in capsys.readouterr().err


def test_every_package_is_pinned() -> None:
    lines = (ROOT / "deploy/dynamo/requirements.txt").read_text().splitlines()
    pins = [one.partition("==") for one in lines if not one.startswith("#")]
    assert all(name and version for name, _, version in pins)
    assert {"ai-dynamo", "ai-dynamo-runtime"} <= {name for name, _, _ in pins}
