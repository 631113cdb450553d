"""Makes a page and a text of what is known of a job. The page needs nothing from outside, and no JavaScript."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from hvdlite.launch.dashboard.board import COLUMNS, View

_SECONDS = 2
_LEGEND = (
    "A step ends with an exchange of gradients. Of its time a rank computes, waits until all ranks are ready, or exchanges "
    "data. For rank: who came last. Given: bytes of gradients and allreduces. Memory: of the process, on its host."
)
_STYLE = """
:root{color-scheme:light dark;font:15px/1.5 system-ui,sans-serif}
body{max-width:75rem;margin:0 auto;padding:0 1rem 2rem}
h1{font-size:1.3rem;margin:1rem 0 0;overflow-wrap:anywhere}h2{font-size:1rem;margin:1.5rem 0 .3rem}
table{border-collapse:collapse;width:100%;margin-top:1rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .5rem;border-bottom:1px solid #8884;white-space:nowrap}
th{font-weight:600}th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}
td:nth-child(2){overflow-wrap:anywhere;white-space:normal}
.bad{color:#c62828;font-weight:600}ul{list-style:none;margin:0;padding:0}li{overflow-wrap:anywhere}
small,time{opacity:.75}
@media(prefers-color-scheme:dark){.bad{color:#ff8a80}}
@media(max-width:50rem){thead{display:none}
tr{display:grid;grid-template-columns:1fr 1fr;border:1px solid #8886;border-radius:.4rem;margin:.6rem 0;padding:.3rem}
td,td:nth-child(-n+3){display:flex;justify-content:space-between;gap:.5rem;border:0;padding:.1rem .4rem}
td:empty{display:none}td::before{content:attr(data-name);opacity:.75}}
"""
_SCRIPT = """
const again = async () => {
  try {
    const got = new DOMParser().parseFromString(await (await fetch(location.href)).text(), "text/html");
    document.title = got.title;
    document.querySelector("main").replaceWith(got.querySelector("main"));
    if (document.querySelector("main").dataset.ended) return;
  } catch {
    const state = document.querySelector("#state");
    state.className = "bad";
    state.textContent = "hvdliterun does not answer any more: the job has ended. Below is what was seen last.";
    return;
  }
  setTimeout(again, 1000);
};
setTimeout(again, 1000);
"""


def page(view: View, nonce: str) -> str:
    """Return a page that renews itself until the job has ended: by its script, or else by the browser.

    Args:
        view: What there is to see.
        nonce: A word that the server's answer names too; the browser runs no script without it.
    """
    escape = html.escape
    renew = f'<noscript><meta http-equiv="refresh" content="{_SECONDS}"></noscript>'
    script = f'<script nonce="{escape(nonce)}">{_SCRIPT}</script>'
    head = "".join(f'<th scope="col">{name}</th>' for name in COLUMNS)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}"{_mark(name, cell)}>{escape(cell)}</td>'
            for name, cell in zip(COLUMNS, row, strict=True)
        )
        + "</tr>"
        for row in view.rows
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(view.title)} – hvdlite</title><style>{_STYLE}</style>{'' if view.ended else renew}</head>"
        f"<body><main{' data-ended=1' if view.ended else ''}><h1>{escape(view.title)}</h1>"
        f'<p id="state"{_mark("state", "failed" if "failed" in view.state else "")}>{escape(view.state)}</p>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p><small>{_LEGEND}</small></p>"
        f"{_list('Waits', [('', wait) for wait in view.waits], 'bad')}"
        f"{_list('Last warnings', view.warnings)}{_list('Failures and restarts', view.events)}"
        f"</main>{'' if view.ended else script}</body></html>\n"
    )


def _mark(name: str, cell: str) -> str:
    return ' class="bad"' if name == "state" and cell.startswith(("failed", "lost", "stopped", "silent")) else ""


def _list(title: str, lines: Iterable[tuple[str, str]], kind: str = "") -> str:
    items = "".join(f'<li class="{kind}"><time>{when}</time> {html.escape(line)}</li>' for when, line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def text(view: View) -> str:
    """Return the same as plain text, for a terminal."""
    table: Sequence[Sequence[str]] = [COLUMNS, *view.rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(COLUMNS))]
    lines = [view.title, view.state, ""]
    for row in table:
        cells = (
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    for title, found in (
        ("Waits", [("", wait) for wait in view.waits]),
        ("Last warnings", view.warnings),
        ("Failures and restarts", view.events),
    ):
        lines += ["", title, *(f"  {when} {line}".rstrip() for when, line in found)] if found else []
    return "\n".join(lines) + "\n"
