"""Limits on the time and memory of untrusted chat templates
(`components/chat_template/sandbox`)."""

import time

import pytest

from torchtitan.components.chat_template import sandbox
from torchtitan.components.chat_template.sandbox import budget
from torchtitan.components.chat_template.template import ChatTemplate
from torchtitan.tools.errors import UserError

QUESTION = [{"role": "user", "content": "Who?"}]


def rendered(source: str) -> str:
    return ChatTemplate(source).render(QUESTION, add_generation_prompt=False)


def growing(start: str, value: str) -> str:
    """Return a template that assigns x a value computed from x, 99 times."""
    loop = f"{{% for i in range(99) %}}{{% set n.x = {value} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}{{{{ n.x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) "
        "}}",
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% "
        "endfor %}",
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
def test_expensive_template_is_rejected(source, monkeypatch):
    monkeypatch.setattr(budget, "BUDGET", 2**24)  # so that the test is quick
    start_time = time.perf_counter()
    with pytest.raises(
        UserError,
        match=r"^the chat template exceeds the time or memory limit for this conversation",
    ):
        rendered(source)
    assert time.perf_counter() - start_time < 5


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
def test_nested_references_count_in_full(value, monkeypatch):
    monkeypatch.setattr(budget, "BUDGET", 2**24)
    with pytest.raises(UserError, match="exceeds the time or memory limit"):
        rendered(growing("[1]", value))


class CountedList(list[object]):
    """List that counts how often lists of this kind are read."""

    n_reads = 0

    def __iter__(self):
        CountedList.n_reads += 1
        return super().__iter__()


def test_a_repeated_reference_is_read_once(monkeypatch):
    """Without a limit on time, this read 4 million lists of the 60."""
    monkeypatch.setattr(CountedList, "n_reads", 0)
    value = CountedList()
    for _ in range(60):
        value = CountedList([value, value])
    with pytest.raises(sandbox.WorkLimitError):
        sandbox.Progress().size(value)
    assert CountedList.n_reads <= 61


class CountedText(str):
    """Text that counts how often texts of this kind are measured."""

    n_reads = 0

    def __len__(self):
        CountedText.n_reads += 1
        return super().__len__()


def test_items_that_a_long_list_repeats_are_measured_once(monkeypatch):
    """Lists that double themselves took 3 seconds of each rendering."""
    monkeypatch.setattr(CountedText, "n_reads", 0)
    value = [CountedText("abc"), 255, [7]] * 1000
    sizes = [budget.ITEM + size for size in (3, 1, budget.ITEM)]
    assert sandbox.Progress().size(value) == 1000 * sum(sizes)
    assert CountedText.n_reads == 1


def test_sizes_of_nested_values_count_every_part():
    def size_of(value: object) -> int:
        if isinstance(value, dict):
            value = [*value.items()]
        if isinstance(value, (list, tuple)):
            return sum(budget.ITEM + size_of(part) for part in value)
        return len(value)

    shared = ["abc", ("de", {"f": "gh"})]
    items = {name: [name * n] for n, name in enumerate("ijklmn", start=1)}
    values = [shared, [shared] * 3, {"a": shared, "b": {"c": shared}}, items, [items, [items]]]
    for value in values:
        assert sandbox.Progress().size(value) == size_of(value)
    assert sandbox.Progress().size(items.items()) == size_of(items)


@pytest.mark.slow
def test_comparison_costs_the_sizes_of_its_operands(monkeypatch):
    monkeypatch.setattr(budget, "BUDGET", 2**24)
    double = "['', '']|map('default', {}, true)|list"
    loop = (
        f"{{% for i in range(60) %}}{{% set n.x = {double.format('n.x')} %}}{{% set n.y = "
        f"{double.format('n.y')} %}}"
    )
    for compared in (
        "n.x == n.y",
        "n.x is eq(n.y)",
        "n.x is in(seq=[n.y])",
        "n.x in [n.y]",
        "[n.x]|select('eq', n.y)|list",
    ):
        with pytest.raises(UserError, match="exceeds the time or memory limit"):
            rendered(
                f"{{% set n = namespace(x=[1], y=[1]) %}}{loop}{{% endfor %}}{{{{ {compared} }}}}"
            )


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
def test_conversion_to_text_costs_the_size_of_the_value(use, monkeypatch):
    monkeypatch.setattr(budget, "BUDGET", 2**24)
    double = "{% set n.x = ['', '']|map('default', n.x, true)|list %}"
    bomb = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}" + double + "{% endfor %}"
    with pytest.raises(UserError, match="exceeds the time or memory limit"):
        rendered(bomb + "{% set t = n.x" + use + " %}")
    with pytest.raises(UserError, match="exceeds the time or memory limit"):
        rendered(bomb + "{{ raise_exception(n.x) }}")


