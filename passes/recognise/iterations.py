"""Iterations of normalisations that no operator takes: with something between their steps, or under vmap."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mhc_compile.passes.recognise.misses import Miss
from mhc_compile.passes.report import in_words
from mhc_compile.passes.shadow import Shadow, Value, spelled

# A normalisation of one axis as a program spells it, how many of them nothing but a Sinkhorn has, and how many nodes
# lie between the division and the sum: an eps, a clamp.
_NORMALISING = {"truediv", "itruediv", "div", "div_", "sub", "isub", "sub_"}
_HALF_STEPS = 4
_SCALING = {"mul", "mul_", "imul", "where", "masked_fill", "masked_fill_", "clamp", "add", "iadd", "add_"}
_BEFORE_DIVISION = 4
# How far what is made of a matrix is followed.
_LIMIT = 200


def under_vmap(shadow: Shadow) -> Iterator[tuple[fx.Node, str]]:
    """What looks like a Sinkhorn iteration in a function of one token, where only its spelling can be seen."""
    closed = [op.node for op in shadow.ops if op.target is None]
    if not any(is_under_vmap(node) for node in closed):
        return
    steps = [node for node in closed if _normalises(node)]
    if len(steps) >= _HALF_STEPS:
        reason = "what looks like a Sinkhorn iteration is under vmap, which is not looked into: compute it from"
        yield steps[-1], f"{reason} [..., n, n] at once"


def is_under_vmap(node: fx.Node) -> bool:
    """Whether a node ends what vmap computes for each token."""
    return "_remove_batch_dim" in str(node.target)


def broken(value: Value) -> Iterator[Miss]:
    """Whether a Sinkhorn projection goes on after its result, with something else between the steps."""
    after = _as_large_behind(value)
    steps = [node for node in after if _normalises(node)]
    if len(steps) >= _HALF_STEPS // 2:
        between = next((node for node in after if spelled(node) in _SCALING), None)
        what = f"{spelled(between)} ({in_words(between)})" if between is not None else "something else"
        reason = f"goes through {what} and is then divided by its sums {len(steps)} more times"
        yield Miss(value, None, f"the result of a Sinkhorn projection {reason}; only the part before is rewritten", 1)


def _as_large_behind(value: Value) -> list[fx.Node]:
    """The program's steps after a value, in order, from values as large to values as large."""
    pending = [value]
    nodes: dict[fx.Node, None] = {}
    for held in pending:
        for op in held.users:
            fresh = [out for out in op.outs if out.numel == value.numel and out not in pending]
            pending += fresh
            if fresh:
                nodes[op.node] = None
        if len(pending) > _LIMIT:
            break
    return list(nodes)


def _normalises(node: fx.Node) -> bool:
    """Whether a node divides a tensor by a sum over it, or subtracts the logarithm of one."""
    if spelled(node) not in _NORMALISING or len(node.args) != 2:
        return False
    value, divisor = node.args
    for _ in range(_BEFORE_DIVISION):
        if not isinstance(divisor, fx.Node) or not divisor.args:
            return False
        if spelled(divisor) in ("sum", "logsumexp"):
            return divisor.args[0] is value
        divisor = divisor.args[0]
    return False
