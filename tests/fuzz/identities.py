"""Programs that are equal to others by identities of algebra, put in at nodes of the program's syntax tree.

A pattern and its replacements are Python expressions; names that begin with an underscore stand for any expression.
What is equal in exact arithmetic may round in another way, which is the program's own affair: it is judged against
float64 as it is written.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line

# Whatever is a tensor: a name of one, or the result of a statement.
ANY = (
    "_a * 1",
    "_a + 0",
    "_a - 0",
    "-(-_a)",
    "_a.mul(2).div(2)",
    "0.25 * _a + 0.75 * _a",
    "_a.transpose(-1, -2).transpose(-1, -2)",
    "_a.movedim(0, -1).movedim(-1, 0)",
    "_a.permute(*reversed(range(_a.dim()))).permute(*reversed(range(_a.dim())))",
    "_a.transpose(0, 1).contiguous().transpose(0, 1)",
    "_a.unsqueeze(0).squeeze(0)",
    "_a.unsqueeze(1).sum(1)",
    "_a.unsqueeze(2).mean(2)",
    "_a.unsqueeze(-1).squeeze(-1)",
    "_a[..., None][..., 0]",
    "torch.cat(_a.split(1, 0), 0)",
    "torch.cat(_a.chunk(2, -1), -1)",
    "torch.stack(_a.unbind(-1), -1)",
    "torch.stack(_a.unbind(0))",
    "_a.flatten(0, 1).unflatten(0, _a.shape[:2])",
    "_a.reshape(-1).view(_a.shape)",
    "_a.expand_as(_a)",
    "_a.view_as(_a)",
    "_a[...]",
    "_a.flip(-1).flip(-1)",
    "_a.roll(1, -1).roll(-1, -1)",
    "_a.to(_a.dtype)",
    "torch.where(_a == _a, _a, 0.0)",
    "torch.maximum(_a, _a)",
    "_a.repeat(2, *[1] * (_a.dim() - 1))[: _a.shape[0]]",
)
EQUAL: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("_a * (_b + _c)", ("_a * _b + _a * _c",)),
    ("(_b + _c) * _a", ("_b * _a + _c * _a",)),
    ("_a + _b", ("_b + _a", "_a - (-_b)", "-(-_a - _b)", "(_a * 0.5 + _b * 0.5) * 2", "_a + 0.5 * _b + 0.5 * _b")),
    ("_a - _b", ("_a + (-_b)", "-(_b - _a)", "_a - 0.5 * _b - _b / 2")),
    ("_a * _b", ("_b * _a", "-(-_a * _b)", "_a * (0.5 * _b) * 2", "(2 * _a) * (_b / 2)")),
    ("_a / _b", ("_a * (1 / _b)", "_a * _b**-1.0", "(_a / 2) / (_b / 2)", "-(_a / -_b)", "torch.div(_a, _b)")),
    (
        "_a @ _b",
        (
            "torch.matmul(_a, _b)",
            "torch.einsum('...ij,...jk->...ik', _a, _b)",
            "torch.einsum('...jk,...ij->...ik', _b, _a)",
            "(_a.unsqueeze(-1) * _b.unsqueeze(-3)).sum(-2)",
            "(_b.mT @ _a.mT).mT",
            "torch.stack([(_a * _b[..., k].unsqueeze(-2)).sum(-1) for k in range(_b.shape[-1])], -1)",
            "sum(_a[..., k, None] * _b[..., k, :].unsqueeze(-2) for k in range(_a.shape[-1]))",
            "_a[..., :1] @ _b[..., :1, :] + _a[..., 1:] @ _b[..., 1:, :]",
            "torch.cat([_a @ _b[..., :1], _a @ _b[..., 1:]], -1)",
            "torch.cat([_a[..., :1, :] @ _b, _a[..., 1:, :] @ _b], -2)",
        ),
    ),
    (
        "F.linear(_a, _w)",
        (
            "_a @ _w.t()",
            "(_a.unsqueeze(-2) * _w).sum(-1)",
            "(_w @ _a.unsqueeze(-1)).squeeze(-1)",
            "torch.cat([F.linear(_a, part) for part in _w.split(2)], -1)",
            "F.linear(_a[..., :2], _w[:, :2]) + F.linear(_a[..., 2:], _w[:, 2:])",
            "F.linear(_a * 2, _w / 2)",
            "F.linear(_a, _w.t().contiguous().t())",
            "torch.tensordot(_a, _w, dims=([-1], [1]))",
            "F.linear(_a.unsqueeze(0), _w).squeeze(0)",
            "F.linear(_a.flatten(0, -2), _w).unflatten(0, _a.shape[:-1])",
        ),
    ),
    (
        "torch.einsum('...n,...nc->...c', _a, _b)",
        (
            "torch.einsum('...nc,...n->...c', _b, _a)",
            "(_a[..., None] * _b).sum(-2)",
            "(_a.unsqueeze(-2) @ _b)[..., 0, :]",
        ),
    ),
    (
        "torch.einsum('...io,...ic->...oc', _a, _b)",
        ("torch.einsum('...ic,...io->...oc', _b, _a)", "_a.mT @ _b", "(_b.mT @ _a).mT"),
    ),
    (
        "torch.sigmoid(_a)",
        (
            "1 / (1 + torch.exp(-(_a)))",
            "torch.exp(-F.softplus(-(_a)))",
            "torch.exp(F.logsigmoid(_a))",
            "1 - torch.sigmoid(-(_a))",
            "0.5 * torch.tanh(0.5 * _a) + 0.5",
            "torch.stack([_a, torch.zeros_like(_a)]).softmax(0)[0]",
            "torch.softmax(torch.stack([torch.zeros_like(_a), _a], -1), -1)[..., 1]",
            "torch.exp(_a) / (1 + torch.exp(_a))",
            "torch.special.expit(_a)",
            "torch.cat([torch.sigmoid(_a[..., :1]), torch.sigmoid(_a[..., 1:])], -1)",
        ),
    ),
    ("_a.sigmoid()", ("torch.sigmoid(_a)", "(-(_a)).exp().add(1).reciprocal()", "F.logsigmoid(_a).exp()")),
    ("torch.tanh(_a)", ("2 * torch.sigmoid(2 * (_a)) - 1", "-torch.tanh(-(_a))", "(_a).tanh()")),
    ("torch.exp(_a)", ("torch.exp(0.5 * (_a)) ** 2", "torch.exp2((_a) * 1.4426950408889634)", "torch.expm1(_a) + 1")),
    (
        "torch.rsqrt(_a)",
        ("(_a) ** -0.5", "1 / torch.sqrt(_a)", "torch.exp(-0.5 * torch.log(_a))", "(_a).sqrt().reciprocal()"),
    ),
    ("_a.square()", ("_a * _a", "_a.pow(2)", "_a.abs() ** 2", "(2 * _a).square() / 4")),
    (
        "_a.sum(_d, keepdim=True)",
        (
            "_a.sum(_d).unsqueeze(_d)",
            "sum(_a.unbind(_d)).unsqueeze(_d)",
            "_a.mean(_d, keepdim=True) * _a.shape[_d]",
            "_a.flip(_d).sum(_d, keepdim=True)",
            "_a.cumsum(_d).narrow(_d, _a.shape[_d] - 1, 1)",
        ),
    ),
    ("_a.sum(dim=_d, keepdim=True)", ("_a.sum(_d).unsqueeze(_d)", "torch.stack(_a.unbind(_d)).sum(0).unsqueeze(_d)")),
    (
        "_a.sum(_d)",
        (
            "sum(_a.unbind(_d))",
            "_a.flip(_d).sum(_d)",
            "_a.sum(_d, keepdim=True).squeeze(_d)",
            "torch.stack(_a.unbind(_d)).sum(0)",
            "_a.movedim(_d, 0).sum(0)",
        ),
    ),
    (
        "_a.mean(_d, keepdim=True)",
        ("_a.sum(_d, keepdim=True) / _a.shape[_d]", "_a.mean(_d).unsqueeze(_d)", "2 * _a.mean(_d, keepdim=True) / 2"),
    ),
    (
        "_a.softmax(_d)",
        (
            "_a.log_softmax(_d).exp()",
            "(_a + 3.0).softmax(_d)",
            "(_a - _a.mean(_d, keepdim=True)).softmax(_d)",
            "torch.exp(_a - _a.logsumexp(_d, keepdim=True))",
            "F.softmin(-_a, _d)",
            "_a.mT.softmax(-3 - _d).mT",
        ),
    ),
    ("_a.unsqueeze(-1)", ("_a[..., None]", "_a.unflatten(-1, (-1, 1))", "_a.view(*_a.shape, 1)")),
    ("_a.unsqueeze(-2)", ("_a[..., None, :]", "torch.stack([_a], -2)", "_a.unsqueeze(-1).mT")),
    ("_a.transpose(-1, -2)", ("_a.mT", "_a.movedim(-1, -2)", "_a.swapaxes(-2, -1)", "torch.stack(_a.unbind(-1), -2)")),
    (
        "_a.flatten(-2)",
        ("torch.cat(_a.unbind(-2), -1)", "_a.reshape(*_a.shape[:-2], -1)", "_a.unsqueeze(0).flatten(-2)[0]"),
    ),
    (
        "_a.split(_s, -1)",
        (
            "_a.split_with_sizes(_s, -1)",
            "torch.cat(_a.split(_s, -1), -1).split(_s, -1)",
            "[part.contiguous() for part in _a.split(_s, -1)]",
            "[part.mT for part in _a.mT.split(_s, -2)]",
            "_a.flip(-1).flip(-1).split(_s, -1)",
        ),
    ),
    (
        "_a.unflatten(-1, (N, N))",
        (
            "torch.stack(_a.chunk(N, -1), -2)",
            "_a.reshape(*_a.shape[:-1], N, N)",
            "torch.stack(_a.split(N, -1), -1).mT",
            "_a.unflatten(-1, (N, 1, N)).squeeze(-2)",
        ),
    ),
)
NAMES = "x xs flat wide ms r normed h pre post res h_pre h_post logits m h_res u v f mixed outer out"
TENSORS = frozenset(NAMES.split())


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


RULES = [(_parsed(pattern), tuple(map(_parsed, others))) for pattern, others in EQUAL]
WRAPS = tuple(map(_parsed, ANY))

Bound = dict[str, ast.expr]


def _matches(pattern: object, found: object, bound: Bound) -> bool:
    """Whether a piece of syntax is an instance of a pattern; `bound` takes what the pattern's names stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_") and isinstance(found, ast.expr):
        known = bound.setdefault(pattern.id, found)
        return ast.dump(known) == ast.dump(found)
    if isinstance(pattern, list):
        return (
            isinstance(found, list)
            and len(pattern) == len(found)
            and all(_matches(one, other, bound) for one, other in zip(pattern, found, strict=True))
        )
    if not isinstance(pattern, ast.AST):
        return pattern == found
    return type(pattern) is type(found) and all(
        _matches(getattr(pattern, name), getattr(found, name), bound) for name in pattern._fields if name != "ctx"
    )


