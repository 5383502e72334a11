"""Which gates of one tensor's streams make up a connection, and as what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mhc_compile.passes.plan.sites import Decline
from mhc_compile.passes.recognise import Findings
from mhc_compile.passes.recognise.gates import Gate, Mixing, Sigmoid
from mhc_compile.passes.recognise.mixtures import Mixture
from mhc_compile.passes.shadow import Value


@dataclass
class Roles:
    """The gates of one connection, and the projections that each comes from."""

    owners: dict[Value, Mixture]
    pre: Gate | None = None
    post: Gate | None = None
    res: Gate | None = None

    def gates(self) -> Iterator[Gate]:
        yield from (gate for gate in (self.pre, self.post, self.res) if gate is not None)

    def without_pre(self) -> Roles:
        if self.pre is None or (self.post is None and self.res is None):
            raise Decline("nothing is left without its h_pre gate")
        return replace(self, pre=None)

    def origins(self) -> set[Value]:
        return {self.owners[gate.value].projection.out for gate in self.gates()}


def connections(mixtures: list[Mixture], findings: Findings) -> list[Roles]:
    """The gates of one tensor's streams, put together into connections.

    Any h_pre may go with any h_post and h_res: all are computed from the same streams. Those that one combine uses go
    together, then those of one projection, then the rest in the order of the program.
    """
    owners = {value: mixture for mixture in mixtures for value in mixture.gates}
    every = {value: mixture.gates[value] for value, mixture in owners.items()}
    x = mixtures[0].projection.x
    written: dict[Value, Roles] = {}
    for c in findings.combines:
        post = every.get(c.outer.post) if c.outer.post is not None and not c.outer.columns else None
        if post is None or not isinstance(post.kind, Sigmoid) or post.value in written:
            continue
        res = every.get(c.mix.res) if c.mix is not None and c.mix.res is not None else None
        if res is not None and (not isinstance(res.kind, Mixing) or res.size != post.size**2):
            res = None
        if any(r.res is res for r in written.values() if res is not None):
            res = None
        written[post.value] = Roles(owners, post=post, res=res)
    pairs = list(written.values())
    used = {gate.value for pair in pairs for gate in pair.gates()}
    read = {a.gate for a in findings.aggregates if a.x is x and a.has_whole_gate} - used
    rest = [gate for gate in every.values() if gate.value not in used and gate.value not in read]
    squares = [gate for gate in rest if isinstance(gate.kind, Mixing)]
    loose = sorted((g for g in rest if isinstance(g.kind, Sigmoid)), key=lambda g: g.rows)
    pres = [gate for value, gate in every.items() if value in read and _may_be_pre(gate)]
    for square in squares:
        home = [p for p in pairs if p.res is None and p.post is not None and p.post.size**2 == square.size]
        target = _nearest(home, square, owners)
        if target is None:
            pairs.append(Roles(owners, res=square))
        else:
            target.res = square
    for gates, role in ((pres, "pre"), (loose, "pre"), (loose, "post")):
        for gate in list(gates):
            if role == "pre" and gates is loose and not is_plain(gate):
                continue
            target = _nearest([p for p in pairs if getattr(p, role) is None and _fits(p, gate)], gate, owners)
            if target is not None:
                setattr(target, role, gate)
                gates.remove(gate)
    return [*pairs, *(Roles(owners, pre=gate) for gate in pres)] or [
        Roles(owners, pre=gate) for gate in loose if is_plain(gate)
    ]


def _may_be_pre(gate: Gate) -> bool:
    return isinstance(gate.kind, Sigmoid)


def is_plain(gate: Gate) -> bool:
    """Whether a gate is sigmoid (+ eps), as h_pre has to be."""
    return isinstance(gate.kind, Sigmoid) and abs(gate.kind.mult - 1.0) < 1e-12


def _fits(pair: Roles, gate: Gate) -> bool:
    sizes = {gate.size if isinstance(gate.kind, Sigmoid) else round(gate.size**0.5) for gate in pair.gates()}
    return sizes == {gate.size}


def _nearest(candidates: list[Roles], gate: Gate, owners: dict[Value, Mixture]) -> Roles | None:
    """The first connection with a gate of the same projection, or else the first."""
    home = owners[gate.value].projection.out
    return next((c for c in candidates if home in c.origins()), candidates[0] if candidates else None)
