"""docs/troubleshooting.md has every class of error and every message that hvdlite prints, and none that it does not print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
PACKAGES = ("hvdlite", "hvdlite_torch", "hvdlite_tf")
PRINTERS = {"warn", "_warn", "_say", "warning", "error", "say", "tell"}
"""The functions whose text a user reads. `print` counts too, if it prints to stderr."""
ERRORS_OF_COMMANDS = {
    "parser.error",
    "chosen.error",
}  # they say which words are wrong, and where the right ones are listed
NAMED_BY_OTHERS = (
    r"hvdlite: …",  # an error of the list, caught and printed
    r"hvdliterun: …\n?",
    r"hvdlite serve: …",
    r"hvdlite compat: ….*",
    r"hvdlite: rank …: …",
    r"hvdlite: … \(HVDLITE_ADVICE=0 says nothing\.\)",
)
"""Texts that consist of another message, which is on the page itself."""


def trees() -> Iterator[ast.Module]:
    """The modules of the packages. docs/doctor.md has what the doctor says."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if ROOT / "hvdlite/tools/doctor" not in path.parents:
                yield ast.parse(path.read_text())


def template(node: ast.AST) -> str | None:
    """A text of the code with "…" for each value in it; None if the node is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%s|%d|%\.?\d*f", "…", node.value)  # of the module logging
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def printed() -> set[str]:
    """The texts that the code prints or warns with."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if len(node.args) < 1 + (name == "tell"):
                continue
            prints = name == "print" and any("stderr" in ast.unparse(each.value) for each in node.keywords)
            text = template(node.args[name == "tell"])  # tell(area, text, …)
            if text and (prints or (name in PRINTERS and ast.unparse(node.func) not in ERRORS_OF_COMMANDS)):
                found.add(text)
    return found


def texts() -> set[str]:
    """All texts of the code."""
    return {text for tree in trees() for node in ast.walk(tree) if (text := template(node))}


def error_classes() -> set[str]:
    """The names of the classes that derive from HvdliteError."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"HvdliteError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return re.findall(r"^\*\*`(.*)`\*\*$", PAGE.read_text(), re.MULTILINE)


def begins_like(message: str, text: str) -> bool:
    """Whether a message of the page, in which "…" stands for anything, is the beginning of a text of the code."""
    first, *others = (part.strip() for part in message.split("…"))
    rest = " ".join(text.split())
    if not rest.startswith(first):
        return False
    rest = rest.removeprefix(first)
    for part in others:
        _, found, rest = rest.partition(part) if part else ("", "…", rest)
        if not found:
            return False
    return True


def test_every_printed_message_is_on_the_page(messages: list[str]) -> None:
    found = {text for text in printed() if not any(re.fullmatch(each, text, re.DOTALL) for each in NAMED_BY_OTHERS)}
    assert len(found) > 20
    missing = sorted(text for text in found if not any(begins_like(message, text) for message in messages))
    assert not missing, f"{PAGE} has no entry for: {missing}"


def test_every_class_of_error_is_on_the_page() -> None:
    headings = set(re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE))
    assert {"MismatchError", "SharedMemoryError"} <= headings
    assert headings == error_classes()


def test_the_code_has_every_message_of_the_page(messages: list[str]) -> None:
    everything = texts()
    gone = [message for message in messages if not any(begins_like(message, text) for text in everything)]
    assert not gone, f"no text of the code is like: {gone}"


def test_an_entry_that_is_missing_is_seen() -> None:
    assert begins_like("rank … has left", "rank … has left the job")
    assert not begins_like("rank … has left", "the rank … has left the job")
    assert not begins_like("rank has left", "rank … has left the job")
