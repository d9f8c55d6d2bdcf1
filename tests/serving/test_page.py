"""The page in a real browser, before the demo pair and before models that say anything."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.decoding.request import ORIGINS, TokenOrigin
from dflash_trt.serving.client.client import GenerationRequest, TextDelta
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.serving.openai.page import join_page
from tests.cli.bigram import write_tokenizer
from tests.serving.chromium import Tab, find_chromium, open_tab
from tests.serving.fronts import Front, ScriptedModel, result_of, switching_front
from tests.serving.served import PROMPTS, SERVER_PORTS, SLOTS, Served, fetch, starting, wait_ready
from tests.serving.test_tokens import kept_of, stream_of, tokens_of

KEY = "a-key-of-the-page-0123"
DEAD_MS = 3000
ANSWER = "document.querySelector('.message.answer:last-child')"
SPANS = f"[...{ANSWER}.querySelectorAll('[data-at]')]"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
in_browser = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with open_tab(chromium) as opened:
        yield opened
        assert not [one for one in opened.errors if "Failed to load resource" not in one]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with switching_front(folder, FrontOptions(model_names=("demo<b>&",))) as front:
        yield front


def _open(tab: Tab, url: str, **how: Any) -> None:
    tab.open(url.removesuffix("/v1") + "/", **how)
    tab.wait("served.model")


def _read(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector('{selector}').innerText"))


def _ask(tab: Tab, prompt: str) -> str:
    """Sends a prompt, and returns the text of its answer."""
    before = tab.run("document.querySelectorAll('.answer').length")
    tab.run("document.querySelector('#prompt').focus()")
    tab.call("Input.insertText", text=prompt)
    tab.press("Enter")
    tab.wait(f"document.querySelectorAll('.answer').length > {before} && !running")
    return str(tab.run(f"{ANSWER}.innerText"))


def test_it_is_one_small_file_with_a_policy(front: Front) -> None:
    status, page, headers = fetch(urlsplit(front(ScriptedModel())).netloc, "/", b"", "GET")
    assert status == 200 and page == join_page()[0] and len(page) <= 60_000
    policy = headers["Content-Security-Policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    text = page.decode()
    assert {*re.findall(r"https?://([^'\"/\s]+)", text)} == {"www.w3.org"}  # of SVG, a name
    assert not re.search(r"\son\w+=|\sstyle=|<link[^>]+href=\"[^d]", text)


def test_it_can_be_left_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with switching_front(tmp_path, FrontOptions(page=False)) as front:
        assert fetch(urlsplit(front(ScriptedModel())).netloc, "/", b"", "GET")[0] == 404


@in_browser
def test_colours_are_the_server_s_count(tab: Tab, served: Served) -> None:
    """Token by token those of the stream, and in all those of its statistics."""
    _open(tab, served.openai)
    tab.asked.clear()
    _ask(tab, PROMPTS[0])
    choices, usage = stream_of(served, **tab.run("(chat.messages.pop(), readSettings(''))"))
    tokens = tokens_of(choices[0])
    assert tab.run(f"{SPANS}.map((one) => one.className)") == [one["origin"] for one in tokens]
    details = usage["completion_tokens_details"]
    assert PROMPTS[0][:9] in _read(tab, "#past")
    count = tab.run(f"{SPANS}.filter((one) => one.className !== 'target').length")
    assert count == kept_of(choices[0]) == details["accepted_prediction_tokens"] > 0
    length = (len(tokens) - 1) / details["num_verify_steps"]
    assert float(_read(tab, "#length")) == round(length, 2)
    text = "".join(one["delta"].get("content", "") for one in choices[0])
    assert tab.run(f"{SPANS}.map((one) => one.textContent).join('')") == text
    assert {urlsplit(one).netloc for one in tab.asked} == {urlsplit(served.openai).netloc}
    tab.run(f"{SPANS}[0].dispatchEvent(new MouseEvent('mouseover', {{bubbles: true}}))")
    told = _read(tab, "#detail")
    assert "target’s own" in told and "log-probability" in told
    tab.run(f"{ANSWER}.focus()")
    tab.press("ArrowRight")
    assert tab.run("document.querySelector('.current').dataset.at") == "1"
    shown = _read(tab, "#served")
    assert all(word in shown for word in ("demo", "dflash", "fixed", f"of {SLOTS}"))


@in_browser
def test_a_schema_s_tokens_have_a_colour_of_their_own(tab: Tab, served: Served) -> None:
    _open(tab, served.openai)
    schema = '{"type": "object", "properties": {"x": {"enum": [12]}}, "required": ["x"]}'
    tab.fill("#schema", schema)
    _ask(tab, "crew")
    assert "grammar" in tab.run(f"{SPANS}.map((one) => one.className)")


@in_browser
def test_a_race_ends_identical(tab: Tab, served: Served) -> None:
    _open(tab, served.openai)
    tab.click("#tab-race")
    tab.fill("#course-prompt", PROMPTS[1])
    tab.fill("#course-most", "80")
    tab.click("#start")
    tab.wait("document.querySelector('#verdict b')")
    assert _read(tab, "#verdict b") == "identical: 80 tokens"
    texts = tab.run("lanes().map((one) => one.querySelector('.text').textContent)")
    assert texts[0] == texts[1] != ""
    assert tab.run("lanes().map((one) => !!one.querySelector('.text .draft'))") == [False, True]


@in_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_scrolls_sideways(tab: Tab, served: Served, width: int) -> None:
    _open(tab, served.openai, width=width, height=800)
    tab.fill("#most", "40")
    _ask(tab, "x" * 300)
    tab.run("document.querySelector('details').open = true")
    for view in ("chat", "race", "figures"):
        tab.click(f"#tab-{view}")
        assert tab.run(FITS), view


@in_browser
def test_stop(tab: Tab, front: Front) -> None:
    model = ScriptedModel(endless=True)
    _open(tab, front(model))
    tab.fill("#prompt", "go on")
    tab.click("#send")
    tab.wait(f"{ANSWER}.textContent.includes('more')")
    tab.click("#stop")
    tab.wait("!running")
    assert model.wait_finished() == "cancelled" and "stopped" in tab.run(f"{ANSWER}.innerText")


@dataclass
class Hostile(ScriptedModel):
    """Says its pieces, with a token for each."""

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        for place, text in enumerate(self.pieces):
            origin = TokenOrigin(place % 4, ORIGINS[place % 3])
            yield TextDelta(text=str(text), token_ids=(place % 4,), origins=(origin,))
        yield TextDelta(text="", result=result_of("", "stop"))


@in_browser
def test_no_turn_is_lost(tab: Tab, front: Front) -> None:
    """What another wrote in the storage is left out; a chat left in mid-answer is kept."""
    _open(tab, front(ScriptedModel()))
    for foreign in ("{", "{}", "[null, 1, {}]"):
        tab.run(f"localStorage.setItem(PLACE, {foreign!r})")
        _open(tab, front(ScriptedModel(endless=True)))
        assert tab.run("chats()") == []
    tab.fill("#prompt", "left alone")
    tab.click("#send")
    tab.wait(f"{ANSWER}.textContent.includes('more')")
    tab.click("#fresh")
    tab.wait("!running && chats().length")
    kept = tab.run("chats()[0].messages")
    assert kept[0]["content"] == "left alone" and "more" in kept[1]["content"]
    _open(tab, front(ScriptedModel()))
    tab.run("served.model = 'another'")
    assert "no such model" in _ask(tab, "refused")
    assert tab.run("[$('prompt').value, chat.messages.length]") == ["refused", 0]


@in_browser
def test_hostile_text_is_text(tab: Tab, front: Front) -> None:
    script = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    pieces = [script, "\x1b[31mred\x07", "\u202edesrever\u2066", "a" * 100_000, "\x00 end"]
    _open(tab, front(Hostile(pieces=pieces)))
    assert _read(tab, "#model") == "demo<b>&"
    said = _ask(tab, script + "\u202e")
    for again in (False, True):
        for part in (script, "␛[31mred␇", "⟨U+202E⟩desrever⟨U+2066⟩", "a" * 100_000, "␀ end"):
            assert part in said
        assert not tab.run("window.hit || document.querySelector('#log img')") and tab.run(FITS)
        if not again:  # and as it comes out of the history
            _open(tab, front(Hostile()))
            tab.run("(chat = chats()[0], showChat())")
            said = tab.run(f"{ANSWER}.innerText")


@in_browser
def test_a_key_is_asked_for(tab: Tab, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "keys").write_text(KEY)
    with switching_front(tmp_path, FrontOptions(key_file=tmp_path / "keys")) as front:
        tab.open(front(ScriptedModel()))
        for key, note in (("wrong", "stays in this tab"), (KEY, "not good")):
            tab.wait("document.querySelector('dialog').open")
            assert note in _read(tab, "#key-note")
            tab.fill("#key", key)
            tab.click("dialog button")
        tab.wait("served.model")
        assert "one two" in _ask(tab, "hello")
        assert KEY not in tab.run("document.cookie + JSON.stringify(localStorage)")


@in_browser
def test_a_dead_server_is_told_and_its_return(tab: Tab, served: Served) -> None:
    arguments: list[object] = [served.bundle, *SERVER_PORTS]
    with ExitStack() as stack:
        process = stack.enter_context(starting(*arguments, "--openai-port", "0"))
        url = wait_ready(process)["OpenAI"]
        _open(tab, url)
        assert tab.run("LOOK_MS + PATIENCE_MS") < DEAD_MS
        process.terminate()
        process.wait()
        tab.wait("document.querySelector('#alert').textContent.includes('does not answer')")
        again = starting(*arguments, "--openai-port", urlsplit(url).port)
        wait_ready(stack.enter_context(again))
        tab.wait("document.querySelector('#alert').hidden")
        assert _ask(tab, PROMPTS[2])
