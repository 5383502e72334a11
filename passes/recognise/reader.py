"""Reads wide code in its one form: a value is a sum of terms, a term a constant times a product, summed.

    out[i] = sum over terms of  const * sum over s of  factor_1[i, s] * factor_2[i, s] * ...

matmul, einsum, broadcast-multiply-and-sum, addcmul and sums written stream by stream all become the same terms. A
factor is known by every tensor that it is a view of: where `g` is a slice of `h`, both describe `g[..., 0]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from math import prod
from typing import Any

import torch

from mhc_compile.passes.recognise.concatenation import TOGETHER, piece_of, put_together
from mhc_compile.passes.recognise.layout import Layout, NotALayout, axes_of, broadcasts, is_movement, move, origin, tidy
from mhc_compile.passes.recognise.sums_of_products import Factor, Source, Term, Terms, collected
from mhc_compile.passes.shadow import Op, Value

# The sum of one combine of 16 streams, written out, has 17 terms a stream.
_MAX_TERMS = 24
# Descriptions of one factor. Where halves of a tensor change places again and again, as in a chain of rotations, each
# tensor would have twice as many as its source.
_MAX_VIEWS = 64
# What sums one tensor, or takes a part of it.
_OF_ONE = {"sum", "mean", "select", "slice", "split_with_sizes", "split", "unbind"}
_ELEMENTWISE = {"add", "sub", "mul", "div"}


class Reader:
    """Reads values of one record as terms, and remembers them; of `whole`, no summand is taken apart."""

    def __init__(self, whole: Collection[Value] = ()) -> None:
        self.whole = whole
        self._views: dict[Value, Factor] = {}
        self._terms: dict[Value, Terms] = {}
        self._made: dict[Value, Terms | None] = {}
        # What small regions compute, by their signatures: layers of a model need to be understood once.
        self.known: dict[Any, Any] = {}

    def views(self, value: Value) -> Factor:
        """What `value` is a view of, itself first."""
        if value not in self._views:
            self._views[value] = _few(self._find_views(value))
        return self._views[value]

    def terms(self, value: Value) -> Terms:
        """The sum that `value` is: at least the one term that consists of it alone."""
        found = self._terms.get(value)
        if found is None:
            found = self._terms[value] = self._made_of(value) or (Term(1.0, (self.views(value),)),)
        return found

    def is_plain(self, value: Value) -> bool:
        """Whether nothing is known about the computation of a value, except its base if it is a view."""
        found = self._made_of(value)
        if found is None:
            return True
        (first, *more) = found
        return not more and first.const == 1.0 and len(first.factors) == 1 and not first.summed

    def _made_of(self, value: Value) -> Terms | None:
        """The terms of the operator that makes a value; None if it does more than add terms."""
        if value not in self._made:
            found = self._find_terms(value)
            self._made[value] = found and tuple([_trimmed(term, len(value.shape)) for term in found])
        return self._made[value]

    def _find_views(self, value: Value) -> Factor:
        here = Source(value, Layout.contiguous(value.shape))
        op = value.op
        if op is None:
            return (here,)
        if is_movement(op):
            source = next(op.inputs())
            return (here, *self._moved(self.views(source), len(source.shape), lambda lead: move(op, value, lead)))
        if op.name in _GATHERS:
            return (here, *self._gathered(op, value))
        return (here,)

    def _gathered(self, op: Op, value: Value) -> Factor:
        """A tensor put together from pieces of one other."""
        try:
            if op.name in TOGETHER:
                whole = put_together(op)
                return whole.joined([self.views(piece) for piece in whole.pieces]) if whole else ()
            if op.name == "repeat":
                source = next(op.inputs())
                return self._moved(self.views(source), len(source.shape), lambda lead: _repeated(lead, value.shape))
            source, rank, index = op.args[0], len(value.shape), _integers(op.args[2])
            if op.name != "index_select" or not rank or not index:
                return ()
            axis = op.args[1] % rank
            step = index[1] - index[0] if len(index) > 1 else 1
            if step < 1:
                return ()
            return self._moved(self.views(source), rank, lambda lead: lead.select(axis, index[0], len(index), step))
        except NotALayout:
            return ()

    def _moved(self, factor: Factor, rank: int, view: Callable[[Layout], Layout]) -> Factor:
        """The factor after a view of its first `rank` dimensions, seen past a `cat` if it lies in one piece of it."""
        found: list[Source] = []
        for source in factor:
            try:
                layout = _on_lead(source.layout, rank, view)
            except NotALayout:
                continue
            found.append(Source(source.base, layout))
            found += self._in_piece(found[-1])
        return _few(found)

    def of_last(self, factor: Factor, start: int, length: int) -> Factor:
        """Some elements of a factor along its last dimension, which is dropped where that is one."""

        def view(layout: Layout) -> Layout:
            last = len(layout.dims) - 1
            part = layout.select(last, start, length)
            return part if length > 1 else part.drop(last)

        return self._moved(factor, len(factor[0].layout.dims), view)

    def _in_piece(self, source: Source) -> list[Source]:
        op = source.base.op
        if op is None or op.name not in TOGETHER or source.layout.distinct() >= source.base.numel:
            return []
        try:
            piece, layout = piece_of(op, source)
        except NotALayout:
            return []
        found = []
        for inner in self.views(piece):
            try:
                found.append(Source(inner.base, layout.through(inner.layout)))
            except NotALayout:
                continue
        return found + self._in_piece(Source(piece, layout))

    def _find_terms(self, value: Value) -> Terms | None:
        op = value.op
        if op is None or op.target is None:
            return None
        handler = _HANDLERS.get(op.name)
        try:
            if handler is not None:
                found = handler(self, op)
            elif is_movement(op):
                found = self._of_view(op, value)
            else:
                return None
        except NotALayout:
            return None
        if found is None or not 0 < len(found) <= _MAX_TERMS or not all(t.factors and all(t.factors) for t in found):
            return None
        return found

    def _of_view(self, op: Op, value: Value) -> Terms | None:
        source = next(op.inputs())
        return None if self.is_plain(source) else self._map(source, lambda lead: move(op, value, lead))

    def sums_taken_alone(self, term: Term) -> Iterator[Term]:
        """A term that is one tensor, as the sums over products that this tensor is a view of."""
        for source in term.factors[0] if len(term.factors) == 1 and not term.summed else ():
            terms = self.terms(source.base)
            if len(terms) > 1 and source.base.op is not None:
                terms = self.reduction(source.base.op) or terms
            if len(terms) == 1 and terms[0].summed:
                rank, inner = len(source.base.shape), terms[0]
                factors = (self._moved(factor, rank, source.layout.through) for factor in inner.factors)
                yield Term(term.const * inner.const, tuple(factors), inner.summed)

    def is_made(self, value: Value) -> bool:
        """Whether a value is read as one product of tensors, or one sum over a tensor, and so not as itself."""
        (first, *more) = self.terms(value)
        return not more and (len(first.factors) > 1 or first.summed > 0)

    def _map(self, source: Value, view: Callable[[Layout], Layout]) -> Terms:
        rank = len(source.shape)
        return tuple(
            Term(t.const, tuple(self._moved(factor, rank, view) for factor in t.factors), t.summed)
            for t in self.terms(source)
        )

    def _spread(self, value: Value, shape: tuple[int, ...]) -> Terms:
        return self._map(value, lambda lead: lead.expand(shape)) if value.shape != shape else self.terms(value)

    def _scaled(self, value: Any, const: Any, shape: tuple[int, ...]) -> Terms | None:
        number = _number(const)
        if number is None or not isinstance(value, Value):
            return None
        if self._stays(value):
            return (Term(number, (self._expanded(value, shape),)),)
        return tuple(Term(t.const * number, t.factors, t.summed) for t in self._spread(value, shape))

    def _stays(self, value: Value) -> bool:
        """Whether others read a sum, or a multiple of one tensor, as well: then it is a value of its own."""
        first, *more = self.terms(value)
        multiple = first.const != 1.0 and len(first.factors) == 1 and not first.summed
        return (multiple or bool(more)) and _is_shared(value)

    def _expanded(self, value: Value, shape: tuple[int, ...]) -> Factor:
        """A value as itself, whatever it is the sum of, and as views of others."""
        return self._moved(self.views(value), len(value.shape), lambda lead: lead.expand(shape))

    def _product(self, left: Value, right: Value, shape: tuple[int, ...]) -> Terms:
        return (Term(1.0, (self._expanded(left, shape), self._expanded(right, shape))),)

    def mul(self, op: Op) -> Terms | None:
        left, right = op.args[:2]
        if isinstance(left, Value) and isinstance(right, Value):
            return self._product(left, right, op.out.shape)
        return self._scaled(left, right, op.out.shape)

    def div(self, op: Op) -> Terms | None:
        number = None if op.kwargs.get("rounding_mode") else _number(op.args[1])
        return self._scaled(op.args[0], 1.0 / number, op.out.shape) if number else None

    def neg(self, op: Op) -> Terms | None:
        return self._scaled(op.args[0], -1.0, op.out.shape)

    def square(self, op: Op) -> Terms | None:
        return self._product(op.args[0], op.args[0], op.out.shape) if op.args[1] == 2 else None

    def sum(self, op: Op) -> Terms | None:
        return self._reduced(op, self.terms(op.args[0]), len(op.args[0].shape)) if _adds_floats(op) else None

    def mean(self, op: Op) -> Terms | None:
        return self._averaged(op, self.terms(op.args[0])) if _adds_floats(op) else None

    def _averaged(self, op: Op, terms: Terms) -> Terms | None:
        source = op.args[0]
        sizes = [source.meta.shape[d] for d in axes_of(op.arg(1, "dim"), len(source.shape))]
        if not all(isinstance(size, int) for size in sizes):
            return None  # the number of elements differs from call to call
        count = reduce(lambda a, b: a * b, sizes, 1)
        reduced = self._reduced(op, terms, len(source.shape)) if count else None
        return reduced and tuple(Term(t.const / count, t.factors, t.summed) for t in reduced)

    def reduction(self, op: Op) -> Terms | None:
        """A sum or mean over dimensions of its input, whatever that is the sum of."""
        if op.name not in ("sum", "mean") or not _adds_floats(op):
            return None
        terms = (Term(1.0, (self.views(op.args[0]),)),)
        return self._averaged(op, terms) if op.name == "mean" else self._reduced(op, terms, len(op.args[0].shape))

    def _reduced(self, op: Op, terms: Terms, rank: int) -> Terms:
        axes, keep = axes_of(op.arg(1, "dim"), rank), bool(op.arg(2, "keepdim", False))

        def view(layout: Layout) -> Layout:
            lead = [() if d in axes else dim for d, dim in enumerate(layout.dims[:rank]) if keep or d not in axes]
            return Layout((*lead, *layout.dims[rank:], *(layout.dims[d] for d in axes)), layout.offset)

        return tuple(
            Term(
                t.const,
                tuple(tuple(Source(s.base, view(s.layout)) for s in factor) for factor in t.factors),
                t.summed + len(axes),
            )
            for t in terms
        )

    def matmul(self, op: Op) -> Terms:
        return self._matrix(op.args[0], op.args[1])

    def addmm(self, op: Op) -> Terms | None:
        alpha, beta = (_number(op.kwargs.get(name, 1)) for name in ("alpha", "beta"))
        # With a beta of 0, torch does not read the addend, which may hold NaN.
        addend = () if beta == 0 else self._addend(op.args[0], beta, op.out.shape)
        if not alpha or addend is None:
            return None
        (product,) = self._matrix(op.args[1], op.args[2])
        return collected((*addend, Term(alpha, product.factors, product.summed)))

    def dot(self, op: Op) -> Terms:
        """[k] @ [k]."""
        (product,) = self._product(op.args[0], op.args[1], op.args[0].shape)
        return (Term(1.0, product.factors, 1),)

    def _matrix(self, left: Value, right: Value) -> Terms:
        """[b?, i, k] @ [b?, k, j] or [i, k] @ [k] as a product indexed [b?, i, j?, k]."""
        batch = len(left.shape) == 3
        vector = len(right.shape) == 1

        def of_left(lead: Layout) -> Layout:
            new = () if vector else (_spread_dim(right.shape[-1]),)
            return Layout((*lead.dims[:-1], *new, lead.dims[-1]), lead.offset)

        def of_right(lead: Layout) -> Layout:
            inner, outer = (lead.dims[0], ()) if vector else (lead.dims[-2], lead.dims[-1:])
            return Layout((*lead.dims[:1][:batch], _spread_dim(left.shape[-2]), *outer, inner), lead.offset)

        factors = (
            self._moved(self.views(left), len(left.shape), of_left),
            self._moved(self.views(right), len(right.shape), of_right),
        )
        return (Term(1.0, factors, 1),)

    def add(self, op: Op) -> Terms | None:
        return self._sum(op, op.args[0], op.args[1], _number(op.arg(2, "alpha", 1)))

    def sub(self, op: Op) -> Terms | None:
        alpha = _number(op.arg(2, "alpha", 1))
        return None if alpha is None else self._sum(op, op.args[0], op.args[1], -alpha)

    def _sum(self, op: Op, left: Any, right: Any, factor: float | None) -> Terms | None:
        shape = op.out.shape
        for value, zero in ((left, right), (right, left)):
            # sum() begins with 0
            if isinstance(value, Value) and not isinstance(zero, Value):
                return self._scaled(value, 1.0, shape) if _number(zero) == 0.0 and value is left else None
        first, second = self._addend(left, 1.0, shape), self._addend(right, factor, shape)
        return None if first is None or second is None else collected((*first, *second))

    def _addend(self, value: Value, factor: float | None, shape: tuple[int, ...]) -> Terms | None:
        """The terms of a summand; a sum that several rows get, or that others use too, is a value of its own."""
        if factor is None or is_nought(value):
            return None if factor is None else ()
        terms = self.terms(value)
        base = origin(value, broadcasts)[0]
        to_several = base.numel < prod(shape)
        if (to_several and (len(terms) > 1 or terms[0].summed)) or base in self.whole:
            return (Term(factor, (self._expanded(value, shape),)),)
        return self._scaled(value, factor, shape)

    def addcmul(self, op: Op) -> Terms | None:
        constant = _number(op.kwargs.get("value", 1))
        addend = self._addend(op.args[0], 1.0, op.out.shape)
        if constant is None or addend is None:
            return None
        (product,) = self._product(op.args[1], op.args[2], op.out.shape)
        return collected((*addend, Term(constant, product.factors)))

    def cat(self, op: Op) -> Terms | None:
        """Pieces that are the same sum of different parts are one sum with one more dimension."""
        whole = put_together(op)
        if whole is None or all(self.is_plain(piece) for piece in whole.pieces):
            return None
        if any(source.base.numel == op.out.numel for source in self._gathered(op, op.out)):
            return None  # all parts of one tensor, which is a sum itself
        forms = [self.terms(piece) for piece in whole.pieces]
        if len({len(form) for form in forms}) != 1 or len({piece.shape for piece in whole.pieces}) != 1:
            return None
        terms = []
        for alike in zip(*forms, strict=True):
            first = alike[0]
            if any(
                (t.const, t.summed, len(t.factors)) != (first.const, first.summed, len(first.factors)) for t in alike
            ):
                return None
            factors = [whole.joined([t.factors[i] for t in alike]) for i in range(len(first.factors))]
            terms.append(Term(first.const, tuple(factors), first.summed))
        return tuple(terms)


_GATHERS = {*TOGETHER, "index_select", "repeat"}


def moves_elements(op: Op) -> bool:
    """Whether an operator's result is made of elements of what it reads, and of nothing else."""
    return op.name in _GATHERS or is_movement(op)


