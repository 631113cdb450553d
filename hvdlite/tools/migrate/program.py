"""A program: what its names mean, where things are in its text, and which statement a line can be put before."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, TypeVar

from hvdlite.errors import ArgumentError

Node = TypeVar("Node", bound=ast.expr | ast.stmt)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Program:
    """A program for Python, as text and as a syntax tree.

    Attributes:
        text: The program, with its own ends of lines.
        tree: Its syntax tree.
    """

    def __init__(self, text: str, name: str = "<program>") -> None:
        """Parse a program.

        Raises:
            ArgumentError: The text is no program for this version of Python.
        """
        self.text = text
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte
            line = getattr(error, "lineno", None) or 1
            reason = getattr(error, "msg", None) or str(error)
            raise ArgumentError(f"{name}, line {line}: no program for this Python: {reason}.") from error
        lines = split(text)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @classmethod
    def read(cls, path: Path) -> Program:
        """Read a file, in the encoding that its first lines declare.

        Raises:
            ArgumentError: It cannot be read, or is no program for this version of Python.
        """
        try:
            content = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(encoding)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
        return cls(text, str(path))

    # ---- what names mean ----

    @cached_property
    def bound(self) -> set[str]:
        """All names that the program binds, but for those of imports."""
        found = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and _binds(self._parents, node)}
        found |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        return found | {node.name for node in ast.walk(self.tree) if isinstance(node, Function | ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name means, in full. A name that means two things is not in it."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    found.setdefault(alias.asname or name, set()).add(name)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, set()).add(f"{node.module}.{alias.name}")
        return {
            name: meanings.pop() for name, meanings in found.items() if len(meanings) == 1 and name not in self.bound
        }

    def meaning(self, node: ast.AST) -> str:
        """Return the full name of what an expression means, such as "torch.distributed.get_rank"; empty if unknown."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def calls(self, *names: str) -> Iterator[tuple[ast.Call, str]]:
        """Yield the calls of these functions, and their full names. A name may end in ``.*``."""
        for node in self.walk(ast.Call):
            name = self.meaning(node.func)
            if name and any(name == each or (each.endswith(".*") and name.startswith(each[:-1])) for each in names):
                yield node, name

    def walk(self, *kinds: type[Node]) -> list[Node]:
        """Return the nodes of these kinds, in the order of their lines."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        return sorted(found, key=lambda node: (node.lineno, node.col_offset))

    # ---- where things are ----

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node around a node."""
        return self._parents.get(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while (outer := self._parents.get(node)) is not None:
            yield outer
            node = outer

    def function(self, node: ast.AST) -> Function | None:
        """Return the function that a node is in; None for the module's own code."""
        return next((each for each in self.around(node) if isinstance(each, Function)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is in, or is."""
        return next(each for each in (node, *self.around(node)) if isinstance(each, ast.stmt))

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that a statement is in."""
        outer = self._parents[statement]
        return next(block for name in _BLOCKS if statement in (block := getattr(outer, name, None) or []))

    def start(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Return the place of the first character of a node. That of a function is its first decorator."""
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        if decorators and decorators[0].lineno < node.lineno:
            return self._starts[decorators[0].lineno - 1] + self.indent(node)
        return self._place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Return the place after the last character of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def indent(self, node: ast.expr | ast.stmt | ast.alias) -> int:
        """Return the number of blanks before the first statement of a node's line."""
        line = self._lines[node.lineno - 1]
        return len(line) - len(line.lstrip())

    def line(self, number: int) -> tuple[int, int]:
        """Return the places of the first character of a line, and after its end. The first line is 1."""
        return self._starts[number - 1], self._starts[number]

    def source(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.text[self.start(node) : self.end(node)]

    def has_comment(self, start: int, end: int) -> bool:
        """Tell whether there is a comment between two places, at which a token begins and ends."""
        tokens = tokenize.generate_tokens(io.StringIO(f"({self.text[start:end]}\n)").readline)
        return any(token.type == tokenize.COMMENT for token in tokens)

    def is_there(self, node: ast.expr) -> bool:
        """Tell whether the positions of an expression are right. Before Python 3.12, those in f-strings are not."""
        try:
            return ast.dump(ast.parse(f"({self.source(node)}\n)", mode="eval").body) == ast.dump(node)
        except (SyntaxError, UnicodeDecodeError, IndexError):
            return False

    @property
    def newline(self) -> str:
        """The end of a line, as the program has it."""
        return "\r\n" if "\r\n" in self.text else "\n"

    def anchor(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node that begins its line: others can be put before it."""
        statement = self.statement(node)
        while True:
            start = self.start(statement)
            number = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
            first = self.line(number)[0]
            if not self.text[first:start].strip() and not self.text.startswith("elif", start):
                return statement
            siblings = self.block(statement)
            before = siblings[: siblings.index(statement)]
            same = [each for each in before if each.end_lineno == statement.lineno]
            statement = same[0] if same else self.statement(self._parents[statement])


def split(text: str) -> list[str]:
    """Split a text into lines as Python counts them; `str.splitlines` knows more ends of a line."""
    lines: list[str] = re.split("(?<=\n)|(?<=\r)(?!\n)", text)
    return [line for line in lines if line]


def _binds(parents: dict[ast.AST, ast.AST], node: ast.Name) -> bool:
    """Tell whether a name gets a value here. ``DDP = None``, where an import has failed, does not count."""
    outer = parents.get(node)
    if isinstance(outer, ast.Assign) and isinstance(outer.value, ast.Constant) and outer.value.value is None:
        return False
    return isinstance(node.ctx, ast.Store)