def test_text_of_a_namespace_hides_its_values():
    assert len(rendered(growing("[1]", "namespace(a=n.x, b=n.x)"))) < 100


@pytest.mark.parametrize(
    "source", ["{% filter upper %}a{% endfilter %}", "{% set x | upper %}a{% endset %}{{ x }}"]
)
def test_filter_blocks_are_rejected(source):
    with pytest.raises(UserError, match="is not valid Jinja, line 1: blocks cannot have filters"):
        rendered(source)


def test_time_limit_stops_underestimated_operations(monkeypatch):
    monkeypatch.setattr(budget, "SECONDS", 0.2)
    with pytest.raises(UserError, match="exceeds the time or memory limit"):
        rendered(
            "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor "
            "%}"
        )


def test_each_rendering_has_its_own_budget():
    template = ChatTemplate(growing("'12345678'", "(n.x ~ n.x)[:1000000]"))
    for _ in range(6):  # 70 % of the budget each
        assert len(template.render(QUESTION, add_generation_prompt=False)) == 1_000_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "failed for this conversation: RecursionError",
        ),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "is not valid Jinja: SyntaxError"),
        ("{{ " + "1" * 6000 + " }}", "is not valid Jinja: ValueError"),
        ("x" * (2**20 + 1), "has 1,048,577 characters; the limit is 1,048,576"),
        ("{{ 'a'|center(10) }}", "is not valid Jinja, line 1: No filter named 'center'"),
    ],
)
def test_uncompilable_source_is_rejected(source, message):
    with pytest.raises(UserError, match=f"^the chat template {message}"):
        rendered(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' + 'b' + 1|string }}", "ab1"),
        ("{{ [1] + [2] }}{{ (1, 2) + (3,) }}{{ 1 + 2 + 3.5 }}", "[1, 2](1, 2, 3)6.5"),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        (
            "{{ 2 * 3 }}{{ 'a' * 3 }}{{ 2 * [1] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 1.5 * 2 }}",
            "6aaa[1, 1]833.0",
        ),
        (
            "{{ '%s-%05.1f' % ('a', 2) }}{{ '%(a)s'|format(a=1) }}{{ '{:>4}{a}'.format(1, a=2) }}",
            "a-002.01   12",
        ),
        (
            "{{ [1, 2]|join(', ') }}{{ [{'a': 1}]|join(d='-', attribute='a') }}{{ '-'.join(['a', "
            "'b']) }}",
            "1, 21a-b",
        ),
        (
            "{{ 'aab'|replace('a', 'c') }}{{ 'aab'.replace('a', 'c', 1) }}{{ 'a\nb'|indent(2) }}",
            "ccbcaba\n  b",
        ),
        ("{{ {'a': [1, 'é']}|tojson }}{{ [1]|tojson(indent=1) }}", '{"a": [1, "é"]}[\n 1\n]'),
        (
            "{{ 1.26|round(1) }}{{ 1.5|round }}{{ messages[0].role ~ messages[0]['content'] }}",
            "1.32.0userWho?",
        ),
        ("{{ messages[0].items()|list|length }}{{ messages[0].missing is defined }}", "2False"),
        (
            "{% set a, b = 1, 2 %}{% for k, v in {'x': a}.items() %}{{ k }}{{ v + b }}{% endfor %}",
            "x3",
        ),
        (
            "{% for a in (0, 1, 2) %}{% if not a %}{% continue %}{% elif a > 1 %}{% break %}{% "
            "endif %}a{% endfor %}",
            "a",
        ),
    ],
)
def test_common_operations_work_as_in_jinja(source, text):
    assert rendered(source) == text
