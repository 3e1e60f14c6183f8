"""A chat template from anywhere ends soon, and takes little memory (`components/chat_template/sandbox.py`)."""

import time

import pytest

from torchtitan.components.chat_template import sandbox
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.tools.errors import UserError

QUESTION = [{"role": "user", "content": "Who?"}]


def rendered(source: str) -> str:
    return ChatTemplate(source).render(QUESTION, add_generation_prompt=False)


def growing(start: str, value: str) -> str:
    """A template whose variable x takes a value made of itself, 99 times."""
    loop = f"{{% for i in range(99) %}}{{% set n.x = {value} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}{{{{ n.x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        growing("'12345678'", "n.x ~ n.x"),
        growing("'12345678'", "n.x + n.x"),
        growing("'12345678'", "n.x|replace('1', n.x)"),
        growing("'12345678'", "n.x.replace('1', n.x)"),
        growing("'12345678'", "n.x.join(n.x)"),
        growing("'12345678'", "n.x.translate({49: n.x})"),
        growing("'12\\n34'", "n.x|indent(n.x, true)"),
        growing("['1']", "n.x + n.x"),
        growing("99", "n.x * n.x"),
        "{% set x = '<'*9999*999 %}{{ x|string|e|urlencode|length }}",
        growing("'a'", "n.x|list|string"),
        growing("'\"'", "n.x|tojson"),
        growing("['\"']", "n.x|map('tojson')|list"),
        '{% set x = \'""""\' %}' + "{% set x = x|tojson %}" * 45,
        "{% set x = 'abc '*99999 %}{% set x = x*30 %}{{ x.split()|length }}",
        "{% set x = 'a'*9999*999 %}{{ x|title|list|map('upper')|list|unique|list|length }}",
        "{% set x = 'a'*9999*99 %}" + "{% set x = x|upper %}" * 2000,
        "{{ strftime_now('%900d' * 400000) }}",
        "{{ strftime_now('%999999999d') }}",
        "{% set l = range(30000)|list %}{{ l|select('in', l)|list|length }}",
        "{% set l = range(30000)|list %}{{ l|map('default')|select('in', l)|list|length }}",
        "{{ 'a' * 10**12 }}",
        "{{ 10**12 * [1] }}",
        "{{ 10**(10**8) }}",
        "{{ 'a'.center(10**12) }}",
        "{{ 'a'|attr('zfill')(width=10**12) }}",
        "{{ '\\t'.expandtabs(10**12) }}",
        "{{ (1).to_bytes(10**12, 'big') }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%*d' % (10**12, 1) }}",
        "{{ '%.1000000000000f'|format(1) }}",
        "{{ '{:>9999999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**12) }}",
        "{{ 'a'|indent(10**12, true) }}",
        "{{ [1]|tojson(indent=10**12) }}",
        "{{ 1.5|round(10**9, 'ceil') }}",
        "{{ '%1000000000d' is odd }}",
        "{{ '%1000000000d' is divisibleby(7) }}",
        "{{ [[1, 2]]|map('tojson', separators=['x'*9999*99, ':'])|list|length }}",
        "{{ ('a'*99999)|replace(new='x'*9999, old='a') }}",
    ],
)
def test_what_would_not_end_is_refused(source, monkeypatch):
    monkeypatch.setattr(sandbox, "_BUDGET", 2**24)  # for a test's patience
    begun = time.perf_counter()
    with pytest.raises(UserError, match=r"^the chat template takes too long at this conversation, or too much memory"):
        rendered(source)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    "value",
    [
        "[n.x, n.x]",
        "{'a': n.x, 'b': n.x}",
        "(n.x, n.x)",
        "dict(a=n.x, b=n.x)",
        "dict(a=n.x, b=n.x).values()|list",
        "dict(a=n.x, b=n.x).items()|list",
        "['', '']|map('default', n.x, true)|list",
    ],
)
def test_values_that_only_look_small_are_counted_in_full(value, monkeypatch):
    monkeypatch.setattr(sandbox, "_BUDGET", 2**24)
    with pytest.raises(UserError, match="takes too long"):
        rendered(growing("[1]", value))


def test_comparing_values_costs_their_sizes(monkeypatch):
    monkeypatch.setattr(sandbox, "_BUDGET", 2**24)
    double = "['', '']|map('default', {}, true)|list"
    loop = f"{{% for i in range(60) %}}{{% set n.x = {double.format('n.x')} %}}{{% set n.y = {double.format('n.y')} %}}"
    for compared in (
        "n.x == n.y",
        "n.x is eq(n.y)",
        "n.x is in(seq=[n.y])",
        "n.x in [n.y]",
        "[n.x]|select('eq', n.y)|list",
    ):
        with pytest.raises(UserError, match="takes too long"):
            rendered(f"{{% set n = namespace(x=[1], y=[1]) %}}{loop}{{% endfor %}}{{{{ {compared} }}}}")