class _Filled(ast.NodeTransformer):
    """Puts what a pattern's names stand for in their places."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.bound[node.id]) if node.id in self.bound else node


class _Replaced(ast.NodeTransformer):
    """Puts another expression in the place of one node."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def _tensors(node: ast.AST) -> Iterator[ast.expr]:
    """The nodes of an expression that are, or may be, tensors: no sizes, indices and keyword arguments."""
    if isinstance(node, ast.expr):
        yield node
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "dim", "size"):
        return
    for name, value in ast.iter_fields(node):
        if name in ("slice", "keywords", "elts"):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST) and not isinstance(one, ast.Starred):
                yield from _tensors(one)


def _places(tree: ast.expr, result: bool) -> list[tuple[ast.expr, tuple[ast.expr, ...], Bound]]:
    """Every node of an expression that an identity applies to, with what it may become."""
    found: list[tuple[ast.expr, tuple[ast.expr, ...], Bound]] = []
    for node in _tensors(tree):
        if isinstance(node, ast.Name) and node.id in TENSORS:
            found.append((node, WRAPS, {"_a": node}))
        for pattern, others in RULES:
            bound: Bound = {}
            if _matches(pattern, node, bound):
                found += [(node, others, bound)] * 3  # there are fewer of these than of names
    if result:
        found.append((tree, WRAPS, {"_a": tree}))
    return found


def apply_identities(pick: Pick, lines: list[Line]) -> None:
    """Replace a few expressions of a program, one after the other, by others that are equal."""
    values = [line for line in lines if line.names]  # others may be statements
    for _ in range(pick([1, 2, 3, 4, 6, 8])):
        line = values[pick(range(len(values)))]
        tree = _parsed(line.expression)
        places = _places(tree, line.mutable)
        if not places:
            continue
        node, others, bound = places[pick(range(len(places)))]
        new = _Filled(bound).visit(copy.deepcopy(others[pick(range(len(others)))]))
        text = ast.unparse(_Replaced(node, new).visit(tree))
        if len(text) < 400:  # a sum of products of sums grows fast
            line.expression = text
