"""Which derivatives are taken: whether gradients come back to all gates of a site, or to some of them alone.

An operator gives phi, scale and bias one gradient each. A program may build them from separate parameters for each
gate. If no gradient comes back to one gate, for example because a sublayer's output is detached, eager code leaves the
parameters of this gate without a gradient. The operator would give them zeros, and weight decay or momentum would then
move them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.utils._pytree import tree_leaves

from mhc_compile import compat
from mhc_compile.passes.plan.sites import Decline, MixSite, ProjectionSite, Rows, Site
from mhc_compile.passes.report import in_words
from mhc_compile.passes.shadow import Shadow, Value, tensors_of


def takes_forward_derivatives(shadow: Shadow) -> bool:
    """Whether the program gives a tensor a tangent, as torch.func.jvp does."""
    return bool(_calls(shadow, "_make_dual"))


def derives_again(shadow: Shadow) -> bool:
    """Whether the program takes derivatives itself, as torch.func.grad does, and they are differentiated again.

    So they are if gradients come back to the program's results, or if it takes derivatives of derivatives.
    """
    derivatives = _calls(shadow, "_autograd_grad", "grad")
    results = [node for output in shadow.graph.find_nodes(op="output") for node in output.all_input_nodes]
    return bool(derivatives) and (any(map(_requires_gradient, results)) or _meet(derivatives))


def _meet(derivatives: list[fx.Node]) -> bool:
    """Whether a gradient can come back from one of these nodes to another."""
    pending, seen = [*derivatives], set(derivatives)
    while pending:
        for user in pending.pop().users:
            if user in derivatives:
                return True
            if user not in seen and _requires_gradient(user):
                seen.add(user)
                pending.append(user)
    return False


def _requires_gradient(node: fx.Node) -> bool:
    return any(map(compat.requires_gradient, tensors_of(node)))


def _has_no_gradient(node: fx.Node) -> bool:
    """Whether all of a node's results are known, and need no gradient, such as `x.data`."""
    return any(True for _ in tensors_of(node)) and not _requires_gradient(node)


def _hands_on(node: fx.Node) -> bool:
    """Whether a node only hands on the gradient of its result; those in which torch.vmap begins and ends do, too."""
    name = getattr(node.target, "__name__", "")
    plain = compat.is_plain_call(node) or compat.is_higher_order(node)
    return plain or name in ("_add_batch_dim", "_remove_batch_dim")


def _calls(shadow: Shadow, *names: str) -> list[fx.Node]:
    """The calls of functions of these names."""
    return [node for node in shadow.graph.nodes if getattr(node.target, "__name__", "") in names]


def reached_by_gradients(shadow: Shadow) -> set[fx.Node]:
    """The nodes to which a gradient can come back from the graph's results, as far as the graph decides that."""
    found: set[fx.Node] = set()
    # The memory to which a gradient can come back from what runs later. To that of inputs it can from outside.
    memory = {key for node in shadow.graph.nodes if node.op in ("placeholder", "get_attr") for key in _memory(node)}
    writes = dict(shadow.writes)
    held = {node: _held(shadow, node) for node in shadow.graph.nodes}
    taken = _values_taken(shadow, held)
    # Nodes that hand gradients on to all that they are given, and those that do to what they compute with.
    to_all: set[fx.Node] = set()
    to_used: set[fx.Node] = set()
    stopped = {(given, node) for node in shadow.graph.nodes for given in compat.without_gradient(node)}

    def uses(user: fx.Node, values: set[Value]) -> bool:
        # `expand_as` is given a tensor for its shape alone; `to` may make no call, and hand on what it is called on.
        used = taken.get(user) or held[user]
        return not used or not values or not values.isdisjoint(used)

    for node in reversed(shadow.graph.nodes):
        users = [user for user in node.users if (node, user) not in stopped]
        if any(user in to_all or (user in to_used and uses(user, held[node])) for user in users):
            found.add(node)
        if _registers_hook(node):  # it returns its tensor
            hands_on = to_all if node in found else None
        elif node in writes or compat.is_foreign(node.target):
            given = writes.get(node) or frozenset(key for one in node.all_input_nodes for key in _memory(one))
            comes_back = node in found or not memory.isdisjoint(given)
            hands_on = to_all if comes_back and not _has_no_gradient(node) else None
        elif node.op == "output" or not (_hands_on(node) or _has_no_gradient(node)):
            hands_on = to_all
        else:
            hands_on = to_used if node in found and _requires_gradient(node) else None
        if hands_on is not None:
            hands_on.add(node)
            memory.update(key for one in node.all_input_nodes for key in _memory(one))
    return found


