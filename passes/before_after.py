"""What a site was and what it became: bytes by count, and the lines of the graph."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mhc_compile import compat
from mhc_compile.passes.aten_calls import tensors
from mhc_compile.passes.called import INSERTED
from mhc_compile.passes.plan import Plan, Site
from mhc_compile.passes.plan.surroundings import between, extent
from mhc_compile.passes.report import Traffic, location
from mhc_compile.passes.shadow import Op, Shadow, Value

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}
# Calls that give back memory of their argument although their schemas do not say so.
_VIEWS = {"_unsafe_view", "_reshape_alias"}


@dataclass(frozen=True)
class BeforeAfter:
    """One site before and after; `excerpt` names `lines`, which are the same for identical sites."""

    before: Traffic | None
    after: Traffic | None
    lines: tuple[str, str]

    @property
    def excerpt(self) -> str:
        return hashlib.sha256("\0".join(self.lines).encode(errors="backslashreplace")).hexdigest()[:12]


def before_after(shadow: Shadow, plan: Plan, graph: fx.Graph) -> dict[int, BeforeAfter]:
    """What each site of a plan was and became in the rewritten graph, by the identity of the site.

    A call that two sites have in common counts for the first.
    """
    inserted: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if INSERTED in node.meta:
            inserted.setdefault(node.meta[INSERTED], []).append(node)
    ops = {id(site): list(between(site)) for site in plan.sites}
    begins = {id(site): min((shadow.position[op.node] for op in ops[id(site)]), default=0) for site in plan.sites}
    counted: set[Op] = set()
    # Counts and lines take long, and most layers are alike.
    known: dict[Any, BeforeAfter] = {}
    found = {}
    for site in sorted(plan.sites, key=lambda site: begins[id(site)]):
        own, new = ops[id(site)], inserted.get(id(site), [])
        kind = (_kind(own, counted), tuple(map(_kind_of_node, new)))
        if kind not in known:
            before = _of_program([op for op in own if op not in counted])
            nodes = sorted(_shown(site), key=shadow.position.__getitem__)
            known[kind] = BeforeAfter(before, of_nodes(new), (_text(nodes, _made(site)), _text(new, ())))
        found[id(site)] = known[kind]
        counted.update(own)
    return found


def _kind(ops: Sequence[Op], counted: set[Op]) -> Any:
    """Equal for sites that do the same calls, on tensors of the same kind, in the same lines of the program."""
    numbers: dict[Value, int] = {}

    def number(value: Value) -> int:
        return numbers.setdefault(value, len(numbers))

    calls = tuple(
        [(id(op.kind), op in counted, op.node.meta.get("stack_trace"), tuple(map(number, op.sources))) for op in ops]
    )
    return calls, tuple([(value.shape, value.dtype, _strides(value)) for value in numbers])


def _strides(value: Value) -> tuple[int | None, ...]:
    return tuple([stride if isinstance(stride, int) else None for stride in value.meta.stride()])


def _kind_of_node(node: fx.Node) -> Any:
    settings = [argument for argument in node.args if not isinstance(argument, fx.Node)]
    return node.target, len(node.args), str(settings), str(node.kwargs)


def _made(site: Site) -> set[fx.Node]:
    return {node for value in site.targets() for node in value.nodes}


def _shown(site: Site) -> set[fx.Node]:
    """The nodes of a site, with those that only hand on what it computes, such as a part of a tuple."""
    nodes, showing = extent(site)
    inside = nodes - showing
    while True:
        read = {given for node in inside for given in node.all_input_nodes} - inside
        own = {node for node in read if node.all_input_nodes and inside.issuperset(node.all_input_nodes)}
        if not own:
            return inside
        inside |= own


def _of_program(ops: Sequence[Op]) -> Traffic | None:
    """The bytes that the program's ATen calls move in eager mode; None if a size or a call is not known."""
    if any(op.target is None for op in ops):
        return None
    return _sum(
        _call([value.meta for value in dict.fromkeys(op.sources)], [out.meta for out in op.outs])
        for op in ops
        if not _is_view(op)
    )


def _is_view(op: Op) -> bool:
    # Its sources and results are not the program's own tensors where nodes are identical, so memory does not help.
    returns = op.target._schema.returns if isinstance(op.target, torch._ops.OpOverload) else ()
    return op.name in _VIEWS or any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def of_nodes(nodes: Iterable[fx.Node]) -> Traffic | None:
    """The bytes that calls of a graph move, each as one call; None if a size is not known."""
    totals = []
    for node in nodes:
        made = list(tensors(compat.example(node)))
        given = [t for n in node.all_input_nodes for t in tensors(compat.example(n))]
        memory = {compat.storage_of(tensor) for tensor in given}
        if not all(compat.storage_of(tensor) in memory for tensor in made):
            totals.append(_call(given, made))
    return _sum(totals)


def _call(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Traffic | None:
    sizes = [[_bytes(tensor) for tensor in several] for several in (given, made)]
    read, written = ([size for size in several if size is not None] for several in sizes)
    if len(read) < len(given) or len(written) < len(made):
        return None
    return Traffic(sum(read) + sum(written), sum(written))


def _sum(several: Iterable[Traffic | None]) -> Traffic | None:
    total = Traffic(0, 0)
    for one in several:
        if one is None:
            return None
        total += one
    return total


def _bytes(tensor: torch.Tensor) -> int | None:
    """What there is of it in memory: what is expanded or overlaps is there once. None if the size is not one number."""
    count, reached, known = 1, 0, []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if not isinstance(size, int):
            return None
        count *= min(size, 1) if isinstance(stride, int) and stride == 0 else size
        known.append(stride if isinstance(stride, int) else 0)
        reached += (size - 1) * known[-1]
    if count and all(isinstance(stride, int) for stride in tensor.stride()):
        count = min(count, 1 + reached // max(1, math.gcd(*known)))
    return tensor.itemsize * count


def _text(nodes: Sequence[fx.Node], made: Iterable[fx.Node]) -> str:
    """Calls in order, below the lines of the program that make them; names do not depend on the layer."""
    names: dict[fx.Node, str] = {}
    inputs: list[str] = []
    lines: list[str] = []
    inside, results = set(nodes), set(made)
    last = None
    for node in nodes:
        for given in node.all_input_nodes:
            if given not in inside and given not in names:
                names[given] = f"in{len(inputs)}"
                inputs.append(f"{names[given]}: {_type(given)}")
        names[node] = f"%{len(names) - len(inputs)}"
        at = location(node)
        if at.file and at != last:
            lines.append(f"# {at.short}  {at.code}")
            last = at
        returned = "  (result)" if node in results else ""
        lines.append(f"{names[node]} = {_name(node)}({_arguments(node, names)})  # {_type(node)}{returned}")
    return "\n".join([*inputs, *lines])


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return f"{node.target.namespace}.{node.target._opname}"
    return str(getattr(node.target, "__name__", node.target))


def _arguments(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    def told(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names.get(value, "?")
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(map(told, value)) + "]"
        return str(value) if isinstance(value, (torch.dtype, torch.device)) else repr(value)

    return ", ".join([*map(told, node.args), *(f"{name}={told(value)}" for name, value in node.kwargs.items())])


def _type(node: fx.Node) -> str:
    value = compat.example(node)
    found = [
        f"{_DTYPES.get(t.dtype, str(t.dtype).removeprefix('torch.'))}{list(map(_size, t.shape))}"
        for t in tensors(value)
    ]
    return ", ".join(found).replace("'", "") or type(value).__name__


def _size(size: Any) -> Any:
    return size if isinstance(size, int) else "s"
