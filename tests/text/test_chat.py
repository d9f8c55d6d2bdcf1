"""Chat templates: what published ones need works, what hostile ones try is stopped."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import DflashError
from dflash_trt.text import chat
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.tokenizer import BundleTokenizer
from tests.cli.bigram import write_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
CHATML = """{%- if tools %}{{ '<tools>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- endif %}
{%- endif %}
{%- if not tools is none %}{{ raise_exception("no tools here") }}{%- endif %}
{%- set ns = namespace(found=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.found = true %}{%- endif %}
    {{- '<|start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{{- messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ ns.found }}"""


def _render(template: str, **tokens: str) -> str:
    with closing(ChatRenderer(template, tokens)) as renderer:
        return renderer.render(HELLO)


def _refusal(template: str) -> str:
    before = os.times().children_user
    with pytest.raises(DflashError) as caught:
        _render(template)
    assert os.times().children_user - before < 15
    message = str(caught.value)
    assert message.startswith("chat template: ") and message.endswith("without it")
    assert message.isprintable() and len(message) < 450
    return message


@pytest.mark.parametrize("template", [CHATML, LLAMA])
def test_as_transformers_does_it(template: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utilities.render_jinja_template(
        conversations=[HELLO], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert _render(template, bos_token="<s>") == expected[0]


@pytest.mark.parametrize(
    ("template", "piece"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__[1]}'.format('') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", ""),
        (
            "{{ raise_exception('only\ntwo\x1b[0m roles') }}",
            r"refuses the conversation: only two\x",
        ),
        ("{{ messages[5].role }}", "UndefinedError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{{ 'x' * 10 ** 9 }}", "needs more than"),
        ("{{ 'x' | center(2 * 10 ** 9) }}", "needs more than"),
        ("{{ '{:2000000000d}'.format(1) }}", "needs more than"),
        (
            "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
            "{% endfor %}",
            "needs more than",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    ],
)
def test_hostile_templates(template: str, piece: str) -> None:
    assert piece in _refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",  # inside one C call, which no signal handler could end
    ],
)
def test_endless_templates_are_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", replace(chat.LIMITS, max_seconds=1))
    assert "takes more than 1 s" in _refusal(template)


KNOWING = """{% for m in messages %}{% if m.role in ROLES %}<{{ m.role }}>
{%- if m.tool_calls %}call{% else %}{{ m.content | trim | tojson }}{% endif %}
{%- endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("known", "roles", "shown"),
    [
        ("['system', 'user']", "developer user", '<system>"hi 0"<user>"hi 1"'),
        ("['system', 'user']", "user developer", '<user>"hi 0"<system>"hi 1"'),
        ("['developer', 'user']", "developer user", '<developer>"hi 0"<user>"hi 1"'),
        ("['user']", "developer user", "drops message 1, of role 'system'"),
        ("['user']", "system user", "drops message 1, of role 'system'"),
        ("['user']", "user critic user", "drops message 2, of role 'critic'"),
        ("REFUSING", "developer user", '<system>"hi 0"<user>"hi 1"'),
    ],
)
def test_no_message_is_lost(known: str, roles: str, shown: str) -> None:
    """Templates pass over roles that they do not know; contents that they trim or quote show."""
    messages = [{"role": role, "content": f" hi {at}"} for at, role in enumerate(roles.split())]
    template = KNOWING.replace("ROLES", known)
    if known == "REFUSING":
        refuse = "{% if messages[0].role == 'developer' %}{{ raise_exception('no') }}{% endif %}"
        template = refuse + KNOWING.replace("ROLES", "['system', 'user']")
    with closing(ChatRenderer(template, {})) as renderer:
        for _ in range(2):  # the second time from memory
            if shown.startswith("drops"):
                with pytest.raises(DflashError, match=shown):
                    renderer.render(messages)
            else:
                assert renderer.render(messages) == shown


def _tokenizer(folder: Path, **config: Any) -> BundleTokenizer:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return BundleTokenizer(folder)


STATED = {
    "258": {"content": "<b>", "special": False, "lstrip": True, "normalized": True},
    "257": {"content": "<|im_start|>", "special": True},
    "256": {"content": "<end>", "special": True},
    "259": {"content": "<end>b", "special": False, "single_word": True},
}
FLAGS = "special lstrip rstrip normalized single_word".split()
END = {"eos_token": "<end>"}


@pytest.mark.parametrize(
    ("config", "older", "added"),
    [
        ({"added_tokens_decoder": STATED}, None, None),
        ({}, END, None),
        ({"eos_token": "a"}, {"eos_token": {"content": "<end>", "lstrip": False}}, None),
        ({**END, "added_tokens_decoder": {}}, {"eos_token": "a"}, {"<b>": 257}),
        (END, None, {"<end>": 256, "<b>": 257, "<c>": 258}),
        ({}, {"eos_token": "<b>"}, {"<b>": 257}),
        ({}, {"additional_special_tokens": ["<b>"]}, {"<b>": 257, "<c>": 258}),
        ({}, {"extra_special_tokens": [{"content": "<b>"}]}, {"<b>": 257, "<c>": 258}),
        # Flags of the config stand, but for a named token's.
        ({"added_tokens_decoder": {"256": {"content": "<end>", "rstrip": True}}}, None, None),
        ({**END, "added_tokens_decoder": {"3": {"content": "<end>", "lstrip": True}}}, None, None),
    ],
)
def test_added_tokens_are_those_of_transformers(
    tmp_path: Path,
    config: dict[str, Any],
    older: dict[str, Any] | None,
    added: dict[str, Any] | None,
) -> None:
    transformers = pytest.importorskip("transformers")
    for name, content in (("special_tokens_map", older), ("added_tokens", added)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = _tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found.special_texts["eos_token"] == (theirs.eos_token or "")
    assert [*found.end_ids(())] == [at for at in [theirs.eos_token_id] if at is not None]
    for text in ("a <end> b<b> <c>", "<|im_start|>user\nhi  <b>!<end>bx<end>b <|im_end|>"):
        assert found.encode(text) == theirs.encode(text)
    ours, known = found.core.get_added_tokens_decoder(), theirs.added_tokens_decoder
    for at in ours.keys() | (known.keys() - {64}):  # an end that is a letter stays one
        assert [getattr(ours[at], flag) for flag in FLAGS] == [
            getattr(known[at], flag) for flag in FLAGS
        ]


def test_what_a_template_drops_depends_on_values() -> None:
    kept = (
        "{% for m in messages if m.role == 'user' or not quiet %}{{ m.content|upper }}{% endfor %}"
    )
    messages = [{"role": role, "content": role} for role in ("system", "user")]
    with closing(ChatRenderer(kept, {})) as renderer:
        for _ in range(2):
            assert renderer.render(messages, {"quiet": False}) == "SYSTEMUSER"
            with pytest.raises(DflashError, match="drops message 1"):
                renderer.render(messages, {"quiet": True})


@pytest.mark.parametrize(
    ("stated", "piece"),
    [
        ({"300": {"content": "<b>"}}, 'gives "<b>" the id 300, tokenizer.json 257'),
        ({"x": {"content": "<b>"}}, 'no token\'s id and content at "x"'),
        ({"257": 3}, 'no token\'s id and content at "257"'),
    ],
)
def test_added_tokens_that_do_not_fit(tmp_path: Path, stated: object, piece: str) -> None:
    with pytest.raises(DflashError, match=piece) as caught:
        _tokenizer(tmp_path, added_tokens_decoder=stated)
    assert "tokenizer_config.json" in caught.value.message


NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a", "a"),
        (NAMED, "d"),
        (NAMED[:1], None),
        (["d", 3], None),
        (3, None),
        ({"default": "d"}, "d"),
    ],
)
def test_where_templates_come_from(tmp_path: Path, given: object, found: str | None) -> None:
    assert _tokenizer(tmp_path).chat_template is None
    assert _tokenizer(tmp_path, chat_template=given).chat_template == found
    (tmp_path / "chat_template.jinja").write_text("file")
    assert _tokenizer(tmp_path, chat_template=given).chat_template == "file"


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("names", [("default", "tool_use", "rag"), ("tool_use",), ("default",)])
def test_templates_are_chosen_as_transformers_does(
    tmp_path: Path, names: tuple[str, ...], in_files: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    texts = {name: f"{name} {{{{ messages[0].content }}}} {{{{ tools }}}}" for name in names}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if in_files:
        config["chat_template"] = "never"
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in texts.items():
            folder = "" if name == "default" else "additional_chat_templates/"
            file = "chat_template" if name == "default" else name
            (tmp_path / f"{folder}{file}.jinja").write_text(text)
    else:
        config["chat_template"] = [{"name": n, "template": t} for n, t in texts.items()]
    renderer = _tokenizer(tmp_path, **config).open_renderer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert renderer is not None
    with closing(renderer):
        for tools in ([{"name": "f"}], None):
            given = {"tools": tools}
            try:
                expected = theirs.apply_chat_template(HELLO, tokenize=False, **given)
            except ValueError:
                with pytest.raises(DflashError, match="a template of chats with tools, and none"):
                    renderer.render(HELLO, given)
                continue
            assert renderer.render(HELLO, given) == expected