@pytest.mark.parametrize(
    "use",
    [
        "|upper",
        "|trim",
        "|safe",
        "|replace('a', 'b')",
        "|indent",
        "|format",
        "|string",
        "|tojson",
        "|join",
        " is lower",
    ],
)
def test_a_text_of_a_value_costs_the_sizes_of_its_parts(use, monkeypatch):
    monkeypatch.setattr(sandbox, "_BUDGET", 2**24)
    double = "{% set n.x = ['', '']|map('default', n.x, true)|list %}"
    bomb = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}" + double + "{% endfor %}"
    with pytest.raises(UserError, match="takes too long"):
        rendered(bomb + "{% set t = n.x" + use + " %}")
    with pytest.raises(UserError, match="takes too long"):
        rendered(bomb + "{{ raise_exception(n.x) }}")


def test_a_namespace_does_not_show_its_values():
    assert len(rendered(growing("[1]", "namespace(a=n.x, b=n.x)"))) < 100


@pytest.mark.parametrize("source", ["{% filter upper %}a{% endfilter %}", "{% set x | upper %}a{% endset %}{{ x }}"])
def test_blocks_cannot_have_filters(source):
    with pytest.raises(UserError, match="is not valid Jinja, line 1: blocks cannot have filters"):
        rendered(source)


def test_the_clock_ends_what_costs_more_than_it_seems(monkeypatch):
    monkeypatch.setattr(sandbox, "_SECONDS", 0.2)
    with pytest.raises(UserError, match="takes too long"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}")


def test_a_rendering_has_an_allowance_of_its_own():
    template = ChatTemplate(growing("'12345678'", "(n.x ~ n.x)[:1000000]"))
    for _ in range(6):  # 0.7 of it each
        assert len(template.render(QUESTION, add_generation_prompt=False)) == 1_000_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails at this conversation: RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply to be read"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "is not valid Jinja: SyntaxError"),
        ("{{ " + "1" * 6000 + " }}", "is not valid Jinja: ValueError"),
        ("x" * (2**20 + 1), "has 1,048,577 characters; the limit is 1,048,576"),
        ("{{ 'a'|center(10) }}", "is not valid Jinja, line 1: No filter named 'center'"),
    ],
)
def test_a_source_that_python_does_not_take_is_refused(source, message):
    with pytest.raises(UserError, match=f"^the chat template {message}"):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' + 'b' + 1|string }}", "ab1"),
        ("{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ 1 + 2 + 3.5 }}", "[1, 2](1, 2, 3)6.5"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 2 * 3 }}{{ 'a' * 3 }}{{ 2 * [1] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 1.5 * 2 }}", "6aaa[1, 1]833.0"),
        ("{{ '%s-%05.1f' % ('a', 2) }}{{ '%(a)s'|format(a=1) }}{{ '{:>4}{a}'.format(1, a=2) }}", "a-002.01   12"),
        ("{{ [1, 2]|join(', ') }}{{ [{'a': 1}]|join(d='-', attribute='a') }}{{ '-'.join(['a', 'b']) }}", "1, 21a-b"),
        ("{{ 'aab'|replace('a', 'c') }}{{ 'aab'.replace('a', 'c', 1) }}{{ 'a\nb'|indent(2) }}", "ccbcaba\n  b"),
        ("{{ {'a': [1, 'é']}|tojson }}{{ [1]|tojson(indent=1) }}", '{"a": [1, "é"]}[\n 1\n]'),
        ("{{ 1.26|round(1) }}{{ 1.5|round }}{{ messages[0].role ~ messages[0]['content'] }}", "1.32.0userWho?"),
        ("{{ messages[0].items()|list|length }}{{ messages[0].missing is defined }}", "2False"),
        ("{% set a, b = 1, 2 %}{% for k, v in {'x': a}.items() %}{{ k }}{{ v + b }}{% endfor %}", "x3"),
        (
            "{% for a in (0, 1, 2) %}{% if not a %}{% continue %}{% elif a > 1 %}{% break %}{% endif %}a{% endfor %}",
            "a",
        ),
    ],
)
def test_what_templates_use_is_as_it_was(source, text):
    assert rendered(source) == text