def _memory(node: fx.Node) -> Iterator[int]:
    """The storages of those of a node's results that need a gradient, as they do once one is written that does."""
    return (
        key for key in map(compat.storage_of, filter(compat.requires_gradient, tensors_of(node))) if key is not None
    )


def _values_taken(shadow: Shadow, held: dict[fx.Node, set[Value]]) -> dict[fx.Node, set[Value]]:
    """The values that the calls of a node compute with, and those that it hands on as they are."""
    taken: dict[fx.Node, set[Value]] = {}
    for op in shadow.ops:
        if op.node not in taken:
            taken[op.node] = set(held[op.node])
        taken[op.node].update(op.sources)
    return taken


def _held(shadow: Shadow, node: fx.Node) -> set[Value]:
    value = shadow.values.get(node)
    return {leaf for leaf in ([value] if isinstance(value, Value) else tree_leaves(value)) if isinstance(leaf, Value)}


def is_reached(reached: set[fx.Node], value: Value) -> bool:
    """Whether a gradient can come back to a value."""
    return not reached.isdisjoint(_nodes(value))


def _registers_hook(node: fx.Node) -> bool:
    """Whether a node has a function called with the gradient of a tensor, once this comes back."""
    return getattr(node.target, "__name__", "") == "register_hook"


def check_gradients(reached: set[fx.Node], site: Site) -> None:
    """Refuse a site that would call a hook that eager code does not, or give zeros to parameters without a gradient."""
    if isinstance(site, (MixSite, ProjectionSite)):
        _check_hooks(reached, site)
    if isinstance(site, MixSite):
        _check_parameters(reached, site)


def _check_hooks(reached: set[fx.Node], site: MixSite | ProjectionSite) -> None:
    """Refuse an operator that would call a hook which eager code does not.

    Autograd calls the hooks of all results of an operator, those of results without a gradient with None.
    """
    for value in site.targets():
        hooked = [node for node in _nodes(value) if any(map(_registers_hook, node.users))]
        if hooked and not is_reached(reached, value):
            raise Decline(
                f"a hook is registered on {in_words(hooked[0])}, to which no gradient comes back: eager code does not "
                "call it, and one operator for this and other gates would call it with None"
            )


def _check_parameters(reached: set[fx.Node], site: MixSite) -> None:
    named = zip(("h_pre", "h_post", "h_res"), (site.pre, site.post, site.res), site.groups, strict=False)
    parts = [(name, gate.value, _parameters(rows)) for name, gate, rows in named if gate is not None]
    for product in site.products:
        parts.append((f"logits {len(parts)}", product.projection.out, {product.projection.out}))
    moved = {name: is_reached(reached, value) for name, value, _ in parts}
    if len(set(moved.values())) < 2:
        return
    shared = {value for name, _, parameters in parts if moved[name] for value in parameters}
    for name, _, parameters in parts:
        if not moved[name] and any(requires_gradient(value) for value in parameters - shared):
            others = " and ".join(other for other in moved if moved[other])
            raise Decline(
                f"a gradient reaches {others}, but not {name}, because {name} or everything computed from it is "
                f"detached; parameters that only {name} uses would get zeros in place of no gradient"
            )


def _parameters(rows: Rows) -> set[Value]:
    """The parameters of a gate: the phi whose rows make its logits, and its parts of scale and bias."""
    vectors = [*rows.scale, *(vector for term in rows.bias for vector in term)]
    return {rows.projection.out, *(vector.base for vector in vectors if vector.base is not None)}


def requires_gradient(value: Value) -> bool:
    """Whether a value has a gradient, as far as the graph says."""
    return any(map(_requires_gradient, _nodes(value)))


def _nodes(value: Value) -> list[fx.Node]:
    """The nodes of the program that hold a value, or else the node inside which it is made."""
    return list(value.nodes) or ([] if value.op is None else [value.op.node])