_HANDLERS: dict[str, Callable[[Reader, Op], Terms | None]] = {
    "mul": Reader.mul,
    "div": Reader.div,
    "neg": Reader.neg,
    "pow": Reader.square,
    "sum": Reader.sum,
    "mean": Reader.mean,
    "mm": Reader.matmul,
    "bmm": Reader.matmul,
    "mv": Reader.matmul,
    "dot": Reader.dot,
    "addmm": Reader.addmm,
    "baddbmm": Reader.addmm,
    "add": Reader.add,
    "sub": Reader.sub,
    "addcmul": Reader.addcmul,
    "cat": Reader.cat,
    "stack": Reader.cat,
    "select_scatter": Reader.cat,
    "slice_scatter": Reader.cat,
}


def _few(sources: Iterable[Source]) -> Factor:
    """Each description once, and the nearest of them."""
    return tuple(islice(dict.fromkeys(sources), _MAX_VIEWS))


def _trimmed(term: Term, rank: int) -> Term:
    """Without summed dimensions of size 1."""
    if not term.summed:
        return term
    kept = [d for d in range(rank, rank + term.summed) if term.factors[0][0].layout.dims[d]]
    if len(kept) == term.summed:
        return term

    def trim(layout: Layout) -> Layout:
        return Layout((*layout.dims[:rank], *(layout.dims[d] for d in kept)), layout.offset)

    factors = tuple(tuple(Source(s.base, trim(s.layout)) for s in factor) for factor in term.factors)
    return Term(term.const, factors, len(kept))


