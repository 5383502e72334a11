"""Reports of models of any depth, made without a compilation."""

from __future__ import annotations

from collections import Counter

from mhc_compile.passes.report import (
    FUNCTION,
    NOT_COMPILED,
    Fused,
    Location,
    Report,
    SiteReport,
    Traffic,
)

READ, WRITE = "generate_mix_and_aggregate", "expand_combine"
# What a page must show as text, whatever a program's line or a message holds.
HOSTILE = 'x = \'<script>document.title = "run"</script>\' & "</style>"'
REASON = "this reads streams with a gate for each channel; <b>the operator</b> has one for each stream"
BREAK = "its gates are used outside this graph: Dynamo breaks the graph at model.py:33: print(<x>)"
_LINES = {
    READ: Location("model.py", 12, "u = (h_pre.unsqueeze(-1) * x).sum(-2)"),
    WRITE: Location("model.py", 16, "x = h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x"),
}
_DETAIL = "n = 4, C = 4096, bfloat16, rms eps 1e-06 inside, sinkhorn softmax, columns first, 39 half-steps, eps 1e-06"
_BYTES = {
    READ: (Traffic(9_261_023_232, 3_087_007_744), Traffic(336_461_824, 68_026_368)),
    WRITE: (Traffic(2_014_314_496, 805_306_368), Traffic(604_766_208, 268_435_456)),
}


def report(depth: int) -> Report:
    """A model with two sublayers a layer, each fused with the next one. Of layers above 2, some lose something."""
    found = Report(graphs=1, seconds=1.5)
    for layer in range(depth):
        for name in ("attention", "mlp"):
            found.sites += [_site(READ, layer, name), _site(WRITE, layer, name)]
    if depth > 2:
        found.sites[8:9] = [SiteReport("aggregate", Location("model.py", 25, HOSTILE), "", REASON, module="layers.2")]
        found.cut = [
            SiteReport(WRITE, _LINES[WRITE], "cut", BREAK, module="layers.2.attention"),
            SiteReport(
                FUNCTION, Location("model.py", 80, "forward"), NOT_COMPILED, "Dynamo gives up on it at model.py:82"
            ),
        ]
        found.errors = ["an internal failure: ValueError: <planted>"]
    pairs = zip(found.sites[1:], found.sites[2:], strict=False)
    found.fused = [
        Fused("boundary", (_part(one), _part(other)), Traffic(806_000_000, 336_000_000))
        for one, other in pairs
        if (one.op, other.op) == (WRITE, READ)
    ]
    found.fusions = Counter(boundary=len(found.fused), boundary_backward=len(found.fused))
    found.excerpts = {
        f"{op:.8}": [
            f"in0: bf16[8192, 4, 4096]\n# {at.short}  {at.code}\n%0 = mul(in0, 2.0)  # {HOSTILE}",
            f"%0 = mhc.{op}(in0)",
        ]
        for op, at in _LINES.items()
    }
    return found


def _site(op: str, layer: int, name: str) -> SiteReport:
    before, after = _BYTES[op]
    own = "h_pre (model.py:11)" if (op, layer) == (READ, 1) else ""
    return SiteReport(op, _LINES[op], _DETAIL, None, own, f"layers.{layer}.{name}", before, after, f"{op:.8}")


def _part(site: SiteReport) -> SiteReport:
    return SiteReport(site.op, site.location, "", module=site.module)
