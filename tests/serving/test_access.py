"""Keys, their limits, names, TLS and the log of the OpenAI front."""

from __future__ import annotations

import io
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from dflash_trt.errors import DflashError
from dflash_trt.serving.openai import access, front_options
from dflash_trt.serving.openai.figures import ANSWERS, FRONT_KINDS, FrontFigures
from dflash_trt.serving.openai.front_options import KEYS_VARIABLE, FrontOptions, KeyRing
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import Front, ScriptedModel, switching_front
from tests.waiting import PATIENCE_S, wait_until

ONE, TWO = "one-" + "k" * 20, "two-" + "k" * 20
TOKENS = 17  # of a request of `ScriptedModel`, prompt and answer
METRICS = b"# TYPE dflash_prompt_tokens_total counter\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("access")
    write_tokenizer(folder, None)
    (folder / "keys").write_text(f"# ours\n{ONE}\n\n  {TWO}  \n")
    return folder


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    options = FrontOptions(
        model_names=("demo", "gpt-4o"),
        key_file=folder / "keys",
        key_requests=2,
        log_format="json",
    )
    with switching_front(
        folder, options, figures=FrontFigures(lambda: METRICS, model='a"b')
    ) as front:
        yield front


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def ask(url: str, key: str, model: str = "gpt-4o", **options: Any) -> Any:
    return client(url, key).completions.create(model=model, prompt="count", **options)


Log = Callable[[int], list[Any]]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Reads so many lines; a request's is written once its answer has been sent."""
    written, seen = io.StringIO(), 0
    monkeypatch.setattr(access, "sys", SimpleNamespace(stderr=written))

    def read(count: int) -> list[Any]:
        nonlocal seen
        wait_until(lambda: written.getvalue().count("\n") >= seen + count)
        lines = written.getvalue().splitlines()[seen:]
        seen += count
        assert len(lines) == count
        return [json.loads(line) for line in lines]

    return read


def test_only_a_good_key_is_let_in(front: Front, log: Log) -> None:
    url = front(ScriptedModel())
    for wrong in ("none", ONE[:-1], ONE + "x", TWO.upper()):
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(url, wrong)
        assert refused.value.code == "invalid_api_key"
        assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"
        assert refused.value.response.headers["X-Request-Id"]
    headers = ("Bearer " + "é" * 20, f"Basic {ONE}", ONE)
    closed = ("tokenize", "tokenizer_info", "version", "load", "v1/models/")
    tried = *(("v1/models", one) for one in headers), *((path, ONE) for path in closed)
    for path, wrong in tried:
        asked = urllib.request.Request(f"{url}/{path}", headers={"Authorization": wrong})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(asked)
    assert [one.id for one in client(url, ONE).models.list()] == ["demo", "gpt-4o"]
    with urllib.request.urlopen(f"{url}/health") as health:
        assert health.status == 200  # who watches it needs no key
    with urllib.request.urlopen(f"{url}/metrics") as metrics:
        text = metrics.read()
    assert text.endswith(METRICS)
    for name, kind in FRONT_KINDS.items():
        assert f"# TYPE {name} {kind}\n".encode() in text and f"# HELP {name} ".encode() in text
    counted = f'{ANSWERS}{{model="a\\"b",path="/v1/completions",code="401"}} 4\n'
    assert counted.encode() in text and b'dflash_ready{model="a\\"b"} 1\n' in text
    lines = log(15)
    assert [line["status"] for line in lines] == [401] * 12 + [200] * 3
    assert not any(key in json.dumps(lines) for key in (ONE, TWO))
    with urllib.request.urlopen(f"{front(ScriptedModel(ready=False))}/metrics") as metrics:
        assert b'dflash_ready{model="a\\"b"} 0\n' in metrics.read()
    log(1)


