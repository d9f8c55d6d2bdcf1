"""`dflash-trt sweep` against a stub server: counts, failures, continuing, refusals."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from dflash_perf import extra
from dflash_perf.harness.interactivity import loads_between
from dflash_perf.harness.records import RequestRecord
from dflash_perf.harness.store import ResultStore
from dflash_perf.harness.sweep_config import OfferedLoad

from dflash_trt.models.build_config import data_folder
from tests.cli.conftest import Outcome
from tests.frozen.command_line import run
from tests.perf.conftest import Stub, run_stub
from tests.perf.invented import invented_config, write_invented
from tests.standins.openai_server import InventedServer, invented

OSL = 21
SHORT: dict[str, object] = {"repeats": 1, "request_count": 3}

Sweep = Callable[..., Outcome]


@pytest.fixture
def sweep(stub: Stub, prompts: Path, tmp_path: Path) -> Sweep:
    """Runs a short sweep into `tmp_path`/results; what is given again wins."""
    settings = tmp_path / "settings.yaml"

    def call(*arguments: object, **keys: object) -> Outcome:
        wanted = SHORT | {"request_count": 4, "warmup": 0} | keys
        kept = {key: value for key, value in wanted.items() if value is not None}
        settings.write_text(yaml.safe_dump(kept))
        where = () if "--url" in arguments else ("--url", stub.grpc)
        return run(
            *("sweep", *where, "--model", "tensorrt_llm", "--prompts", prompts),
            *("--osl", OSL, "-o", tmp_path / "results", "--config", settings),
            *(() if "request_rate" in keys else ("--concurrency", "1")),
            *arguments,
        )

    return call


def _records(folder: Path) -> list[RequestRecord]:
    store = ResultStore(folder)
    return [request for run in store.runs() for request in store.requests(run)]


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("tensorrt_llm", "output_ids"),
        ("delta", "output_ids"),
        ("unsaid", "output_ids"),
        ("unsaid_delta", "output_ids"),
        ("counts_only", "counts"),
        ("text_only", "tokenizer"),
        ("autoregressive", "output_ids"),
    ],
)
def test_tokens_are_counted_by_the_best_there_is(
    sweep: Sweep, tmp_path: Path, model: str, source: str
) -> None:
    tokenizer = str(data_folder("demo_pair") / "target") if source == "tokenizer" else None
    assert sweep("--model", model, tokenizer=tokenizer, warmup=1).code == 0
    for record in _records(tmp_path / "results"):
        assert record.token_source == source
        if source != "tokenizer":
            assert record.output_tokens == OSL
        else:
            assert record.output_tokens is not None and record.output_tokens > 1
    if model == "text_only":
        shutil.rmtree(tmp_path / "results")
        sweep("--model", model).fails(2, "neither output_ids nor num_output_tokens", "`tokenizer`")


def test_acceptance_is_the_servers(sweep: Sweep, tmp_path: Path) -> None:
    outcome = sweep("--json")
    (point,) = outcome.json["points"]
    # Steps emit 4, 2, 8, 1, 4, 1 of the 20 tokens after the first.
    assert point["values"]["acceptance_length"]["mean"] == pytest.approx(20 / 6)
    summary = json.loads(next((tmp_path / "results").glob("runs/*/*/summary.json")).read_text())
    assert summary["acceptance"]["histogram"] == [8, 4, 0, 8, 0, 0, 0, 4]
    assert summary["token_sources"] == {"output_ids": 4}


def test_named_sets_of_prompts(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "z"}\n')
    (tmp_path / "a.txt").write_text("one prompt")
    wanted = ["--prompts", f"second={tmp_path}/b.jsonl", "--prompts", str(tmp_path / "a.txt")]
    wanted = ["sweep", "--url", stub.grpc, *wanted, "--limit-prompts", "2", "--osl", str(OSL)]
    (tmp_path / "own.yaml").write_text("repeats: 2\nrequest_count: 6\n")
    wanted += ["--concurrency", "1", "--config", str(tmp_path / "own.yaml")]
    wanted += ["-o", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["dflash-trt", *wanted])
    outcome = run(*wanted, "--json")
    assert outcome.code == 0, outcome.err
    (point,) = outcome.json["points"]
    assert [(one["name"], one["requests"], one["output_tokens"]) for one in point["sets"]] == [
        ("second", 8, 8 * OSL),
        ("a", 4, 4 * OSL),
    ]
    for one in point["sets"]:
        assert one["values"]["acceptance_length"]["mean"] == pytest.approx(20 / 6)
        assert one["verify_steps"] == 6 * one["requests"] and one["looping"] == 0
    names = {record.prompt: record.set_name for record in _records(tmp_path / "results")}
    assert names == {0: "second", 1: "second", 2: "a"}
    shown = run(*wanted).out.splitlines()
    assert [line.split()[:2] for line in shown[-2:]] == [["of", "second"], ["of", "a"]]
    assert all(line.split()[-2:] == ["3.33", "0"] for line in shown[-2:])
    plan = json.loads((tmp_path / "results" / "sweep.json").read_text())
    assert str(tmp_path) not in plan["commands"][0]["command"]
    assert "--prompts second=b.jsonl --prompts a.txt" in plan["commands"][0]["command"]
    renamed = [word.replace("second=", "first=") for word in wanted]
    run(*renamed).fails(2, "the prompts of second, a are not those of now")
    page = tmp_path / "report.html"
    assert run("report", tmp_path / "results", "-o", page).code == 0
    assert "Sets of prompts" in page.read_text() and "second · a" in page.read_text()
    assert "| second |" in page.with_suffix(".md").read_text()


def test_sets_that_cannot_be_swept(tmp_path: Path) -> None:
    config = tmp_path / "sweep.yaml"
    config.write_text("prompts: {a: none.jsonl}\nconfigurations: [{name: x, url: 'h:1'}]\n")
    run("sweep", "--config", config, "-o", tmp_path / "r").fails(2, str(tmp_path / "none.jsonl"))


def test_openai_endpoints(stub: Stub, prompts: Path, tmp_path: Path) -> None:
    config = tmp_path / "sweep.yaml"
    served = {"name": "c", "kind": "completions", "model": "tensorrt_llm", "url": stub.http}
    limits = {"goodput": {"ttft": 5000, "tpot": 500}, "configurations": [served]}
    config.write_text(yaml.safe_dump(limits | SHORT))
    more = ["--config", config, "--prompts", prompts]
    assert sweep_yaml(more, tmp_path / "results").code == 0
    for record in _records(tmp_path / "results"):
        assert (record.output_tokens, record.token_source) == (OSL, "counts")
        assert record.input_tokens == 9
        assert (record.verify_steps, record.drafted_tokens, record.accepted_tokens) == (4, 7, 2)
    lengths = [one.value("acceptance_length") for one in ResultStore(tmp_path / "results").points()]
    assert lengths and {None if one is None else one.mean for one in lengths} == {(OSL - 1) / 4}
    config.write_text(
        "repeats: 1\nrequest_count: 3\nconfigurations:\n"
        "- name: chat\n  kind: chat\n  model: tensorrt_llm\n"
        f"  url: {stub.http}/v1\n  parameters: {{return_token_ids: true}}\n"
        "  api_key_env: DFLASH_TEST_KEY\n"
    )
    more = ["--config", config, "--prompts", data_folder("demo_pair") / "prompts.jsonl"]
    outcome = sweep_yaml(more, tmp_path / "chat")
    outcome.fails(2, "the variable DFLASH_TEST_KEY is not set")
    config.write_text(config.read_text().replace("  api_key_env: DFLASH_TEST_KEY\n", ""))
    assert sweep_yaml(more, tmp_path / "chat").code == 0
    assert {one.token_source for one in _records(tmp_path / "chat")} == {"output_ids"}
    assert {one.output_tokens for one in _records(tmp_path / "chat")} == {OSL}


def sweep_yaml(arguments: list[object], folder: Path) -> Outcome:
    """A sweep of a YAML's configurations."""
    return run("sweep", *arguments, "--osl", OSL, "--concurrency", "1", "-o", folder)