def _on_lead(layout: Layout, rank: int, view: Callable[[Layout], Layout]) -> Layout:
    if len(layout.dims) == rank:
        return view(layout)
    moved = view(Layout(layout.dims[:rank], layout.offset))
    return Layout((*moved.dims, *layout.dims[rank:]), moved.offset)


def _repeated(layout: Layout, shape: Sequence[int]) -> Layout:
    dims = [()] * (len(shape) - len(layout.dims)) + list(layout.dims)
    out = []
    for dim, size in zip(dims, shape, strict=True):
        have = reduce(lambda a, f: a * f[0], dim, 1)
        if not have:
            raise NotALayout
        out.append(tidy(((size // have, 0), *dim)))
    return Layout(tuple(out), layout.offset)


def _is_shared(value: Value) -> bool:
    """Whether the sum that makes a value, seen through views, has another reader."""
    while len(value.users) == 1 and not value.is_output:
        if value.op is None or not is_movement(value.op):
            return False
        value = next(value.op.inputs())
    return True


def sums_what_others_read(value: Value) -> bool:
    """Whether a value may be the sum, seen through views and factors, of something that other code reads as well."""
    while value.op is not None and value.op.name not in ("sum", "mean"):
        if len(value.op.sources) != 1:
            return True
        (value,) = value.op.sources
    return value.op is None or _is_shared(value.op.args[0])


def may_hold_products(op: Op, reader: Reader) -> bool:
    """Whether a result may be read as a product summed: the thousands of small operators of a Sinkhorn are not."""
    if op.name in _OF_ONE:
        return not reader.is_plain(op.args[0])
    return op.name not in _ELEMENTWISE or not reader.is_plain(op.out)


def is_nought(value: Value) -> bool:
    """Whether a value consists of zeros, such as the start of a sum in a loop."""
    while value.op is not None and (is_movement(value.op) or value.op.name == "detach"):
        value = next(value.op.inputs())
    op = value.op
    if op is None:
        return False
    if op.name in ("full", "full_like"):
        return bool(op.arg(1, "fill_value") == 0)
    return op.name in ("zeros", "zeros_like", "new_zeros", "zero")


def _adds_floats(op: Op) -> bool:
    """Whether a sum or mean is not one of integers, to which it may round what it adds."""
    return op.out.dtype.is_floating_point and op.args[0].dtype.is_floating_point


def _spread_dim(size: int) -> tuple[tuple[int, int], ...]:
    return ((size, 0),) if size > 1 else ()


def _integers(leaf: Any) -> list[int] | None:
    """The numbers in an index that the program writes as a range."""
    op = leaf.op if isinstance(leaf, Value) else None
    while op is not None and op.name in ("detach", "_to_copy", "alias"):
        op = next(op.inputs()).op
    if op is None or op.name != "arange" or not all(isinstance(a, int) for a in op.args):
        return None
    return torch.arange(*op.args).tolist()


def _number(leaf: Any) -> float | None:
    """A constant of the program; not a symbolic float, which would have to become one for code that is not ours."""
    return float(leaf) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else None
