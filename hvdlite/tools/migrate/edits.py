"""Changes of a program's text, and what is said about it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from hvdlite.tools.migrate.program import Program


@dataclass(frozen=True, order=True)
class Note:
    """A remark on a line of the program.

    Attributes:
        line: The number of the line; 0 for the whole program.
        text: What to do, or to know.
        by_hand: The program does not do what it should before somebody does that.
    """

    line: int
    text: str
    by_hand: bool = True


class Edits:
    """Collects the changes of one program, and makes the new text.

    Args:
        program: The program.
        package: The package of hvdlite that the new lines need, such as "hvdlite_torch"; empty if they need none.
    """

    def __init__(self, program: Program, package: str) -> None:
        self.program = program
        self.notes: list[Note] = []
        self._package = package
        self._replaced: dict[tuple[int, int], str] = {}
        self._before: dict[ast.stmt, list[str]] = {}
        self.removed: list[ast.stmt] = []
        self._uses: list[int] = []  # places where the new text needs the import
        taken = program.bound | set(program.imports)
        self.alias = package if "." in package or "hvd" in taken else "hvd"

    def by_hand(self, node: ast.AST | None, text: str) -> None:
        """Say what cannot be translated."""
        self._note(node, text, True)

    def remark(self, node: ast.AST | None, text: str) -> None:
        """Say what there is to know."""
        self._note(node, text, False)

    def _note(self, node: ast.AST | None, text: str, by_hand: bool) -> None:
        note = Note(getattr(node, "lineno", 0), text, by_hand)
        if note not in self.notes:
            self.notes.append(note)

    # ---- changes ----

    def replace(self, node: ast.expr, new: str) -> bool:
        """Replace an expression, if its place in the text is known; else say that it has to be done by hand."""
        if not self.program.is_there(node):
            self.by_hand(node, f"write {new} for {ast.unparse(node)}")
            return False
        start, end = self.program.start(node), self.program.end(node)
        inside = [place for place in self._replaced if start <= place[0] and place[1] <= end]
        if any(first <= start and end <= last for first, last in self._replaced):
            return False  # it is a part of what was replaced
        for place in inside:  # the whole is replaced now
            del self._replaced[place]
        self.replace_text(start, end, new)
        if "#" in self.program.text[start:end] and self.program.has_comment(start, end):
            self.remark(node, "the comment inside of what changes here is left out")
        return True

    def replace_text(self, start: int, end: int, new: str) -> None:
        """Replace the text between two places."""
        self._replaced[start, end] = new
        if self._package and (f"{self.alias}." in new or '"hvdlite"' in new):
            self._uses.append(start)

    def is_replaced(self, node: ast.expr) -> bool:
        """Tell whether an expression, or a part of it, is changed."""
        begin, last = self.program.start(node), self.program.end(node)
        return any(start < last and begin < end for start, end in self._replaced)

    def before(self, node: ast.AST, line: str) -> None:
        """Put a line before the statement of a node."""
        anchor = self.program.anchor(node)
        self._uses.append(self.program.start(anchor))
        self._before.setdefault(anchor, []).append(line)

    def once_before(self, node: ast.AST, line: str) -> None:
        """Put a line before the statement of a node, unless the same line comes before it already."""
        anchor = self.program.anchor(node)
        if not any(line in lines and self._precedes(other, anchor) for other, lines in self._before.items()):
            for other, lines in self._before.items():
                if line in lines and self._precedes(anchor, other):
                    lines.remove(line)
            self.before(node, line)

    def _precedes(self, one: ast.stmt, other: ast.stmt) -> bool:
        """Tell whether the line before one statement has always run before the other."""
        block = self.program.block(one)
        for each in (other, *self.program.around(other)):
            if isinstance(each, ast.stmt) and each in block:
                return block.index(one) <= block.index(each)
        return False

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement."""
        self.removed.append(statement)

    # ---- the new text ----

    def result(self) -> str:
        """Return the new text. The import comes after those of the program that are before its first use."""
        program, changes = self.program, [(*place, new) for place, new in self._replaced.items()]
        changes += [(*place, new) for place, new in self._removals()]
        for anchor, lines in self._before.items():
            start = program.start(anchor)
            blanks = program.text[program.text.rfind("\n", 0, start) + 1 : start]
            changes.append((start, start, "".join(f"{line}{program.newline}{blanks}" for line in lines)))
        if self._uses:
            place = self._import_place(min(self._uses))
            news = [*self._replaced.values(), *(line for lines in self._before.values() for line in lines)]
            line = f"import {self._package}"
            if self.alias != self._package and any(f"{self.alias}." in new for new in news):
                line += f" as {self.alias}"
            elif self.alias != self._package:
                line += '  # noqa: F401  (it enters the backend "hvdlite")'
            changes.append((place, place, f"{line}{program.newline}"))
        text = program.text
        for start, end, new in sorted(changes, key=lambda change: (change[0], change[1]), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _removals(self) -> list[tuple[tuple[int, int], str]]:
        found = []
        for statement in self.removed:
            program = self.program
            first, last = program.line(statement.lineno)[0], program.line(statement.end_lineno or 0)[1]
            rest = (
                program.text[first : program.start(statement)] + program.text[program.end(statement) : last]
            ).strip()
            if (not rest or rest.startswith("#")) and any(
                each not in self.removed for each in program.block(statement)
            ):
                found.append(((first, last), ""))
            else:
                found.append(((program.start(statement), program.end(statement)), "pass"))
        return found

    def _import_place(self, use: int) -> int:
        program, place, after_imports = self.program, 0, False
        for statement in program.tree.body:
            if program.start(statement) >= use:
                break
            is_import = isinstance(statement, ast.Import | ast.ImportFrom)
            is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_import or (is_docstring and not after_imports):
                place = program.line(statement.end_lineno or 1)[1]
                after_imports = after_imports or is_import
        if not place:  # a comment with the interpreter or the encoding stays first
            first = program.tree.body[0].lineno if program.tree.body else 1
            place = program.line(first)[0]
        return place
