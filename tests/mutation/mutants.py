"""Mutants of a module: all small faults that are planted in its syntax tree.

    a < b       a <= b          x + y     x - y         not x       x             f(y)    (nothing)
    a and b     a or b          min(x)    max(x)        3           4             True    False

Docstrings, annotations and messages of errors are left as they are: no test needs to notice them. So is what changes
nothing for certain: the -1 of a reshape, as NumPy takes any negative number for the side that it computes, and torch
refuses all but -1; and defaults of functions whose body is ``...``, as those of a protocol, which nothing calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        path: of the module, from the root of the project.
        number: of the fault in the module, from 0 to ``count``.
        line: where it is.
        statement: the lines of its statement, without those of statements in it.
        before: the statement's first line.
        after: the same with the fault.
    """

    path: str
    number: int
    line: int
    statement: range
    before: str
    after: str

    def __str__(self) -> str:
        """Return the place and the fault."""
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def count(root: Path, path: str) -> int:
    """Return the number of mutants of a module.

    Args:
        root: of the project.
        path: of the module, from the root.
    """
    return sum(1 for _ in _places(ast.parse((root / path).read_text("utf-8"))))


def mutant(root: Path, path: str, number: int) -> Mutant:
    """Return one of them; see ``count``."""
    tree = ast.parse((root / path).read_text("utf-8"))
    statement, node, kind = next(islice(_places(tree), number, None))
    before, line = ast.unparse(statement), getattr(node, "lineno", statement.lineno)
    body = getattr(statement, "body", None)
    end = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno
    after = ast.unparse(_changed(statement, node, kind))
    return Mutant(path, number, line, range(statement.lineno, end + 1), *_first_difference(before, after))


def mutated(source: str, number: int) -> ast.Module:
    """Return the tree of a module with one fault."""
    tree = ast.parse(source)
    for at, (statement, node, kind) in enumerate(_places(tree)):
        if at == number:
            _replace(tree, statement, _changed(statement, node, kind))
            return ast.fix_missing_locations(tree)
    raise ValueError(f"the module has no mutant {number}")


def _first_difference(before: str, after: str) -> tuple[str, str]:
    pairs = zip((*before.splitlines(), ""), (*after.splitlines(), ""), strict=False)
    return next(((a.strip(), b.strip()) for a, b in pairs if a != b), (before, after))


def _places(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.AST, str]]:
    """Yield (statement, node, kind of fault) of every mutant of a module."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement, statement, "drop"
        if isinstance(statement, ast.stmt):
            for node in _of_statement(statement):
                yield from ((statement, node, kind) for kind in _kinds(node))


def _of_statement(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of statements in it, annotations and what it raises."""
    if isinstance(statement, (ast.Raise, ast.Import, ast.ImportFrom, ast.ClassDef, ast.Assert)) or _is_stub(statement):
        return
    left: list[ast.AST] = [statement]
    while left:
        node = left.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check, as an assertion is
                continue
            children = value if isinstance(value, list) else [value]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
                children = [child for child in children if ast.unparse(child) != "-1"]
            left += [c for c in children if isinstance(c, ast.AST) and not isinstance(c, (ast.stmt, ast.JoinedStr))]


def _is_stub(statement: ast.stmt) -> bool:
    """Whether a statement is a function that has no body but a docstring and ``...``."""
    if not isinstance(statement, ast.FunctionDef):
        return False
    *documented, last = (part.value.value if _is_constant(part) else None for part in statement.body)  # type: ignore[attr-defined]
    return last is ... and all(isinstance(text, str) for text in documented)


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _kinds(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _OTHER:
        yield "operator"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        yield "comparison"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield "call"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield "constant"


def _changed(statement: ast.stmt, node: ast.AST, kind: str) -> ast.stmt:
    """Return the statement with the fault; it and the node are changed."""
    if kind == "drop":
        return ast.copy_location(ast.Pass(), statement)
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)):
        node.op = _OTHER[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Compare):
        node.ops[0] = _OTHER[type(node.ops[0])]()  # type: ignore[assignment]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        node.func.id = _CALLS[node.func.id]
    elif isinstance(node, ast.Constant):
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    else:
        _replace(statement, node, node.operand)  # type: ignore[attr-defined]
    return statement


def _replace(within: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(within):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
                return
            if isinstance(value, list):
                for at, child in enumerate(value):
                    if child is old:
                        value[at] = new
                        return
