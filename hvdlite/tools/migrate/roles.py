"""The rank and the number of ranks that a program passes around, up to ``init_process_group(rank=…, world_size=…)``.

MPI knows both, so the call needs neither. But a sampler that gets the same variables must get what MPI says: this file follows
them back, through the parameters of functions, to the places where they get their values.
"""

from __future__ import annotations

import ast
from typing import Literal, TypeAlias

from hvdlite.tools.migrate.edits import Edits
from hvdlite.tools.migrate.program import Function

Role: TypeAlias = Literal["rank", "size"]


def bind(call: ast.Call, names: list[str]) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by the names of the parameters; None if there are ``*`` or ``**`` among them."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    return dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters, those that are given by name only last."""
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


class Roles:
    """Says of parameters that they are the rank, or the number of ranks, and changes what is passed for them.

    Args:
        edits: The changes of the program.
    """

    def __init__(self, edits: Edits) -> None:
        self._edits = edits
        self._program = edits.program
        self.of: dict[tuple[Function, str], Role] = {}
        functions: dict[str, list[Function]] = {}
        every: list[Function] = [*self._program.walk(ast.FunctionDef), *self._program.walk(ast.AsyncFunctionDef)]
        for node in every:
            functions.setdefault(node.name, []).append(node)
        self._functions = {name: found[0] for name, found in functions.items() if len(found) == 1}

    def value(self, role: Role) -> str:
        """Return the call that says a role's value."""
        return f"{self._edits.alias}.{role}()"

    def called(self, function: ast.expr) -> list[Function]:
        """Return the functions of this program that an expression may mean: one, or those that are passed as a parameter."""
        if not isinstance(function, ast.Name):
            return []
        if function.id in self._functions:
            return [self._functions[function.id]]
        outer = self._program.function(function)
        if outer is None or function.id not in parameters(outer):
            return []
        passed = [(bind(call, parameters(outer)) or {}).get(function.id) for call in self._calls_of(outer)]
        if not all(isinstance(each, ast.Name) and each.id in self._functions for each in passed):
            return []
        return [self._functions[each.id] for each in passed if isinstance(each, ast.Name)]

    def _calls_of(self, function: Function) -> list[ast.Call]:
        found = self._program.walk(ast.Call)
        return [node for node in found if isinstance(node.func, ast.Name) and self.called(node.func) == [function]]

    def settle(self, value: ast.expr, role: Role, call: ast.Call, is_passed: bool) -> None:
        """See to it that an expression has the value of its role, wherever else it is used.

        Args:
            value: The expression that the program passes for the rank, or the number of ranks.
            role: Which of the two.
            call: The call that it is passed in.
            is_passed: The call stays as it is; otherwise its argument is left out.
        """
        edits = self._edits
        if edits.is_replaced(value) or self._is_asked(value):
            return
        if isinstance(value, ast.Name):
            self._settle_name(value, role, call, is_passed)
        elif isinstance(value, ast.Attribute):
            same = [
                node
                for node in ast.walk(self._program.tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node) == ast.unparse(value)
            ]
            if is_passed or any(isinstance(node.ctx, ast.Load) and node is not value for node in same):
                self._assign(ast.unparse(value), role, call)
        elif is_passed:
            if edits.replace(value, self.value(role)):
                edits.once_before(call, f"{edits.alias}.init()")
        elif not isinstance(value, ast.Constant | ast.UnaryOp):
            edits.remark(call, f"{ast.unparse(value)} is left out: {self.value(role)} is what MPI says")

    def _is_asked(self, value: ast.expr) -> bool:
        names = {self._program.meaning(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
        return any(name.startswith("torch.distributed.get_") for name in names)

    def _assign(self, target: str, role: Role, call: ast.Call) -> None:
        self._edits.once_before(call, f"{self._edits.alias}.init()")
        self._edits.before(call, f"{target} = {self.value(role)}")

    def _settle_name(self, value: ast.Name, role: Role, call: ast.Call, is_passed: bool) -> None:
        function = self._program.function(call)
        scope = function or self._program.tree
        bound = self._bound(value.id, scope)
        if function is not None and value.id in parameters(function):
            if bound:
                self._assign(value.id, role, call)
            elif (function, value.id) not in self.of:
                self.of[function, value.id] = role
                self._settle_callers(function, value.id, role)
            return
        if not bound and function is not None:
            bound = self._bound(value.id, self._program.tree)
            if len(bound) != 1:
                self._edits.by_hand(call, f"{value.id} must be {self.value(role)} wherever it is used")
                return
        whole = self._program.parent(bound[0]) if len(bound) == 1 else None
        if isinstance(whole, ast.Assign) and whole.targets == [bound[0]]:
            if self._edits.is_replaced(whole.value) or self._is_asked(whole.value):
                return
            if self._edits.replace(whole.value, self.value(role)):
                self._edits.once_before(whole, f"{self._edits.alias}.init()")
        elif is_passed or self._is_used_after(value.id, call, scope):
            self._assign(value.id, role, call)

    def _bound(self, name: str, scope: ast.AST) -> list[ast.Name]:
        owner = scope if isinstance(scope, Function) else None
        found = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name]
        return [node for node in found if isinstance(node.ctx, ast.Store) and self._program.function(node) is owner]

    def _is_used_after(self, name: str, call: ast.Call, scope: ast.AST) -> bool:
        found = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name]
        return any(node.lineno > (call.end_lineno or call.lineno) for node in found)

    def _settle_callers(self, function: Function, name: str, role: Role) -> None:
        names, calls = parameters(function), self._calls_of(function)
        if self._functions.get(function.name) is not function or (names and names[0] == "self"):
            self._edits.by_hand(function, f"pass {self.value(role)} for {name}")
            return
        for call in calls:
            passed = bind(call, names)
            if passed is None:
                self._edits.by_hand(call, f"pass {self.value(role)} for {name}")
            elif name in passed:
                self.settle(passed[name], role, call, True)
