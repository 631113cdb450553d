#!/usr/bin/env python
"""Make tests/data/horovod_api.json, the table of Horovod's public names, from the notes on Horovod's API.

    scripts/horovod_api.py NOTES.md tests/data/horovod_api.json

The notes are Markdown. Under each heading there are blocks of Python-like lines, one line for each name::

    allgather(tensor, name=None, process_set=global_process_set)
    class State(bcast_object, get_rank)   # bases: object
        .commit()

The table is a dictionary ``{"source": …, "exports": {module: [name]}, "modules": {module: {name: entry}}}``. An entry has

- ``kind``: "function", "class" or "value";
- ``parameters``, for functions and for the constructors of classes: a list of ``{"name"}``. A parameter with a default also has
  ``"default"``, the text of the default. A parameter that is not POSITIONAL_OR_KEYWORD also has ``"kind"``, its name in
  `inspect.Parameter`. The list is null if the notes leave the parameters out;
- ``bases`` and ``methods`` (entries by name), for classes.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

MODULES = {
    # number of the section and heading (its beginning) -> module
    "1 basics": "horovod.common.basics",
    "1 process sets": "horovod.common.process_sets",
    "1 elastic core": "horovod.common.elastic",
    "1 exceptions": "horovod.common.exceptions",
    "1 horovod.common.util": "horovod.common.util",
    "2 ops": "horovod.torch.mpi_ops",
    "2 functions": "horovod.torch.functions",
    "2 DistributedOptimizer": "horovod.torch.optimizer",
    "2 compression": "horovod.torch.compression",
    "2 SyncBatchNorm": "horovod.torch.sync_batch_norm",
    "2 horovod.torch.elastic": "horovod.torch.elastic",
    "3 ops and wrappers": "horovod.tensorflow",
    "3 ops": "horovod.tensorflow.mpi_ops",
    "3 functions": "horovod.tensorflow.functions",
    "3 gradient aggregation": "horovod.tensorflow.gradient_aggregation",
    "3 sync batch norm": "horovod.tensorflow.sync_batch_norm",
    "3 horovod.tensorflow.elastic": "horovod.tensorflow.elastic",
    "3 horovod.tensorflow.data.compute_service": "horovod.tensorflow.data.compute_service",
    "4 horovod.tensorflow.keras.callbacks": "horovod.tensorflow.keras.callbacks",
    "4 horovod.tensorflow.keras.elastic": "horovod.tensorflow.keras.elastic",
    "4 horovod.tensorflow.keras": "horovod.tensorflow.keras",
    "4 horovod.keras.callbacks": "horovod.keras.callbacks",
    "4 horovod.keras.elastic": "horovod.keras.elastic",
    "4 horovod.keras": "horovod.keras",
    "4 shared implementation": "horovod._keras",
    "5 discovery": "horovod.runner.elastic.discovery",
    "5 driver": "horovod.runner.elastic.driver",
    "6 horovod.run": "horovod",
    "9 data loaders": "horovod.data",
}
EXPORTS = {"2": "horovod.torch", "3": "horovod.tensorflow"}
"""The sections with a sentence that lists the exports of the module. Section 3 lists only what section 2 does not have."""


def parameters(text: str) -> list[dict[str, str]] | None:
    """Return the parameters between the parentheses of a signature; None for an ellipsis."""
    if text.strip() == "...":
        return None
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # type: ignore[attr-defined]
    found = []
    positional = arguments.posonlyargs + arguments.args
    first_default = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        kind = "POSITIONAL_ONLY" if number < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        default = arguments.defaults[number - first_default] if number >= first_default else None
        found.append(_parameter(argument.arg, kind, default))
    if arguments.vararg:
        found.append(_parameter(arguments.vararg.arg, "VAR_POSITIONAL", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument.arg, "KEYWORD_ONLY", default))
    if arguments.kwarg:
        found.append(_parameter(arguments.kwarg.arg, "VAR_KEYWORD", None))
    return found


def _parameter(name: str, kind: str, default: ast.expr | None) -> dict[str, str]:
    found = {"name": name}
    if default is not None:
        found["default"] = ast.unparse(default)
    if kind != "POSITIONAL_OR_KEYWORD":
        found["kind"] = kind
    return found


_LINE = re.compile(
    r"(?P<indent> *)(?P<what>class |\.|)(?P<name>[\w.]+)(\((?P<parameters>.*?)\))?(?P<rest>( ->.*|:.*)?)"
)


def parse_line(line: str) -> tuple[bool, str, Entry]:
    """Return whether a line belongs to the class before the line, the name in the line, and its entry.

    Raises:
        ValueError: The line cannot be parsed.
    """
    code, _, comment = line.partition("   # ")
    match = _LINE.fullmatch(code.rstrip())
    if match is None:
        raise ValueError(f"cannot read {line!r}: expected a name, a signature, a class or a method.")
    entry: Entry
    if match["what"] == "class ":
        bases = comment.removeprefix("bases: ") if comment.startswith("bases: ") else ""
        entry = {
            "kind": "class",
            "parameters": parameters(match["parameters"] or ""),
            "bases": [base.strip() for base in bases.split(",") if base.strip()],
            "methods": {},
        }
    elif match["parameters"] is not None:
        entry = {"kind": "function", "parameters": parameters(match["parameters"])}
    else:
        entry = {"kind": "value"}
    return bool(match["indent"]), match["name"], entry


def parse_block(lines: list[str]) -> dict[str, Entry]:
    """Return the entries of one block of code, by name."""
    found: dict[str, Entry] = {}
    owner: Entry | None = None
    for line in lines:
        if not line.strip():
            continue
        belongs, name, entry = parse_line(line)
        if belongs:
            if owner is None:
                raise ValueError(f"{line!r} stands before any class.")
            owner["methods"][name] = entry
        else:
            found[name] = entry
            owner = entry if entry["kind"] == "class" else None
    return found


def parse_exports(sentence: str) -> list[str]:
    """Return the names in "… exports …: size, allreduce[_async][_], …", with and without the text of each bracket."""
    patterns = sentence.partition(":")[2].partition(".")[0].split(",")  # remarks follow the first sentence
    names = [name for pattern in patterns for name in _expand(pattern.strip())]
    return [name for name in names if name.isidentifier()]


def _expand(pattern: str) -> list[str]:
    match = re.search(r"\[(\w+)\]", pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [*_expand(before + after), *_expand(before + match[1] + after)]


def module_of(section: str, heading: str) -> str:
    """Return the module that a heading is about.

    Raises:
        ValueError: The heading is not in `MODULES`.
    """
    place = f"{section} {heading.replace('`', '')}"
    for beginning in sorted(MODULES, key=len, reverse=True):
        if place == beginning or place.startswith((beginning + " ", beginning + ",")):
            return MODULES[beginning]
    raise ValueError(f"section {section} has the heading {heading!r}, which MODULES does not know.")


def make_table(notes: str) -> dict[str, Any]:
    """Return the table made from the text of the notes."""
    source = next(line for line in notes.splitlines() if line.startswith("Horovod "))
    table: dict[str, Any] = {"source": source.partition(". ")[0] + ".", "exports": {}, "modules": {}}
    section, heading, block, inside = "", "", [], False
    for line in notes.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            if inside:
                block = []
            elif block:
                table["modules"].setdefault(module_of(section, heading), {}).update(parse_block(block))
                block = []
        elif inside:
            block.append(line)
        elif line.startswith("## "):
            section, heading = line[3:].partition(".")[0], ""
        elif line.startswith("### "):
            heading = line[4:]
        elif section in EXPORTS and re.match(r"(Exported names|Extra exports)\b", line):
            table["exports"][EXPORTS[section]] = parse_exports(re.sub(r"\(horovod/[^)]*\)", "", line))
    return table


def to_json(table: dict[str, Any]) -> str:
    """Return the table as JSON with a line for each name, so that diffs are readable."""

    def lines(values: dict[str, Any]) -> str:
        return ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())

    modules = ",\n".join(
        f"  {json.dumps(name)}: {{\n{lines(entries)}\n  }}" for name, entries in table["modules"].items()
    )
    return (
        f' {{\n "source": {json.dumps(table["source"])},\n "exports": {{\n{lines(table["exports"])}\n }},\n'
        f' "modules": {{\n{modules}\n }}\n}}\n'
    ).lstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notes", type=Path)
    parser.add_argument("table", type=Path)
    given = parser.parse_args()
    given.table.write_text(to_json(make_table(given.notes.read_text())))


if __name__ == "__main__":
    main()