def test_two_urls_are_compared_by_what_each_tells(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tells of drafts in its metrics, the other in its answers; both say who they are."""
    monkeypatch.setattr("dflash_perf.harness.sweep.SETTLE_S", 0)
    servers = InventedServer(), InventedServer(owner="llamacpp")
    with invented(servers[0]) as one, invented(servers[1]) as other:
        options = ["--prompts", prompts, "--osl", 125, "--concurrency", "1,2", "-o", tmp_path / "r"]
        outcome = run("sweep", "--url", one, "--url", other, *options)
    assert outcome.code == 0, outcome.err
    store = ResultStore(tmp_path / "r")
    taus = {point.configuration: point.value("acceptance_length") for point in store.points()}
    assert [*taus] == [one.split("/")[2], other.split("/")[2]]
    assert [round(tau.mean, 2) for tau in taus.values() if tau] == [2.48, 2.48]
    described = {one["server"] for one in store.plan()["servers"].values()}
    assert described == {"vllm 9.9", "llamacpp"}


def test_failed_requests_are_counted_and_shown(sweep: Sweep, tmp_path: Path) -> None:
    outcome = sweep("--model", "failing", request_count=9)
    assert outcome.code == 0
    assert "3 of 9 requests failed" in outcome.err
    assert outcome.out.splitlines()[-1].endswith(" 3")
    records = _records(tmp_path / "results")
    failed = [record for record in records if not record.completed]
    assert len(records) == 9 and len(failed) == 3
    assert all(record.error == "the engine lost its block table" for record in failed)
    (point,) = json.loads((tmp_path / "results" / "points.json").read_text())
    assert (point["requests"], point["failed"]) == (9, 3)


def test_a_chat_model_is_asked_chats(sweep: Sweep, stub: Stub, tmp_path: Path) -> None:
    """As its template writes them; answers that end at once are told, and no result."""
    assert sweep("--model", "chatting").code == 0
    assert {one.output_tokens for one in _records(tmp_path / "results")} == {OSL}
    (tmp_path / "raw.yaml").write_text(
        f"repeats: 1\nrequest_count: 3\nconfigurations:\n- {{name: raw, model: chatting, "
        f"url: '{stub.grpc}', parameters: {{apply_chat_template: false}}}}\n"
    )
    prompts = data_folder("demo_pair") / "prompts.jsonl"
    outcome = sweep_yaml(
        ["--config", tmp_path / "raw.yaml", "--prompts", prompts], tmp_path / "raw"
    )
    outcome.fails(1, "every answer of a run was empty or ended after one token")
    assert "concurrency 1: 3 of 3 answers were empty or ended after one token" in outcome.err


def test_an_interrupted_sweep_goes_on(sweep: Sweep, tmp_path: Path) -> None:
    options = ["--concurrency", "1,2", "--model", "mortal"]
    with run_stub(tmp_path / "truth.jsonl") as dying:
        outcome = sweep(*options, "--url", dying.grpc, request_count=8)
    outcome.fails(1, "the server stopped answering", "repeat the command to continue")
    results = tmp_path / "results"
    before = {path: path.read_bytes() for path in results.glob("runs/*/*/*")}
    assert {path.parent.name for path in before} == {"c1-r0"}
    # The same server again: the port has changed, which for a moment is no other configuration.
    with run_stub(tmp_path / "truth.jsonl") as again:
        plan = json.loads((results / "sweep.json").read_text())
        plan["config"]["configurations"][0]["url"] = again.grpc
        (results / "sweep.json").write_text(json.dumps(plan))
        outcome = sweep(*options, "--url", again.grpc, request_count=8)
    assert outcome.code == 0, outcome.err
    assert "1 of 2 runs are there already" in outcome.err
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {run.load.slug for run in ResultStore(results).runs()} == {"c1", "c2"}
    assert len(json.loads((results / "sweep.json").read_text())["commands"]) == 2


def test_a_sweep_may_grow_and_nothing_else(sweep: Sweep, stub: Stub, tmp_path: Path) -> None:
    assert sweep().code == 0
    assert sweep("--concurrency", "2", repeats=2).code == 0
    results = tmp_path / "results"
    found = [(run.load.slug, run.repeat) for run in ResultStore(results).runs()]
    assert sorted(found) == [("c1", 0), ("c2", 0), ("c2", 1)]
    sweep("--osl", "5").fails(2, "holds another sweep: osl was 21, now 5", "--output-dir")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "other"}\n')
    sweep("--prompts", other).fails(2, "the prompts of", "not those of now")
    assert sweep("--model", "delta", "--json").code == 0
    assert {run.configuration for run in ResultStore(results).runs()} == {"tensorrt_llm", "delta"}


def test_it_measures_more_where_points_are_few(sweep: Sweep, tmp_path: Path) -> None:
    config = invented_config(
        concurrency=[1, 16], repeats=1, configurations=[{"name": "autoregressive", "url": "h:1"}]
    )
    points = write_invented(tmp_path / "invented", config).points()
    assert loads_between(points, [90.0]) == [OfferedLoad(concurrency=4)]
    assert loads_between(points, [1.0, 1e6]) == []
    # A server whose interactivity is the same under any load has no place to refine.
    outcome = sweep("--concurrency", "1,4", "--interactivity", "1")
    assert outcome.code == 0
    assert len(ResultStore(tmp_path / "results").runs()) == 2


def test_folders_of_something_else(sweep: Sweep, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("mine")
    sweep().fails(2, "is no folder of a sweep and not empty")
    (results / "sweep.json").write_text("{}")
    sweep().fails(2, "is not of format")
    assert {path.name for path in results.iterdir()} == {"thesis.txt", "sweep.json", ".lock"}


def test_one_sweep_at_a_time(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with (tmp_path / "results" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep().fails(1, "another sweep is at work there")


@pytest.mark.parametrize(
    ("words", "code", "piece"),
    [
        ("--model broken", 1, "all 4 requests failed"),
        ("--model broken", 1, "lost its block table"),
        ("--model hanging", 1, "no final response within 0.2 s"),
        ("--url 127.0.0.1:1", 1, "127.0.0.1:1: no Triton server answers there"),
        ("--model nobody", 1, "unknown model: 'nobody'"),
        ("--url http://127.0.0.1:1", 1, "no OpenAI-compatible server answers there"),
        ("--url HTTP --model nobody", 2, "has no model 'nobody'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    sweep: Sweep, stub: Stub, tmp_path: Path, words: str, code: int, piece: str
) -> None:
    """By the server or its model; what the command line refuses alone is frozen."""
    limit = {"timeout_s": 0.2} if "hanging" in words else {}
    sweep(*words.replace("HTTP", stub.http).split(), **limit).fails(code, piece)
    assert not list(tmp_path.glob("results/runs/*/*"))


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("kind: chat, inputs: {top_k: 3}", "inputs belong to kind llm-api"),
        ("inputs: {sampling_param_topk: 3}", "nearest: 'sampling_param_top_k'"),
        ("inputs: {sampling_param_top_k: many}", "sampling_param_top_k: is INT32"),
    ],
)
def test_inputs_that_no_model_has_are_refused(
    stub: Stub, prompts: Path, tmp_path: Path, text: str, piece: str
) -> None:
    config = tmp_path / "sweep.yaml"
    config.write_text(f"configurations:\n- {{name: x, url: '{stub.grpc}', {text}}}\n")
    more: list[object] = ["--config", config, "--prompts", prompts]
    sweep_yaml(more, tmp_path / "one").fails(2, piece)


def test_eos_may_be_ignored_by_a_request_parameter(sweep: Sweep) -> None:
    outcome = sweep("--model", "stopping", ignore_eos=True)
    assert outcome.code == 0
    assert "4 requests ended early: the server does not ignore eos" in outcome.err
    heeded = sweep("--model", "parameters", ignore_eos=True).err
    assert (
        heeded.count("ended early") == 1 and "parameters, concurrency 1: 4 requests e" not in heeded
    )


@pytest.mark.parametrize(
    ("module", "arguments"),
    [("scipy", []), ("tritonclient", []), ("aiohttp", ["--url", "http://a:1"])],
)
def test_a_missing_extra_is_one_line(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, module: str, arguments: list[str]
) -> None:
    found = extra.find_spec
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == module else found(name))
    sweep(*arguments).fails(1, f"needs {module}", "pip install -e '.[perf]'")


def test_an_interruption_keeps_what_is_finished(stub: Stub, prompts: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_trt", "sweep", "--url", stub.grpc]
    command += ["--prompts", str(prompts), "--osl", "5", "--concurrency", "1,2"]
    (tmp_path / "own.yaml").write_text("repeats: 400\nrequest_count: 20\n")
    command += ["--config", str(tmp_path / "own.yaml"), "-o", str(tmp_path / "results")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("20 of 20 requests" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in rest, rest
    assert rest.splitlines()[-1] == "interrupted"
    assert ResultStore(tmp_path / "results").runs()
    assert len(list((tmp_path / "results").glob("runs/*/*"))) < 50


def test_an_open_loop_sends_whatever_completes(sweep: Sweep, tmp_path: Path) -> None:
    """For a time; interactivities that nobody reached, or that all exceed, are told."""
    timed = {"request_count": None, "duration_s": 0.4, "request_rate": [80.0]}
    outcome = sweep("--interactivity", "1,100000", **timed)
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("tensorrt_llm: ≥ ") == 1
    assert outcome.out.count("tensorrt_llm: not measured; nearest") == 1
    store = ResultStore(tmp_path / "results")
    (open_run,) = [one for one in store.runs() if one.load.request_rate]
    assert open_run.load.label == "80 requests/s"
    assert 2 <= open_run.requests == open_run.completed < 80
    assert all(record.completed for record in store.requests(open_run))
