"""The report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere. No torch here."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from keel.inspect.report import MEANING, drift, encoded_with, headline, near, part_title, places, share, striking

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #667; --line: #d9dde3; --paper: #fff; --card: #f6f7f9;
  --prompt: #0b6aa2; --good: #187a3c; --goodback: #d9f2e1; --warn: #8a5a00; --bad: #b3261e; --bar: #7aa7d6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa3ad; --line: #343b44; --paper: #14181d;
  --card: #1c2229; --prompt: #7cc4f2; --good: #7ddc9c; --goodback: #1d3a29; --warn: #e5b567; --bar: #4a78a8 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: .2rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
p { margin: .3rem 0 } .soft { color: var(--soft) } .bad { color: var(--bad) } .warn { color: var(--warn) }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.row { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .9rem; margin: .8rem 0 }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); border-radius: 4px;
  padding: .5rem .7rem; margin: .2rem 0 .6rem; font: 13px/1.6 ui-monospace, monospace }
.template { color: var(--soft) } .prompt { color: var(--prompt) } .response { color: var(--good) }
.end { background: var(--goodback); color: var(--good); font-weight: bold }
.text span:nth-child(even) { text-decoration: underline dotted var(--line); text-underline-offset: .25em }
.row td { overflow-wrap: anywhere }
i { display: none; font-style: normal; font-size: 10px; color: var(--soft) }
#ids:checked ~ .row i { display: inline }
svg { display: block; width: 100%; height: 70px; border-bottom: 1px solid var(--line) } rect { fill: var(--bar) }
.axis { display: flex; justify-content: space-between; font-size: 11px }
"""


def page(told: Mapping[str, Any]) -> str:
    """The page of a report (see `report.report`)."""
    title = escape(", ".join(told["files"]))
    also = f'<p class="soft">They may be read as {escape(" or ".join(told["also"]))} too.</p>' if told["also"] else ""
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{escape(told['kind'])}s, for {escape(told['stage'])}: {escape(told['why'])}</p>{also}",
        f"<p><b>{escape(headline(told))}</b></p>",
        _reasons(told),
        "<h2>What stands out</h2>",
        _findings(told),
        f"<h2>Length in {told['unit']}s</h2>",
        _lengths(told["lengths"]),
        f'<p class="soft">{escape(encoded_with(told))}</p>',
        f'<p class="soft">{escape(drift(told))}</p>' if drift(told) else "",
        *(_histogram(name, bins, told["unit"]) for name, bins in told["histograms"].items()),
        "<h2>Rows as the trainer sees them</h2>",
        _legend(told),
        *(_row(row, told["files"]) for row in told["shown"]),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><meta name="viewport" content="width=device-width">'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    numbers = [bool(rows) and all(isinstance(row[at], int | float) for row in rows) for at in range(len(names))]

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=n' if number else ''}>{escape(str(value))}</{tag}>"
            for value, number in zip(values, numbers, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', names)}</tr>{body}</table>"


def _reasons(told: Mapping[str, Any]) -> str:
    rows = [
        [name, each["count"], each["reason"], places(each, told["files"])]
        for name in ("refused", "dropped", "repaired")
        for each in told[name]
    ]
    stops = '<p class="bad">A run stops at the first refused row.</p>' if told["refused"] else ""
    return stops + (_table(["", "rows", "reason", "first places"], rows) if rows else "")


def _findings(told: Mapping[str, Any]) -> str:
    texts = []
    for each in told["findings"]:
        where = f" First places: {places(each, told['files'])}." if each["places"] else ""
        style = " class=warn" if striking(each) else ""
        texts.append(
            f"<p><b{style}>{escape(each['name'])}</b>: {escape(share(each))}<br>"
            f'<span class="soft">{escape(each["meaning"])}.{escape(where)}</span></p>'
        )
    return "".join(texts) or "<p>Nothing striking in the rows that are kept.</p>"


def _lengths(lengths: Mapping[str, Mapping[str, float]]) -> str:
    if not lengths:
        return "<p>No row is kept.</p>"
    return _table(["", *next(iter(lengths.values()))], [[name, *cuts.values()] for name, cuts in lengths.items()])


def _histogram(name: str, bins: Sequence[Mapping[str, int]], unit: str) -> str:
    most = max(each["rows"] for each in bins)
    width = 1000 / len(bins)
    bars = "".join(
        f'<rect x="{at * width:.1f}" width="{width - 1:.1f}" y="{70 - 70 * each["rows"] / most:.1f}" '
        f'height="{70 * each["rows"] / most:.1f}"><title>{each["first"]} to {each["last"]} {unit}s: '
        f"{each['rows']}</title></rect>"
        for at, each in enumerate(bins)
    )
    return (
        f'<p class="soft">{escape(name)}</p>'
        f'<svg viewBox="0 0 1000 70" preserveAspectRatio="none" role="img">{bars}</svg>'
        f'<p class="axis soft"><span>{bins[0]["first"]}</span><span>{bins[-1]["last"]} {unit}s</span></p>'
    )


def _legend(told: Mapping[str, Any]) -> str:
    if not any("tokens" in row for row in told["shown"]):
        return ""
    uses = " &nbsp; ".join(f'<span class="{use}">{meaning}</span>' for use, meaning in MEANING.items())
    return f'<input type="checkbox" id="ids"> <label for="ids">show token ids</label> &nbsp; {uses}'


def _row(row: Mapping[str, Any], files: Sequence[str]) -> str:
    parts = [f'<p class="soft">{escape(near(row["source"], files))}</p>']
    if "tokens" in row:
        for name, tokens in row["tokens"].items():
            spans = "".join(
                f"<span class={token['use']} title={token['id']}>{escape(token['text'])}<i>{token['id']} </i></span>"
                for token in tokens
            )
            parts.append(f'<p>{part_title(name, tokens)}</p><div class="text">{spans}</div>')
    else:
        texts = [(message["role"], message["content"], "prompt") for message in row["messages"]]
        texts += [(name, row[name], "response") for name in ("response", "chosen", "rejected") if name in row]
        for name, text, use in texts:
            parts.append(f'<p>{escape(name)}</p><div class="text {use}">{escape(text)}</div>')
    if row["columns"]:
        parts.append(_table(["other column", "value"], list(row["columns"].items())))
    return f'<div class="row">{"".join(parts)}</div>'
