"""Which tests can notice a mutant: those in which the changed place has another value, or may have another effect.

A file with probes computes what it did. Each probe also computes what its mutant would, of the same operands, and
writes down the test in which that is something else. So one run of the tests serves all mutants. A test in which a
mutant changes nothing cannot fail by it, and need not judge it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.mutation.mutants import Mutant, change, located

# The variable of the environment that names the file to which probes write.
FILE = "MHC_MUTANTS_TOLD_APART"
_NAME = "_probes_"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# The functions of the module `operator` for each kind: what is computed, and what a mutant computes in its place.
_COMPUTED: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Lt: ("lt", "le"), ast.LtE: ("le", "lt"), ast.Gt: ("gt", "ge"), ast.GtE: ("ge", "gt")},
    **{ast.Add: ("add", "sub"), ast.Sub: ("sub", "add"), ast.Mult: ("mul", "floordiv"), ast.Div: ("truediv", "mul")},
    **{ast.FloorDiv: ("floordiv", "mul"), ast.Mod: ("mod", "floordiv")},
    **{ast.BitAnd: ("and_", "or_"), ast.BitOr: ("or_", "and_")},
    **{ast.LShift: ("lshift", "rshift"), ast.RShift: ("rshift", "lshift")},
}
# With operands of other kinds, such as symbolic sizes, what a mutant computes could have effects.
_WITHOUT_EFFECT = (bool, int, float, complex, str, tuple, list, set, frozenset, dict, range)


def probed(source: bytes, numbered: Mapping[int, Mutant]) -> str:
    """A source with a probe for each of these mutants of it."""
    tree = ast.parse(source)
    numbers = {(mutant.begin, mutant.end, mutant.new): number for number, mutant in numbered.items()}
    found: dict[ast.AST, dict[str, int]] = defaultdict(dict)
    for node, mutant in located("", source, tree):
        number = numbers.get((mutant.begin, mutant.end, mutant.new))
        if number is not None:
            found[node][mutant.new] = number
    places = dict(_places(tree, None, False))
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    entered: dict[_Function, list[int]] = defaultdict(list)
    for node in [node for node in found if not places[node][1]]:
        function = places[node][0]
        for each in functions if function is None else [function]:
            entered[each].extend(found[node].values())
        del found[node]
    _Probing(found).visit(tree)
    for function, reached in entered.items():
        begin = int(ast.get_docstring(function) is not None)
        function.body[begin:begin] = [_reached(number) for number in reached]
    begin = int(ast.get_docstring(tree) is not None)
    for at, each in enumerate(tree.body):
        if isinstance(each, ast.ImportFrom) and each.module == "__future__":
            begin = at + 1
    tree.body[begin:begin] = ast.parse(f"import {__name__} as {_NAME}").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _places(
    node: ast.AST, function: _Function | None, runs: bool
) -> Iterator[tuple[ast.AST, tuple[_Function | None, bool]]]:
    """For each node the function that it is part of, and whether a probe can be there and belongs to a test.

    What runs on import belongs to none: the function that it makes stands for it, or else all of the file. And in
    patterns there can be no probe.
    """
    yield node, (function, runs)
    body = node.body if isinstance(node, _Function) else []
    for child in ast.iter_child_nodes(node):
        if child in body:
            yield from _places(child, node, True)  # type: ignore[arg-type]
        elif isinstance(node, _Function) and not runs:
            yield from _places(child, node, False)
        else:
            yield from _places(child, function, runs and not isinstance(child, ast.pattern))


class _Probing(ast.NodeTransformer):
    """Puts probes around nodes; found has the numbers of their mutants, by what stands in their place."""

    def __init__(self, found: Mapping[ast.AST, Mapping[str, int]]) -> None:
        self._found = found

    def visit(self, node: ast.AST) -> Any:
        mutants = dict(self._found.get(node, {}))
        if not mutants:
            return self.generic_visit(node)
        own = [new for _, new in change(node)]
        # Those of an `if` or of a comprehension, which belong to its condition.
        given = {new: mutants.pop(new) for new in [*mutants] if new not in own}
        self.generic_visit(node)
        if isinstance(node, ast.Return) and _may_wait(node):
            node.value = _call("returned", mutants[own[0]], _later(node.value))
        elif isinstance(node, ast.stmt):
            return [*map(_reached, mutants.values()), node]
        else:
            node = _around(node, own, mutants) if mutants else node
            for new, number in given.items():
                node = _call("true" if new == "True" else "seen", number, node)
        return node


def _around(node: Any, own: Sequence[str], mutants: Mapping[str, int]) -> ast.expr:
    """An expression with a probe for its mutants."""
    numbers = [mutants.get(new) for new in own]
    kind = type(node.op if isinstance(node, ast.BinOp) else node.ops[0] if isinstance(node, ast.Compare) else node)
    if kind in _COMPUTED:
        right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
        return _call("computed", numbers[0], node.left, right, *map(ast.Constant, _COMPUTED[kind]))
    if isinstance(node, ast.Name):
        return _call("function", numbers[0], node, ast.Name(own[0], ast.Load()))
    if isinstance(node, ast.BoolOp) and _may_wait(node):
        return _call("conditions", numbers, ast.Constant(isinstance(node.op, ast.And)), *map(_later, node.values))
    for number in mutants.values():
        node = _call("seen", number, node)
    return node


def _may_wait(node: ast.AST) -> bool:
    """Whether parts of an expression may become functions."""
    own = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
    return not any(
        isinstance(each, own) or (isinstance(each, ast.Name) and each.id == "super") for each in ast.walk(node)
    )


def _later(value: Any) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), value)


def _call(name: str, number: Any, *given: Any) -> ast.Call:
    first = ast.parse(repr(number), mode="eval").body
    return ast.Call(ast.Attribute(ast.Name(_NAME, ast.Load()), name, ast.Load()), [first, *given], [])


def _reached(number: int) -> ast.Expr:
    return ast.Expr(_call("seen", number))


# What probes call. The mutants that have been told in the test that runs:
_told: set[int] = set()


def pytest_runtest_logfinish() -> None:
    """What pytest calls behind each test, if it has this module as a plugin."""
    _told.clear()


def seen(number: int, value: Any = None) -> Any:
    """What another value or effect comes for wherever it runs."""
    if number not in _told:
        _tell(number)
    return value


def returned(number: int, given: Callable[[], Any]) -> Any:
    if number in _told:
        return given()
    with _Failures(number):
        value = given()
    if value is not None:
        _tell(number)
    return value


def true(number: int, value: Any) -> Any:
    if number not in _told and not value:
        _tell(number)
    return value


def computed(number: int, left: Any, right: Any, old: str, new: str) -> Any:
    compute = getattr(operator, old)
    if number in _told:
        return compute(left, right)
    with _Failures(number):
        value = compute(left, right)
    if type(left) not in _WITHOUT_EFFECT or type(right) not in _WITHOUT_EFFECT:
        _tell(number)
    else:
        _compare(number, value, lambda: getattr(operator, new)(left, right))
    return value


def function(number: int, old: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """`any`, `all`, `min` or `max`, which are given something to go through, or several values."""
    if number in _told:
        return old

    @functools.wraps(old)
    def called(*given: Any, **options: Any) -> Any:
        first, *rest = given
        taken: list[Any] = []
        more = iter(()) if rest else iter(first)
        with _Failures(number):
            value = old(*(given if rest else [_kept(more, taken)]), **options)
        _compare(number, value, lambda: new(*(given if rest else [itertools.chain(taken, more)]), **options))
        return value

    return called


def _kept(values: Iterator[Any], taken: list[Any]) -> Iterator[Any]:
    for value in values:
        taken.append(value)
        yield value


def conditions(numbers: Sequence[int | None], both: bool, *given: Callable[[], Any]) -> Any:
    """What `and` or `or` gives; mutants have the other one, or leave one condition out."""
    known: dict[int, Any] = {}
    left = [number for number in numbers if number is not None and number not in _told]

    def value_of(both: bool, places: Sequence[int]) -> Any:
        for at in places:
            if at not in known:
                known[at] = given[at]()
            if bool(known[at]) != both:
                break
        return known[at]

    places = range(len(given))
    with _Failures(*left):
        value = value_of(both, places)
    for out, number in enumerate(numbers, -1):
        if number in left:
            new = functools.partial(value_of, both if out >= 0 else not both, [at for at in places if at != out])
            _compare(number, value, new)
    return value


class _Failures:
    """Tells mutants that may not raise where this does."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for number in self._numbers:
                _tell(number)


def _compare(number: int, value: Any, new: Callable[[], Any]) -> None:
    try:
        other = new()
        same = other is value or (type(other) is type(value) in _WITHOUT_EFFECT and bool(other == value))
    except Exception:  # as the mutant would raise
        same = False
    if not same:
        _tell(number)


def _tell(number: int) -> None:
    """Write the number of a mutant and the test that runs."""
    _told.add(number)
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if test and FILE in os.environ:
        os.write(_file(os.environ[FILE]), f"{number} {test.rpartition(' ')[0]}\n".encode())


@functools.cache
def _file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