def test_a_key_has_its_share_of_requests(front: Front, log: Log) -> None:
    model = ScriptedModel(endless=True)
    url = front(model)
    streams = [ask(url, ONE, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 outputs of this key are in flight") as full:
        ask(url, ONE)
    assert full.value.response.headers["Retry-After"]
    for stream in streams:
        next(iter(stream))
        stream.close()
    wait_until(lambda: len(model.finished) == 2)
    refused, *cut = log(3)
    with pytest.raises(openai.BadRequestError, match="3 outputs are more than the 2"):
        ask(url, ONE, n=3)
    stream = ask(url, ONE, stream=True)
    with pytest.raises(openai.RateLimitError, match="1 outputs of this key are in flight"):
        ask(url, ONE, n=2)
    stream.close()
    wait_until(lambda: len(model.finished) == 3)
    log(3)
    assert refused["status"] == 429 and not any(line["output_tokens"] for line in cut)
    assert ask(front(ScriptedModel()), ONE).usage.total_tokens == TOKENS
    (line,) = log(1)
    assert line["prompt_tokens"] + line["output_tokens"] == TOKENS and line["warnings"] is None
    ask(url, ONE, extra_body={"structured_outputs": {"json": {"contains": {"type": "null"}}}})
    assert log(1)[0]["warnings"] == 1


def test_keys_change_while_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(front_options, "_LOOK_S", 0.0)
    file = folder / "rotated"
    file.write_text(f"{ONE}\n")
    ring = KeyRing(file, f"{'e' * 16}, {'f' * 16}")
    name = ring.find(ONE)
    assert name is not None and len(name) == 8 and ring.find(TWO) is None
    new = folder / "new"
    new.write_text(f"{TWO}\n")
    new.replace(file)
    assert ring.find(ONE) is None and ring.find(TWO) and ring.find("f" * 16)
    for none in ("short\n", "", "# nobody\n"):
        file.write_text(none)
        assert ring.find(TWO) and ring.find(TWO)
        assert capsys.readouterr().err.count("keys stay as they were") == 1
    file.write_text(f"{ONE}\n")
    assert ring.find(ONE) and ring.find(TWO) is None


def test_keys_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    for content, what in (
        ("# nothing\n", "holds no key"),
        (f"{ONE}\nshort\n", "key 2 is not 16 or more characters"),
        ("é" * 20, "key 1 is not 16 or more characters of ASCII"),
    ):
        file.write_text(content)
        with pytest.raises(DflashError, match=what) as refused:
            FrontOptions(key_file=file).open_keys()
        assert "short" not in refused.value.message
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert FrontOptions().open_keys() is None
    with pytest.raises(DflashError, match="there are none"):
        FrontOptions(key_requests=1).open_keys()
    monkeypatch.setenv(KEYS_VARIABLE, ONE)
    assert FrontOptions(key_requests=1).open_keys() is not None


def _make_key(folder: Path, *options: str) -> FrontOptions:
    """A certificate of this machine and its key."""
    made = (
        "openssl req -x509 -newkey rsa:2048 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run([*made.split(), *options], cwd=folder, check=True, capture_output=True)
    return FrontOptions(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")


def test_it_speaks_tls(folder: Path) -> None:
    options = _make_key(folder, "-nodes")
    options.check_tls()
    with switching_front(folder, options) as front:
        url = front(ScriptedModel())
        trusted = ssl.create_default_context(cafile=folder / "cert.pem")
        with urllib.request.urlopen(f"{url}/health", context=trusted) as health:
            assert url.startswith("https:") and health.status == 200


def test_certificates_that_are_none(tmp_path: Path) -> None:
    locked = _make_key(tmp_path, "-passout", "pass:secret")  # nobody is asked for the password
    swapped = FrontOptions(tls_cert=locked.tls_key, tls_key=locked.tls_cert)
    for options in (locked, swapped):
        with pytest.raises(DflashError, match="is no certificate that fits its key"):
            options.check_tls()
    with pytest.raises(DflashError, match="needs --tls-cert too"):
        FrontOptions(tls_key=locked.tls_key).check_tls()


def test_web_pages_of_an_origin_may_ask(front: Front, folder: Path) -> None:
    """A browser asks first whether it may, without a key; what is refused it may read."""
    page = "https://page.example"
    asks = {"Origin": page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"

    def ask_as(url: str, method: str) -> tuple[int, Any]:
        asked = urllib.request.Request(f"{url}/v1/chat/completions", headers=asks, method=method)
        with pytest.raises(urllib.error.HTTPError) as answered:
            urllib.request.urlopen(asked)
        return answered.value.code, answered.value.headers["Access-Control-Allow-Origin"]

    assert ask_as(front(ScriptedModel()), "OPTIONS") == (401, None)
    options = FrontOptions(origins=(page,), key_file=folder / "keys")
    options.check_origins()
    with switching_front(folder, options) as open_front:
        url = open_front(ScriptedModel())
        asked = urllib.request.Request(f"{url}/v1/responses", headers=asks, method="OPTIONS")
        with urllib.request.urlopen(asked) as may:
            assert may.headers["Access-Control-Allow-Origin"] == page
            assert "authorization" in may.headers["Access-Control-Allow-Headers"]
        assert ask_as(url, "POST") == (401, page)
        asks["Origin"] = "https://other.example"
        assert ask_as(url, "OPTIONS") == (400, None)
    for wrong in ("page.example", "https://page.example/", "HTTPS://a", ""):
        with pytest.raises(DflashError, match="neither"):
            FrontOptions(origins=(wrong,)).check_origins()
