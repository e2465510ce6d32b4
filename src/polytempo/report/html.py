"""One HTML file that holds a whole report: no scripts, no links to other files, nothing to install.

It serves a single run (one row) and a comparison (many) alike.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.files import replace_text

_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59636e; --line: #d7dce1;
  --page: #ffffff; --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --quiet: #a2abb5; --line: #3a424b; --page: #14181c; --soft: #1e2329; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--page);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .75rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--quiet); font-weight: 600; border-bottom-width: 2px; }
th:first-child, td:first-child { text-align: left; padding-left: .25rem; }
.settings td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.settings th { font-weight: 500; color: var(--quiet); vertical-align: top; }
code, pre { font: .88rem/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: .4rem; white-space: pre-wrap; }
figure { margin: 0 0 2rem; }
img { max-width: 100%; height: auto; display: block; background: #fff; padding: .5rem;
  border-radius: .4rem; }
figcaption { color: var(--quiet); font-size: .92rem; margin-top: .4rem; }
"""


def write_html(
    path: str | Path,
    *,
    title: str,
    intro: str = "",
    table: Sequence[Mapping[str, str]] = (),
    images: Sequence[tuple[str, str | Path]] = (),
    settings: Mapping[str, object] | None = None,
    command: str | None = None,
) -> Path:
    """Write the report and return its path.

    intro:    text; an empty line begins a new paragraph
    table:    one mapping from column to text per row; a column that a row lacks stays empty
    images:   (caption, file) pairs, PNG or SVG, copied into the page
    settings: what the result was made with; values that are not text are written as JSON
    command:  what to type to make the result again
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f"<p>{escape(text.strip())}</p>" for text in intro.split("\n\n") if text.strip()]
    if table:
        parts += ["<h2>Results</h2>", html_table(table)]
    if images:
        parts.append("<h2>Plots</h2>")
        parts += [_figure(caption, Path(image)) for caption, image in images]
    if command:
        parts += ["<h2>Make it again</h2>", f"<pre><code>{escape(command)}</code></pre>"]
    if settings:
        parts += ["<h2>Settings</h2>", _settings(settings)]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_text(target, _page(title, "\n".join(parts)))
    return target


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def html_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table by itself, as in a report."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(row.get(c, '')))}</td>" for c in columns) + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _settings(settings: Mapping[str, object]) -> str:
    lines = []
    for name, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        cell = f"<td><code>{escape(text)}</code></td>"
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cell}</tr>')
    rows = "\n".join(lines)
    return f'<table class="settings"><tbody>\n{rows}\n</tbody></table>'


def _figure(caption: str, image: Path) -> str:
    kind = _TYPES.get(image.suffix.lower())
    if kind is None:
        raise PolytempoError(
            f"{image.name!r} cannot go into an HTML report; draw it as {' or '.join(_TYPES)}"
        )
    try:
        data = base64.b64encode(image.read_bytes()).decode("ascii")
    except OSError as error:
        raise PolytempoError(
            f"the image {str(image)!r} cannot be read ({error.strerror}); draw it before the report"
        ) from error
    words = escape(caption)
    source = f"data:{kind};base64,{data}"
    return f'<figure><img src="{source}" alt="{words}"><figcaption>{words}</figcaption></figure>'
