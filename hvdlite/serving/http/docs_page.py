"""``/docs``: the OpenAPI description as a page, on which each path can be tried. It needs no file from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

from hvdlite.serving.http.bodies import JSON


def docs_page(about: dict[str, Any], root: str) -> str:
    """Return the page, as HTML.

    Args:
        about: What `hvdlite.serving.http.page.openapi` has returned.
        root: The path before all others.
    """
    operations = [
        _operation(method, path, operation)
        for path, methods in about["paths"].items()
        for method, operation in methods.items()
    ]
    title = html.escape(about["info"]["title"])
    return _PAGE.replace("TITLE", title).replace("ROOT", json.dumps(root)).replace("OPERATIONS", "\n".join(operations))


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return one path with its method: what it is, what it takes and answers, and a form to send."""
    words = [f"<p>{html.escape(operation.get('description', ''))}</p>"]
    for each in operation.get("parameters", []):
        about = html.escape(each.get("description", f"in the {each['in']}"))
        words.append(f"<p><code>{html.escape(each['name'])}</code>: {about}</p>")
    content = operation.get("requestBody", {}).get("content", {})
    if content:
        words.append(f"<p>Takes {', '.join(f'<code>{html.escape(kind)}</code>' for kind in content)}. As JSON:</p>")
        words.append(f"<pre>{html.escape(json.dumps(content[JSON]['schema'], indent=2))}</pre>")
    rows = [
        f"<tr><td>{html.escape(status)}<td>{html.escape(answer['description'])}"
        for status, answer in operation["responses"].items()
    ]
    words.append(f"<table>{''.join(rows)}</table>")
    body = '<textarea aria-label="body">{}</textarea>' if content else ""
    form = (
        f'<input aria-label="path" value="{html.escape(path)}"> <button>Send</button>{body}<pre class="answer"></pre>'
    )
    summary = f"<b>{method.upper()}</b> <code>{html.escape(path)}</code> {html.escape(operation['summary'])}"
    return f'<details data-method="{method}"><summary>{summary}</summary>{"".join(words)}{form}</details>'


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52em; margin: 2em auto; padding: 0 1em; }
details { border: 1px solid #bbb; border-radius: 4px; margin: .5em 0; padding: .5em; } summary { cursor: pointer; }
textarea { width: 100%; height: 6em; font-family: monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
td { padding-right: 1em; vertical-align: top; } input { width: 70%; }
</style>
<h1>TITLE</h1>
<p><label>Key, if the server has one: <input id="key" type="password"></label></p>
OPERATIONS
<script>
for (const each of document.querySelectorAll("details")) {
  const find = what => each.querySelector(what);
  find("button").onclick = async () => {
    const key = document.getElementById("key").value, text = find("textarea");
    const headers = key ? {"authorization": "Bearer " + key} : {};
    if (text) headers["content-type"] = "application/json";
    try {
      const about = {method: each.dataset.method.toUpperCase(), headers, body: text ? text.value : undefined};
      const answer = await fetch(ROOT + find("input").value, about);
      find(".answer").textContent = answer.status + "\\n" + await answer.text();
    } catch (error) {
      find(".answer").textContent = String(error);
    }
  };
}
</script>
"""
