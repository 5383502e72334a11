"""Mutants: one place of a source file replaced by what a programmer might have written in its stead."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Each operator by the one that takes its place.
_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARED |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_CALCULATED = {
    "+": "-",
    "-": "+",
    "*": "//",
    "/": "*",
    "//": "*",
    "%": "//",
    "&": "|",
    "|": "&",
    "<<": ">>",
    ">>": "<<",
}
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
_SYMBOLS: dict[type[ast.AST], str] = {
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="},
    **{ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"},
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>"},
}


@dataclass(frozen=True)
class Mutant:
    """file: relative to the checkout; begin and end: bytes of it that are replaced by new."""

    file: str
    begin: int
    end: int
    line: int
    old: str
    new: str
    source: str
    """The hash of the file."""

    @property
    def name(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old!r} -> {new!r} at {self.begin} of {self.source}"

    def applied(self, source: bytes) -> bytes:
        """The file with this mutant. Raises ValueError for another file."""
        if hash_of(source) != self.source:
            raise ValueError(f"{self.file} has changed since the mutant was drawn")
        return source[: self.begin] + self.new.encode() + source[self.end :]


def hash_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in their order; some of them Python may not be able to compile."""
    return [mutant for _, mutant in located(file, source, ast.parse(source))]


def located(file: str, source: bytes, tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, Mutant]]:
    """Each mutant of a file, with the node of the file's tree that it replaces."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new in _changes(tree):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        mutant = Mutant(file, begin, end, node.lineno, source[begin:end].decode(), new, hash_of(source))
        if mutant.new != mutant.old:
            yield node, mutant


def _compiles(root: Path, mutant: Mutant) -> bool:
    try:
        compile(mutant.applied((root / mutant.file).read_bytes()), "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    left_out = set(_left_out(tree))
    for node in ast.walk(tree):
        if node in left_out:
            continue
        yield from change(node)


def _left_out(tree: ast.Module) -> Iterator[ast.AST]:
    """What decides nothing: annotations, texts for people, what is only for a type checker, and logging."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns, *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif _is_idle(node):
            parts = [node]
        for part in parts:
            yield from ast.walk(part) if part is not None else ()


def _is_idle(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _logs(node.value)
    return isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom))


def _logs(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(("log.", "logging."))


def change(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """A node, and what may stand in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = _COMPARED[_SYMBOLS[type(node.ops[0])]]
        yield node, f"({ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({operator.join(f'({ast.unparse(value)})' for value in node.values)})"
        for at in range(len(node.values)):
            rest = [*node.values[:at], *node.values[at + 1 :]]
            inside = " and " if isinstance(node.op, ast.And) else " or "
            yield node, f"({inside.join(f'({ast.unparse(value)})' for value in rest)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        operator = _CALCULATED[_SYMBOLS[type(node.op)]]
        yield node, f"(({ast.unparse(node.left)}) {operator} ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node.value, int):
            yield node, str(node.value + 1)
        elif isinstance(node.value, float):
            yield node, repr(node.value * 2)
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield node, _NAMES[node.id]
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield node, "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield node, "continue" if isinstance(node, ast.Break) else "break"
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, "True"


def drawn(root: Path, files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """This many mutants, file by file in turn, until each file has given all of its own.

    Those of a file depend on the seed and on the file alone, so a change of one file leaves the others' mutants.
    """
    left = []
    for file in sorted(files):
        of_file = mutants(file, (root / file).read_bytes())
        random.Random(f"{seed} {file}").shuffle(of_file)
        left.append(of_file)
    random.Random(seed).shuffle(left)
    found: list[Mutant] = []
    while len(found) < count and any(left):
        for of_file in left:
            while of_file and len(found) < count:
                mutant = of_file.pop()
                if _compiles(root, mutant):
                    found.append(mutant)
                    break
    return found
