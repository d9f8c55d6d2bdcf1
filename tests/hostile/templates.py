"""Chat templates: programs in jinja that loop, allocate, reach for Python, or say odd things."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.hostile.case import HostileCase, draw_readers
from tests.hostile.values import NUMBERS, TEXTS, encode, odd_value, spoil

COUNT = 110
_GOOD = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_REACHING = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ ('{a.__class__}'|attr('format_map'))({'a': 1}) }}",
    "{{ messages|attr('__class__') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% set messages = 3 %}{{ messages.append(1) }}",
    "{{ messages.clear() }}",
)
_SLOW = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{{ (1, 2, 3)|list|batch(1)|map('list')|list }}{% for i in range(10**8) %}{% endfor %}",
)
_LARGE = (
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 5 * 10**6 }}",
    "{{ 'x'|center(10**9) }}",
    "{{ 'a\\n'|indent(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ range(10**8)|list }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ ['a'] * 10**9 }}",
    "{{ 'ab'|replace('', 'x' * 10**7) }}",
    "{{ 'a'.encode() * 10**9 }}",
)
_FAILING = (
    "{{ raise_exception('x' * 100000) }}",
    "{{ raise_exception('a\\nerror: b\\x1b[31m') }}",
    "{{ 1 / 0 }}",
    "{{ undefined.a.b }}",
    "{{ messages[7].content }}",
    "{{ strftime_now('%' * 5000) }}",
    "{{ strftime_now('\\ud800') }}",
    "{% for m in messages %}",
    "{{",
    "{% unknown %}",
    "{% generation %}x{% endgeneration %}",
    "{{ '\\ud800' }}",
    "{{ '\\x00' }}",
    "{% if a.%}{% endif %}",
    "{{ messages|tojson(indent=10**7) }}",
    "{{ 'a'|nothing }}",
    "{% do 3 %}",
    "{% break %}",
    "{{ [].pop() }}",
    "{{ messages|sort(attribute='x')|first }}",
    "{% call f() %}{% endcall %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% trans %}x{% endtrans %}",
)
_DEEP = ("(", "[", "{% if 1 %}", "not ", "-", "{'a':")


def make(random: Random, number: int) -> HostileCase:
    """A template alone, in tokenizer_config.json, or by name; most begin with what works."""
    way = random.randrange(12)
    text = _text(random, way)

    def damage(folder: Path) -> None:
        target = folder / "pair/target"
        place = random.randrange(4)
        if place <= 1:
            data = text.encode("utf-8", "surrogatepass")
            (target / "chat_template.jinja").write_bytes(data)
            return
        named = [{"name": "default", "template": text}, {"name": odd_value(random)}]
        template = named if place == 3 else text
        config = {"eos_token": "<end>", "chat_template": template}
        (target / "tokenizer_config.json").write_bytes(encode(config))

    return HostileCase(
        f"template {text[:60]!r}", ("pair",), damage, draw_readers(random), is_slow=way == 0
    )


def _text(random: Random, way: int) -> str:
    before = random.choice(("", _GOOD))
    if way == 0:
        return before + random.choice(_SLOW)
    if way <= 3:
        return before + random.choice(_REACHING)
    if way <= 5:
        return before + random.choice(_LARGE)
    if way <= 8:
        return before + random.choice(_FAILING)
    if way == 9:
        mark, times = random.choice(_DEEP), random.choice((100, 5000))
        return "{{ " + mark * times + "1 }}" if "%" not in mark else mark * times
    if way == 10:
        return spoil(random, _GOOD.encode()).decode("utf-8", "replace")
    filters = ("center", "indent", "truncate", "wordwrap", "round", "batch", "slice", "int")
    odd = random.choice((*NUMBERS[:22], *map(repr, TEXTS[:6])))
    value, name = random.choice(("messages", "3.5", "''")), random.choice(filters)
    return f"{before}{{{{ {value}|{name}({odd}) }}}}"
