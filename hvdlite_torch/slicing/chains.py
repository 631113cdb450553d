"""Pairs of linear layers in a forward pass that a program has written, found by reading its code.

``self.down(self.act(self.gate(x)) * self.up(x))`` can be sliced: `gate` and `up` by columns, `down` by rows, since everything
between works on each element by itself. A forward pass that is a list of assignments and a ``return`` becomes a graph here.
What is not understood in it counts as a use of the whole tensor; a forward pass with other statements, or one that reads its
layers in another way than to call them, is left alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import nn


class Chain(NamedTuple):
    """Linear layers of one module that can be sliced together.

    Attributes:
        columns: The names of the children that are sliced by columns.
        between: The names of the children that work on slices then.
        rows: The name of the child that is sliced by rows.
    """

    columns: tuple[str, ...]
    between: tuple[str, ...]
    rows: str


_WITH_NAMES_OF_THEIR_OWN = (
    *(ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


class _Node:
    """A value in a forward pass: the result of a child of the module, of an operation on each element, a number, or another."""

    def __init__(self, kind: str, child: str = "", given: tuple[_Node, ...] = ()) -> None:
        self.kind, self.child, self.given, self.uses = kind, child, given, 0
        for each in given:
            each.uses += 1


class _Unknown(Exception):
    """The forward pass does something that is not understood."""


def chains_of(
    module: nn.Module, is_linear: Callable[[Any], bool], is_pointwise: Callable[[Any], bool]
) -> Iterator[Chain]:
    """Return the chains in the forward pass of a module's class.

    Args:
        module: The module.
        is_linear: Whether a child is a linear layer that can be sliced.
        is_pointwise: Whether a child, or a function, works on each element by itself.
    """
    function: Any = type(module).forward
    body = _body_of(function)
    if body is None:
        return
    reading = _Reading(module, function, is_linear, is_pointwise)
    try:
        reading.read(body)
    except _Unknown:
        return
    taken: set[str] = set()
    for node in reading.calls:
        if node.kind != "linear" or node.child in taken:
            continue
        if (chain := _chain(node)) and taken.isdisjoint(chain.columns):
            taken.update((*chain.columns, chain.rows))
            yield chain


def _chain(rows: _Node) -> Chain | None:
    """Return the chain that ends with a linear layer, or None."""
    columns: list[str] = []
    between: list[str] = []
    waiting = list(rows.given)
    while waiting:
        node = waiting.pop()
        if node.uses != 1 or node.kind == "other":
            return None
        if node.kind == "number":
            continue
        if node.kind == "linear":
            columns.append(node.child)
        else:
            between += [node.child] * bool(node.child)
            waiting += node.given
    return Chain(tuple(reversed(columns)), tuple(between), rows.child) if columns else None


def _body_of(function: Any) -> ast.FunctionDef | None:
    """Return the code of a plain function, or None."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) and not tree.decorator_list else None


class _Reading:
    """Reads one forward pass.

    Args:
        module: The module.
        function: Its forward pass.
        is_linear: See `chains_of`.
        is_pointwise: See `chains_of`.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Any,
        is_linear: Callable[[Any], bool],
        is_pointwise: Callable[[Any], bool],
    ) -> None:
        self._module, self._globals = module, function.__globals__
        self._is_linear, self._is_pointwise = is_linear, is_pointwise
        self._values: dict[str, _Node] = {}
        self.calls: list[_Node] = []

    def read(self, function: ast.FunctionDef) -> None:
        """Read all statements, and fill `calls` with the calls of children, in their order."""
        first, *given = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        self._self = first
        named = [*given, *(each.arg for each in function.args.kwonlyargs)]
        named += [each.arg for each in (function.args.vararg, function.args.kwarg) if each is not None]
        self._values = {name: _Node("other") for name in named}
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(statement, ast.Return) and statement.value is not None:
                _Node("other", given=(self._value(statement.value),))
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                value = self._value(statement.value)
                for target in targets:
                    self._assign(target, value)
            else:
                raise _Unknown
        names = [node.child for node in self.calls]
        if len(set(names)) < len(names):
            raise _Unknown  # a layer that is called twice

    def _assign(self, target: ast.expr, value: _Node) -> None:
        if isinstance(target, ast.Name) and target.id != self._self:
            self._values[target.id] = value
        elif isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts):
            for each in target.elts:
                self._assign(each, _Node("other", given=(value,)))
        else:
            raise _Unknown

    def _value(self, node: ast.expr) -> _Node:
        if isinstance(node, ast.Name) and node.id in self._values:
            return self._values[node.id]
        if isinstance(node, ast.Call) and not node.keywords and len(node.args) == 1 and not self._starred(node.args):
            called = self._resolve(node.func)
            if isinstance(called, nn.Module):
                assert isinstance(node.func, ast.Attribute)
                kind = "linear" if self._is_linear(called) else "pointwise" if self._is_pointwise(called) else "other"
                made = _Node(kind, node.func.attr, (self._value(node.args[0]),))
                self.calls.append(made)
                return made
            if called is not None and self._is_pointwise(called):
                return _Node("pointwise", given=(self._value(node.args[0]),))
        if isinstance(node, _WITH_NAMES_OF_THEIR_OWN):
            raise _Unknown
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return _Node("number")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._self:
            if not isinstance(getattr(self._module, node.attr, None), int | float | str):
                raise _Unknown  # a layer, a weight or a method, which may be anything
            return _Node("number")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return _Node("pointwise", given=(self._value(node.left), self._value(node.right)))
        return self._other(node)

    def _other(self, node: ast.AST) -> _Node:
        """Return the value of an expression that is not understood. It may use tensors, but not the module."""
        if isinstance(node, ast.Call) and isinstance(self._resolve(node.func), nn.Module):
            assert isinstance(node.func, ast.Attribute)
            parts: list[ast.AST] = [*node.args, *(each.value for each in node.keywords)]
            made = _Node("other", node.func.attr, tuple(map(self._any, parts)))
            self.calls.append(made)
            return made
        return _Node("other", given=tuple(self._any(each) for each in ast.iter_child_nodes(node)))

    def _any(self, node: ast.AST) -> _Node:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred):
            if isinstance(node, ast.Name) and node.id in (self._self, "super", "__class__"):
                raise _Unknown
            return self._value(node)
        return self._other(node)

    @staticmethod
    def _starred(nodes: Collection[ast.expr]) -> bool:
        return any(isinstance(each, ast.Starred) for each in nodes)

    def _resolve(self, node: ast.expr) -> Any:
        """Return what ``self.name`` or ``a.b.name`` of the function's globals is, or None."""
        if isinstance(node, ast.Name):
            found = None if node.id in self._values else self._globals.get(node.id)
            return None if isinstance(found, nn.Module) else found
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == self._self:
            return self._module._modules.get(node.attr)
        owner = self._resolve(node.value)
        found = getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
        return None if isinstance(found, nn.Module) else found
