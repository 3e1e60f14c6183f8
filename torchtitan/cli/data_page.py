"""A data inspection as one HTML page that needs nothing else, no scripts either."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain

from torchtitan.cli.data_samples import Document, Row, Sample, Token
from torchtitan.cli.data_tables import (
    Inspection,
    Table,
    counts_of,
    events_table,
    histogram,
    sets_table,
    share_beyond,
)
from torchtitan.components.data.report import SetSummary
from torchtitan.tools.terminal import visible

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2em auto; max-width: 75em;
  padding: 0 1em; }
h1, h2, h3, p { overflow-wrap: anywhere; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; } h3 { font-size: 1em; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; } td, th { padding: 0.2em 0.7em; vertical-align: top;
  border-bottom: 1px solid #ddd; text-align: left; white-space: pre-wrap; }
td:first-child, td:last-child { overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .wide td:first-child { min-width: 6em; } .wide td:last-child { min-width: 9em; }
.histogram { width: 100%; max-width: 45em; } .histogram td { white-space: nowrap; }
.histogram td:last-child { width: 100%; }
.bar { display: inline-block; height: 0.9em; background: #4f8f5b; } .bar.beyond { background: #c0504d; }
.sample { border: 1px solid #bbb; border-radius: 4px; margin: 1em 0; padding: 0.5em 1em; }
.rows { display: flex; flex-wrap: wrap; gap: 1.5em; } .rows > div { flex: 1 1 18em; min-width: 0; }
.name { color: #555; font-size: 0.85em; border-top: 1px solid #ddd; margin-top: 0.8em; overflow-wrap: anywhere; }
.text { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.text span, .text mark { border-left: 1px solid #e4e4e4; color: #1a1a1a; }
mark { background: #c9ebcd; } .special { color: #7a1fa2 !important; font-weight: bold; }
.mute { color: #999; } .refusal { color: #a00000; font-weight: bold; }
"""
_NO_SCRIPTS = "default-src 'none'; style-src 'unsafe-inline'"


def page(inspection: Inspection) -> str:
    """The whole file. Everything that comes from the data is escaped."""
    return "\n".join(chain(_head(inspection.title), _body(inspection), ["</body></html>", ""]))


def _text(text: str) -> str:
    return escape(visible(text))


def _head(title: str) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_NO_SCRIPTS}">'
    yield f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>"


def _body(inspection: Inspection) -> Iterator[str]:
    if inspection.refusal:
        yield f'<p class="refusal">Training would be refused: {_text(inspection.refusal)}</p>'
    yield from _facts(inspection.facts)
    if summary := inspection.summary:
        for table in (sets_table(summary.sets), events_table(summary.sets)):
            if table.rows:
                yield from _table(table)
        for of_set in summary.sets:
            yield from _histogram(of_set, summary.max_length)
    yield "<h2>Windows</h2>"
    yield (
        '<p class="text"><mark>trained</mark> tokens, <span>those that are not</span>, '
        '<span class="special">special</span> ones. Hovering over one tells its id and its position in its document; '
        '<span class="mute">·</span> is a token without a text of its own: its character stands before it.</p>'
    )
    yield from _facts(counts_of(inspection.samples))
    for number, sample in enumerate(inspection.samples, start=1):
        yield from _sample(number, sample)


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "<table>"
    for name, value in facts:
        yield f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>"
    yield "</table>"


def _table(table: Table) -> Iterator[str]:
    yield f'<h2>{_text(table.title)}</h2><div class="wide"><table><tr>'
    yield "".join(f"<th>{_text(column)}</th>" for column in table.columns) + "</tr>"
    for row in table.rows:
        yield "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _histogram(of_set: SetSummary, max_length: int) -> Iterator[str]:
    beyond = share_beyond(of_set.lengths, max_length)
    yield f"<h2>Tokens per sample of {_text(of_set.name)}</h2>"
    yield f'<p>{beyond:.1%} have more than the {max_length:,} tokens that a window holds.</p><table class="histogram">'
    bins = histogram(of_set.lengths, max_length)
    most = max(of_bin.n_samples for of_bin in bins)
    for of_bin in bins:
        kind = "bar beyond" if of_bin.beyond else "bar"
        bar = f'<span class="{kind}" style="width:{of_bin.n_samples / most:.2%}"></span>'
        yield f'<tr><td>{of_bin.label}</td><td class="count">{of_bin.n_samples:,}</td><td>{bar}</td></tr>'
    yield "</table>"


def _sample(number: int, sample: Sample) -> Iterator[str]:
    named_alone = any(document.name for row in sample.rows for document in row.documents)
    title = f"{number}" if named_alone else f"{number}. {_text(sample.name)}"
    yield f'<div class="sample"><h3>{title}</h3><div class="rows">'
    for row in sample.rows:
        yield from _row(row)
    yield "</div>"
    if sample.answer is not None:
        yield f'<div class="name">reference answer</div><div class="text">{_text(sample.answer)}</div>'
    yield "</div>"


def _row(row: Row) -> Iterator[str]:
    yield "<div>"
    if row.title:
        yield f"<h3>{_text(row.title)}</h3>"
    for document in row.documents:
        yield from _document(document)
    if row.n_padding:
        yield f'<div class="name">{row.n_padding:,} positions of padding</div>'
    yield "</div>"


def _document(document: Document) -> Iterator[str]:
    yield f'<div class="name">{_text(document.name)}</div>'
    yield f'<div class="text">{"".join(map(_token, document.tokens))}</div>'


def _token(token: Token) -> str:
    tag = "mark" if token.trained else "span"
    kind = ' class="special"' if token.special else ""
    text = escape(token.text).replace("\n", '<span class="mute">↵</span>\n')
    return f'<{tag}{kind} title="id {token.id}, position {token.position}">{text or _NO_TEXT}</{tag}>'


_NO_TEXT = '<span class="mute">·</span>'
