"""This file finds what a Python file uses of Horovod. It reads the file's text, and runs nothing of it.

It follows names from the imports on: through ``import … as``, ``from … import …``, assignments (also ``self.hvd = hvd``),
``importlib.import_module``, attributes and ``getattr``. It does not see names that a program composes while it runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from hvdlite.compat.table import RESULTS

_VARIABLE = re.compile(r"HOROVOD_[A-Z0-9_]+")
_IMPORTERS = {"importlib.import_module", "import_module", "__import__"}
_PASSES = 4  # each pass follows one more link of a chain of assignments; programs have fewer links


@dataclass(frozen=True)
class Use:
    """One thing of Horovod that a file uses.

    Attributes:
        kind: "name": a name of Horovod. "argument": a keyword argument of a function of Horovod. "variable": an environment
            variable. "flag": a flag of horovodrun.
        name: The full name. "()" in it means what a function returns: "horovod.torch.DistributedOptimizer().synchronize".
        line: The number of the line; the first line is 1.
        argument: The name of the argument if `kind` is "argument"; then `name` is the function.
    """

    kind: Literal["name", "argument", "variable", "flag"]
    name: str
    line: int
    argument: str = ""


def of_python(text: str) -> list[Use]:
    """Return what a Python program uses of Horovod, in the order of its lines.

    Args:
        text: The text of the program.

    Raises:
        SyntaxError: The text is no program for this version of Python.
    """
    tree = ast.parse(text)
    collector = _Collector()
    for _ in range(_PASSES):  # functions may use variables that are assigned further down
        collector.uses.clear()
        collector.visit(tree)
    return sorted(set(collector.uses), key=lambda use: (use.line, use.name, use.argument))


class _Collector(ast.NodeVisitor):
    """Visits a program. It notes which names of Horovod each variable of each scope may hold, and which names are used."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self._scopes: dict[ast.AST | None, dict[str, set[str]]] = {None: {}}
        self._path: list[dict[str, set[str]]] = [self._scopes[None]]

    # ---- what variables hold ----

    def _bind(self, variable: str, names: set[str]) -> None:
        self._path[-1].setdefault(variable, set()).update(names)

    def _held(self, variable: str) -> set[str]:
        return next((scope[variable] for scope in reversed(self._path) if variable in scope), set())

    def _value(self, node: ast.expr) -> set[str]:
        """Return the names of Horovod that an expression may mean."""
        match node:
            case ast.Name(id=variable):
                return self._held(variable)
            case ast.Attribute(value=owner, attr=attribute):
                held = self._held(ast.unparse(node)) if isinstance(owner, ast.Name) else set()
                return held | {f"{name}.{attribute}" for name in self._value(owner)}
            case ast.IfExp(body=one, orelse=other):
                return self._value(one) | self._value(other)
            case ast.BoolOp(values=values):
                return {name for value in values for name in self._value(value)}
            case ast.NamedExpr(value=value):
                return self._value(value)
            case ast.Call(func=function, args=[ast.Constant(value=str(module)), *_]) if _is_importer(function):
                return {module} if module.partition(".")[0] == "horovod" else set()
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(attribute)), *_]):
                return {f"{name}.{attribute}" for name in self._value(owner)}
            case ast.Call(func=function):
                return {f"{name}()" for name in self._value(function)}
        return set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "horovod":
                self._use(alias.name, node.lineno)
                self._bind(alias.asname or "horovod", {alias.name if alias.asname else "horovod"})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module is not None and node.module.partition(".")[0] == "horovod":
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self._use(name, node.lineno)
                if alias.name != "*":
                    self._bind(alias.asname or alias.name, {name})

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        names = self._value(value)
        if isinstance(target, ast.Name):
            self._bind(target.id, names)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and names:
            # An attribute is seen from other methods too.
            self._scopes[None].setdefault(ast.unparse(target), set()).update(names)

    # ---- scopes ----

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        for part in outside:
            self.visit(part)
        with self._inside(node, node.args):
            for statement in node.body:
                self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        with self._inside(node, node.args):
            self.visit(node.body)

    @contextmanager
    def _inside(self, node: ast.AST, arguments: ast.arguments) -> Iterator[None]:
        self._path.append(self._scopes.setdefault(node, {}))
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in filter(None, every):
            self._bind(argument.arg, set())  # an argument may hold anything, and hides the outer variable
        yield
        self._path.pop()

    # ---- what is used ----

    def _use(self, name: str, line: int) -> None:
        function, call, attribute = name.rpartition("().")
        if "()" in name and not (call and function in RESULTS and attribute in RESULTS[function][1]):
            return  # of the names of a function's result, only those that Horovod adds belong to Horovod
        self.uses.append(Use("name", name, line))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names = self._value(node)
        for name in names:
            self._use(name, node.lineno)
        owner: ast.expr = node
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not names or not isinstance(owner, ast.Name):
            self.visit(node.value if not names else owner)

    def visit_Name(self, node: ast.Name) -> None:
        for name in self._held(node.id):
            self._use(name, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._value(node.func)
        for name in called:
            arguments = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
            if "()" not in name:
                self.uses += [Use("argument", name, node.lineno, argument) for argument in arguments]
        asked = self._value(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            for name in asked:  # with a third argument the program can do without the name
                self._use(name, node.lineno)
        elif _is_importer(node.func):
            for name in asked:
                self._use(name, node.lineno)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
            self.uses.append(Use("variable", node.value, node.lineno))

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None and _VARIABLE.fullmatch(node.arg):  # env(HOROVOD_TIMELINE=path)
            self.uses.append(Use("variable", node.arg, node.value.lineno))
        self.generic_visit(node)


def _is_importer(function: ast.expr) -> bool:
    return ast.unparse(function) in _IMPORTERS
