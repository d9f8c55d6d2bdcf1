"""The OpenAI front as its clients see it, before a model that follows a script."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from tokenizers import Tokenizer

from dflash_trt.errors import DflashError
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.openai.body import MAX_BODY_BYTES, MAX_VALUES
from dflash_trt.serving.openai.chat_request import read_chat
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.tokenization import MAX_CHARACTERS
from dflash_trt.text.sandbox import Sandbox, SandboxLostError
from dflash_trt.version import __version__
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import Front, ScriptedModel, openai_client, post, switching_front
from tests.serving.served import fetch
from tests.waiting import PATIENCE_S, wait_until

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "count"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "count"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    with switching_front(folder) as front:
        yield front


def test_completion(front: Front) -> None:
    model = ScriptedModel()
    answer = openai_client(front(model)).completions.create(**PROMPT)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert [(one.text, one.finish_reason) for one in answer.choices] == [("one two", "length")]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
    assert counts == (7, 10, 17)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 14)
    assert model.asked[0].prompt == "count" and not model.asked[0].streaming
    assert model.wait_finished() == "done"


def test_samples_of_prompts(front: Front) -> None:
    """Whole and as a stream: the same choices, in prompts' order, and one usage of all."""
    model = ScriptedModel(cached=5)
    asked = openai_client(front(model)).completions
    fields: dict[str, Any] = {"model": "demo", "prompt": ["count", [3, 5]], "n": 2, "seed": 4}
    whole = asked.create(**fields)
    assert [(one.index, one.text) for one in whole.choices] == [(i, "one two") for i in range(4)]
    assert {(one.prompt, one.sampling.seed) for one in model.asked} == {
        (prompt, seed) for prompt in ("count", (3, 5)) for seed in (4, 5)
    }
    usage = whole.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (14, 40)
    assert usage.prompt_tokens_details.cached_tokens == 10
    chunks = list(asked.create(**fields, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["one two"] * 4 and chunks[-1].usage == usage
    ended = [one.choices[0].index for one in chunks[:-1] if one.choices[0].finish_reason]
    assert sorted(ended) == [0, 1, 2, 3]
    chat = openai_client(front(ScriptedModel())).chat.completions.create(**CHAT, n=2)
    assert [one.message.content for one in chat.choices] == ["one two"] * 2


def test_one_sample_that_fails_ends_all(front: Front) -> None:
    model = ScriptedModel(["one ", ServedModelError("lost", "failed")], endless=True)
    client = openai_client(front(model))
    with pytest.raises(openai.InternalServerError, match="lost"):
        client.completions.create(**PROMPT, n=3)
    with pytest.raises(openai.APIError, match="lost"):
        list(client.completions.create(**PROMPT, n=3, stream=True))
    assert len(model.finished) == 6 and {*model.finished} <= {"failed", "cancelled"}


def test_the_bytes_of_a_stream(front: Front) -> None:
    model, options = ScriptedModel(), {"stream_options": {"include_usage": True}}
    body = PROMPT | {"stream": True} | options
    status, text, headers = post(front(model), "/v1/completions", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *events, done, end = text.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    *chunks, last = (json.loads(event.removeprefix("data: ")) for event in events)
    assert [one["choices"][0]["text"] for one in chunks] == ["one ", "two", ""]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None, None, "length"]
    assert not any(one["usage"] for one in chunks) and last["usage"]["total_tokens"] == 17
    assert len({one["id"] for one in (*chunks, last)}) == 1 and model.asked[0].streaming


def _ask(url: str, path: str, body: Any) -> tuple[list[Any], list[Any]]:
    """The reply, or the chunks of a stream; and the choices in them."""
    status, content, _ = post(url, path, body)
    assert status == 200, content
    events = [one for one in content.decode().split("\n\n") if "[DONE]" not in one and one]
    replies = [json.loads(one.removeprefix("data: ")) for one in events]
    return replies, [one for reply in replies for one in reply["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompts_that_are_cut(front: Front, folder: Path, stream: bool) -> None:
    core, model = Tokenizer.from_file(str(folder / "tokenizer.json")), ScriptedModel()
    model.token_ids = ((4, 5), (6,))
    texts, url = ("count", "<user>count<end><answer>"), front(model)
    cut, of_chat = (core.encode(one, add_special_tokens=False).ids[-2:] for one in texts)
    asked = {"stream": stream, "return_token_ids": True, "truncate_prompt_tokens": 2, "n": 2}
    asked |= {"request_id": "r-1"}
    body = PROMPT | asked | {"prompt": ["count", [3, 5, 7]], "echo": True}
    _, choices = _ask(url, "/v1/completions", body)
    told = {one["index"]: one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one}
    assert told == {0: cut, 1: cut, 2: [5, 7], 3: [5, 7]}
    assert {one.prompt for one in model.asked} == {tuple(cut), (5, 7)}
    replies, chats = _ask(url, "/v1/chat/completions", CHAT | asked)
    assert {one["id"] for one in replies} == {"chatcmpl-r-1"}
    assert replies[0]["prompt_token_ids"] == of_chat and model.asked[-1].prompt == tuple(of_chat)
    for some, count in ((choices, 4), (chats, 2)):
        for index in range(count):
            ids = [one["token_ids"] for one in some if one["index"] == index]
            assert [*chain(*ids)] == [4, 5, 6]
    # What fits is what the context of 512 leaves.
    for fields, most in (({"max_tokens": 12}, 500), ({}, 511)):
        long = [{"role": "user", "content": "a" * 600}]
        fields |= {"messages": long, "truncate_prompt_tokens": -1}
        _ask(url, "/v1/chat/completions", CHAT | fields)
        assert len(model.asked[-1].prompt) == most


def test_usage_of_each_chunk(front: Front) -> None:
    """As vLLM tells it: of the chunk's choice so far."""
    url = front(ScriptedModel(token_ids=((4, 5), (6,))))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = PROMPT | {"prompt": ["count", [3]], "stream": True, "stream_options": options}
    (*chunks, last), _ = _ask(url, "/v1/completions", body)
    for index, prompt in ((0, 5), (1, 1)):
        some = [one["usage"] for one in chunks if one["choices"][0]["index"] == index]
        assert [one["completion_tokens"] for one in some] == [2, 3, 3]
        assert all(one["total_tokens"] == prompt + one["completion_tokens"] for one in some)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 20


def test_where_a_message_goes_on() -> None:
    """Behind its text, with its blanks where the template keeps them."""
    goes_on = {"model": "demo", "continue_final_message": True}
    begun = [*CHAT["messages"], {"role": "assistant", "content": "one, "}]
    chat = read_chat(goes_on | {"messages": begun}).chat
    assert chat is not None and not chat.opens
    with pytest.raises(ApiError, match="the last message has no text"):
        read_chat(goes_on | {"messages": [{"role": "user", "content": " "}]})
    said = chat.messages[-1]["content"]
    assert chat.cut(f"<a>{said}</a>") == "<a>one, "
    assert chat.cut(f"<a>{said.strip()}</a>") == "<a>one,"
    with pytest.raises(ApiError, match="does not show the last message"):
        chat.cut("<a></a>")


def test_chat(front: Front) -> None:
    model = ScriptedModel()
    answer = openai_client(front(model)).chat.completions.create(**CHAT)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "one two")
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    (asked,) = model.asked
    assert asked.prompt == "<user>count<end><answer>" and not asked.add_special_tokens
    begun = [*CHAT["messages"], {"role": "assistant", "content": "one, "}]
    for fields, behind in (
        ({"messages": begun}, "<assistant>one, <end><answer>"),
        ({"messages": begun, "add_generation_prompt": False}, "<assistant>one, <end>"),
        ({"messages": begun, "continue_final_message": True}, "<assistant>one, "),
    ):
        assert post(front(model), "/v1/chat/completions", CHAT | fields)[0] == 200
        assert model.asked[-1].prompt == "<user>count<end>" + behind


def test_a_template_whose_process_is_killed_is_not_the_clients_fault(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object) -> None:
        raise SandboxLostError("the process that does this was killed, twice")

    url = front(ScriptedModel())
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "ask", lose)
        status, content, headers = post(url, "/v1/chat/completions", CHAT)
    assert status == 503 and headers["Retry-After"] and b"was killed, twice" in content
    assert post(url, "/v1/chat/completions", CHAT)[0] == 200


def test_tokens_there_and_back(front: Front, folder: Path) -> None:
    """The tokenizer's own answers."""
    url, text = front(ScriptedModel()), "é red\nfox"
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = core.encode(text).ids

    def ask(path: str, body: Any) -> Any:
        status, answer, _ = post(url, path, body)
        assert status == 200, answer
        return json.loads(answer)

    expected = {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    for model in ({}, {"model": "demo"}):
        assert ask("/tokenize", {"prompt": text} | model) == expected
    named = ask("/tokenize", {"prompt": text, "return_token_strs": True})
    assert named["token_strs"] == [core.id_to_token(one) for one in ids]
    assert ask("/detokenize", {"tokens": ids}) == {"prompt": text}
    assert ask("/detokenize", {"tokens": []}) == {"prompt": ""}
    chat = {"messages": [{"role": "user", "content": text}]}
    rendered = core.encode(f"<user>{text}<end><answer>", add_special_tokens=False).ids
    assert ask("/tokenize", chat)["tokens"] == rendered


def test_models_and_health(front: Front) -> None:
    model = ScriptedModel()
    url = front(model)
    client = openai_client(url)
    assert [one.id for one in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").to_dict()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    for ready, status in ((False, 503), (True, 200)):
        model.ready = ready
        for path in ("/health", "/ping/", "/v1/models/", "/v1/models/demo"):
            assert fetch(urlsplit(url).netloc, path, method="GET")[0] == status, path


def test_what_tools_ask_of_a_server(front: Front) -> None:
    """As vLLM answers it, with a slash at the end of a path and without."""

    def get(path: str) -> Any:
        return json.loads(fetch(urlsplit(url).netloc, path, method="GET")[1])

    model = ScriptedModel(endless=True)
    url = front(model)
    assert get("/version") == {"version": __version__}
    tokenizer = get("/tokenizer_info/")
    assert tokenizer["chat_template"] == TEMPLATE and tokenizer["eos_token"] == "<end>"
    assert tokenizer["bos_token"] is None
    wait_until(lambda: get("/load/") == {"server_load": 0})
    with openai_client(url).completions.create(**PROMPT, stream=True) as stream:
        next(iter(stream))
        assert get("/load") == {"server_load": 1}
    assert model.wait_finished() == "cancelled"
    wait_until(lambda: get("/load") == {"server_load": 0})
    status, _, _ = post(front(ScriptedModel()), "/v1/chat/completions/", CHAT)
    assert status == 200


TOOL = {"type": "function", "function": {"name": "f"}}
NO_SYSTEM = {"messages": [{"role": "system", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "piece"),
    [
        ("completions", b"{", 400, None, "not valid JSON"),
        ("completions", b"\xff", 400, None, "UTF-8"),
        ("completions", b'{"model": "demo", "model": "demo"}', 400, None, "given twice"),
        ("completions", b'{"temperature": NaN}', 400, None, "NaN"),
        ("completions", b"[" * 50_000, 400, None, "nested"),
        ("completions", b"[" + b"[]," * MAX_VALUES + b"[]]", 400, None, "more than 100,000 JSON"),
        ("completions", b" " * (MAX_BODY_BYTES + 1), 413, None, "16 MiB"),
        ("completions", PROMPT | {"model": "gpt-4"}, 404, "model", "only 'demo'"),
        ("chat/completions", CHAT | {"model": "gpt-4"}, 404, "model", "only 'demo'"),
        ("chat/completions", CHAT | {"tools": [{}]}, 400, "tools[0].type", "required"),
        (
            "chat/completions",
            CHAT | {"reasoning_effort": "low"},
            400,
            "reasoning_effort",
            "no given",
        ),
        ("chat/completions", CHAT | NO_SYSTEM, 400, None, "refuses the conversation: no system"),
        ("embeddings", {}, 404, None, "/v1/embeddings: Not Found"),
        ("models", {}, 405, None, "Method Not Allowed"),
        *(
            ("../tokenize", one, 400, param, "")
            for one, param in (
                ({}, "prompt"),
                ({"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
                ({"prompt": "a", "tools": [TOOL]}, "tools"),
                ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
                ({"prompt": "a" * (MAX_CHARACTERS + 1)}, "prompt"),
            )
        ),
        ("../tokenize", {"prompt": "a", "model": "other"}, 404, "model", "only 'demo'"),
        *(("../detokenize", {"tokens": [one]}, 400, "tokens[0]", "") for one in (-1, 299999)),
    ],
)
def test_refusals(
    front: Front, path: str, body: Any, status: int, param: str | None, piece: str
) -> None:
    model = ScriptedModel()
    url = front(model)
    got, answer, _ = post(url, f"/v1/{path}".replace("/v1/../", "/"), body)
    error = json.loads(answer)["error"]
    assert (got, error["param"]) == (status, param)
    assert error.keys() == {"message", "type", "param", "code"}
    assert piece in error["message"] and "--raw" not in error["message"]
    assert error["type"] == "invalid_request_error" and not model.asked
    assert post(url, "/v1/completions", PROMPT)[0] == 200


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with switching_front(tmp_path) as front:
        status, answer, _ = post(front(ScriptedModel()), "/v1/chat/completions", CHAT)
        assert status == 400 and b"no chat template" in answer


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ServedModelError("top_k: wrong", "refused"), 400, "invalid_request_error"),
        (
            ServedModelError("prompt: 70 tokens do not fit: the context of 64", "refused"),
            400,
            "invalid_request_error",
        ),
        (ServedModelError("the queue is full", "unavailable", where="h:1"), 503, "server_error"),
        (ServedModelError("the deadline has passed", "overdue", where="h:1"), 504, "server_error"),
        (ServedModelError("the executor failed", "failed", where="h:1"), 500, "server_error"),
        (ServedModelError("was cancelled", "cancelled"), 500, "server_error"),
    ],
)
def test_what_the_model_says_no_to(
    front: Front, error: DflashError, status: int, kind: str, streaming: bool
) -> None:
    url = front(ScriptedModel(pieces=[error]))
    got, answer, headers = post(url, "/v1/completions", PROMPT | {"stream": streaming})
    told = json.loads(answer)["error"]
    assert (got, told["type"], told["message"]) == (status, kind, error.what)
    assert (told["code"] == "context_length_exceeded") == ("do not fit" in error.what)
    assert ("retry-after" in headers) == (status == 503)
    assert headers.get("x-should-retry") == ("false" if status == 504 else None)


def test_an_error_in_the_middle_of_a_stream(front: Front) -> None:
    model = ScriptedModel(pieces=["one ", ServedModelError("the executor failed", "failed")])
    seen = []
    with pytest.raises(openai.APIError, match="the executor failed"):
        for chunk in openai_client(front(model)).completions.create(**PROMPT, stream=True):
            seen.append(chunk.choices[0].text)
    assert seen == ["one "]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pieces", [(), ("one ",)])
def test_a_client_that_hangs_up(front: Front, streaming: bool, pieces: tuple[str, ...]) -> None:
    model = ScriptedModel(pieces=pieces, endless=True)
    connection = http.client.HTTPConnection(urlsplit(front(model)).netloc, timeout=PATIENCE_S)
    with closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(PROMPT | {"stream": streaming}))
        if streaming:
            assert connection.sock.recv(10).startswith(b"HTTP/1.1 2")
        else:
            wait_until(lambda: bool(model.asked))
    assert model.wait_finished() == "cancelled"
