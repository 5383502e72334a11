"""A grammar of hyper-connection programs, as Python source.

`compose(pick)` makes one program. pick chooses one of several options; the first option is always the plainest, so a
failing program shrinks towards a real hyper-connection. A program is real until something is put into it: the kinds of
`KINDS`, each of which may meet any other, and mutations, most of which change what the program computes. The passes
have to notice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from tests.fuzz.around_gates import FREEZES, MORE_OF_FROZEN, MORE_OF_LISTS, put_dropouts, put_frozen, put_lists
from tests.fuzz.calls import draw_calls, draw_sizes
from tests.fuzz.identities import apply_identities
from tests.fuzz.mutated import MODELS, places, told
from tests.fuzz.mutations import mutate, put_in_block
from tests.fuzz.no_gradient import put_casts, put_log, put_none
from tests.fuzz.norms import put_zeros
from tests.fuzz.orders import put_chains, put_late_casts, put_noises, put_products
from tests.fuzz.other_streams import MAKERS
from tests.fuzz.program import Pick, Program
from tests.fuzz.ranges import put_ranges, put_small
from tests.fuzz.ranks import put_ranks
from tests.fuzz.results import HEADS, put_aliases, put_detached
from tests.fuzz.rows import put_rows
from tests.fuzz.sublayer_lines import LAYOUTS, Layout, Line
from tests.fuzz.sums import put_scaled, put_types
from tests.fuzz.views import view
from tests.fuzz.writes import put_copies, put_one_by_one, put_slices, put_writes, write
from tests.zoo import spellings
from tests.zoo.misses import MISSES

__all__ = ["KINDS", "Program", "compose"]

# What a program may have, and how often it is drawn in comparison with the others.
KINDS = {
    "identities": 4,
    "writes": 4,
    "aliasing outputs": 3,
    "detach beside": 2,
    "rows by index": 2,
    "one token": 2,
    "equal streams": 1,
    "saturated gates": 1,
    "dynamic sizes": 2,
    "process group": 2,
    "casts under another grad mode": 1,
    "backward of None": 1,
    "squares for a log": 1,
    "dropouts": 1,
    "gates in a list": 1,
    "frozen gates": 1,
    "sums with a factor": 1,
    "sums of another dtype": 1,
    "slices one over another": 1,
    "streams one by one": 1,
    "copied streams": 2,
    "norms of zeros": 1,
    "random numbers in order": 1,
    "writes before casts": 1,
    "chains in place": 1,
    "products in place": 1,
    "other functions in a range": 1,
    "small gates": 1,
}
# Lines without which there is nothing to put a kind into.
NEEDS = {
    "small gates": {"h_pre", "pre"},
    "other functions in a range": {"h_pre"},
    "gates in a list": {"h_pre"},
    "frozen gates": {"h_pre"},
    "streams one by one": {"h_post", "outer"},
    "copied streams": {"outer"},
}
# Streams that are all equal, by the layout's letters.
EQUAL = {
    "bsnc": ("x[:, :, :1].expand(-1, -1, N, -1)", "x[:, :, :1].repeat(1, 1, N, 1)", "x[:, :, :1].expand_as(x).clone()"),
    "tnc": ("x[:, :1].expand(-1, N, -1)", "x[:, 0].unsqueeze(-2).expand(*x.shape[:-2], N, C)"),
    "bsd": ("x[..., :C].repeat(1, 1, N)", "torch.cat([x[..., :C]] * N, -1)"),
    "bscn": ("x[..., :1].expand(-1, -1, -1, N)", "torch.stack([x[..., 0]] * N, -1)"),
    "bnsc": ("x[:, :1].expand(-1, N, -1, -1)", "x[:, :1].repeat_interleave(N, 1)"),
    "nbsc": ("x[:1].expand(N, -1, -1, -1)", "torch.stack([x[0]] * N)"),
}
# What may be around a near miss, which may hold parameters of its batch and length: other sizes would not fit.
_OF_NEAR = ("aliasing outputs", "detach beside", "equal streams", "process group")
# In this order: those that put other lines in the place of a program's own come first, and blocks last.
PUT = {
    "small gates": put_small,
    "sums of another dtype": put_types,
    "sums with a factor": put_scaled,
    "streams one by one": put_one_by_one,
    "gates in a list": put_lists,
    "frozen gates": put_frozen,
    "norms of zeros": put_zeros,
    "other functions in a range": put_ranges,
    "dropouts": put_dropouts,
    "slices one over another": put_slices,
    "copied streams": put_copies,
    "backward of None": put_none,
    "squares for a log": put_log,
    "chains in place": put_chains,
    "products in place": put_products,
    "random numbers in order": put_noises,
    "writes before casts": put_late_casts,
    "writes": put_writes,
    "aliasing outputs": put_aliases,
    "detach beside": put_detached,
    "rows by index": put_rows,
    "casts under another grad mode": put_casts,
}
# Those that may be around a model of the zoo.
AROUND = {"writes", "aliasing outputs", "detach beside"}
# What a kind adds to the model's parameters and buffers.
MORE = {"gates in a list": MORE_OF_LISTS, "frozen gates": MORE_OF_FROZEN}


def compose(pick: Pick) -> Program:
    """One program, by the choices of `pick`."""
    return pick([_written, _written, _written, _written, _nearly, _spelled, _mutated])(pick)


def _drawn_kinds(pick: Pick, kinds: Collection[str]) -> list[str]:
    weighted = [kind for kind in kinds for _ in range(KINDS[kind])]
    return list(dict.fromkeys(pick(weighted) for _ in range(pick([0, 1, 1, 2, 2, 3, 4, 5]))))


def _written(pick: Pick) -> Program:
    """A program of the grammar."""
    features = _drawn_kinds(pick, KINDS)
    layout = LAYOUTS[pick([*LAYOUTS, *[*LAYOUTS][:4] * 2])]
    sizes = draw_sizes(pick, features, pick([4, 2, 3]))
    cast = pick([False] * 5 + [True])
    kind = pick(["", "list of streams"] if "gates in a list" in features else [*[""] * 6, *MAKERS])
    parts, lines = MAKERS[kind](pick, layout, cast, "equal streams" in features)
    features += [kind] if kind else []
    names = {line.names for line in lines}
    features = [kind for kind in features if NEEDS.get(kind, names) <= names]
    if "identities" in features:
        apply_identities(pick, lines)
    texts = [[str(line)] for line in lines]
    mutate(pick, lines, texts, often=not features)
    for kind, put in PUT.items():
        if kind in features:
            put(pick, lines, texts)
    given = _sizes_that_meet(pick, layout, lines, texts) if "dynamic sizes" in features else "x"
    put_in_block(pick, texts)
    written = {"writes", "copied streams", "writes before casts"} & set(features)
    bare = bool(written or "aliasing outputs" in features) and pick([False, False, True])
    letters = (layout.shape, layout.shape.replace("n", "").replace("d", "c"))[: given.count(",") + 1]
    calls = draw_calls(pick, features, letters, sizes)
    if bare and written:
        calls["leaves"] = False  # eager does not let anyone write into a leaf
    frozen = pick(FREEZES) if "frozen gates" in features else ()
    if "entry" in frozen:
        calls["leaves"] = False  # so that the streams need no gradient
    if {"dropouts", "random numbers in order"} & set(features):
        calls["inductor"] = False  # Inductor draws numbers of its own
    heads = ["out", "out", "(out, out.mean(-2))", "out.sin()"]
    settings = {
        "parts": parts,
        "checkpointing": pick([False] * 7 + [True]),
        "autocast": pick([False] * 3 + [True]),
        "head": pick(list(HEADS) if {"aliasing outputs", "detach beside"} & set(features) else heads),
        "given": given,
        "frozen": frozen,
        "more": [line for kind, more in MORE.items() if kind in features for line in more],
        "off": "copied streams" in features and pick([False, False, True]),
        "scale": pick([100, 300, 1000, 3000]) if "saturated gates" in features else 1,
        "equal": pick(EQUAL[layout.shape]) if "equal streams" in features else "x",
        "entered": "x" if bare else "(x * self.entry).to(x.dtype)",
        "entry": [sizes["b"] if letter == "b" and "later" not in calls else 1 for letter in layout.shape],
    }
    source = _source(sizes, [text for group in texts for text in group], settings)
    if "process group" in features:
        source = put_ranks(pick, source, letters, given)
    shape, dtype = tuple(sizes[letter] for letter in layout.shape), "bfloat16" if cast else "float32"
    calls.setdefault("dynamic", pick([None] * 7 + [True]))
    return Program(source, shape, dtype, features=tuple(features), **calls)


def _sizes_that_meet(pick: Pick, layout: Layout, lines: list[Line], texts: list[list[str]]) -> str:
    """A second input, whose sizes the program makes equal to the first one's, and sizes that a weight fixes late.

    Returns the names of the inputs.
    """
    given = pick(["x, skip", "x"])
    if given != "x":
        texts[[line.names for line in lines].index("u")].append("u = u + skip.to(u.dtype)")
    if "n" in layout.shape and pick([False, True]):
        texts.insert(0, [f"N, C = x.shape[{layout.shape.index('n')}], x.shape[{layout.shape.index('c')}]"])
    return given


def _source(sizes: dict[str, int], body: list[str], settings: dict[str, object]) -> str:
    n, parts = sizes["n"], settings["parts"]
    rows = {1: n, 2: 2 * n, 3: n * n + 2 * n}[parts]
    inner = (
        "with torch.no_grad():\n" + textwrap.indent("\n".join(body), " " * 4) if settings["off"] else "\n".join(body)
    )
    frozen = f"\n    frozen = {settings['frozen']!r}" if settings["frozen"] else ""
    more = "".join(f"\n        {line}" for line in settings["more"])
    scale = "" if settings["scale"] == 1 else f"{settings['scale']} * "
    return f"""
N, C = {n}, {sizes["c"]}


class Model(nn.Module):
    checkpointing = {settings["checkpointing"]}
    parts = {parts}{frozen}

    def __init__(self):
        super().__init__()
        self.phi = nn.Parameter(torch.randn({rows}, N * C) * (N * C) ** -0.5)
        self.scale = nn.Parameter({scale}(1 + 0.2 * torch.randn(3)))
        self.bias = nn.Parameter(0.5 * torch.randn({rows}))
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(N * C))
        self.weight = nn.Parameter(torch.randn(C, C) * C**-0.5)
        self.layer_bias = nn.Parameter(torch.randn(C))
        self.channel = nn.Parameter(1 + 0.2 * torch.randn(C))
        self.entry = nn.Parameter(1 + 0.2 * torch.randn({", ".join(map(str, settings["entry"]))}))
        self.register_buffer("buffer", torch.ones(())){more}

    def body(self, {settings["given"]}):
        kept = []
{textwrap.indent(inner, " " * 8)}
        return ({settings["head"]}, *kept)

    def forward(self, {settings["given"]}):
        x = {settings["entered"]}
        x = {settings["equal"]}
        if self.checkpointing:
            with torch.autocast("cpu", torch.bfloat16, {settings["autocast"]}):
                return checkpoint(self.body, {settings["given"]}, use_reentrant=False)
        return self.body({settings["given"]})
"""


def _nearly(pick: Pick) -> Program:
    """Two or three of the zoo's near misses in one model."""
    # Those that draw random numbers draw others in float64.
    names = [name for name in MISSES if not any(word in name for word in ("dropout", "noise", "random"))]
    bases = list(dict.fromkeys(pick(names) for _ in range(pick([2, 3]))))
    n = pick([4, 2, 3])
    batch, length, width = pick([2, n, 1]), pick([3, n, 3, 130, 1]), pick([6, n])
    source = f"""
from tests.zoo.misses import MISSES


class Model({", ".join(f'MISSES["{name}"]' for name in bases)}):
    def __init__(self):
        super().__init__(n={n}, width={width}, length={length}, batch={batch})
"""
    return _around(pick, source, (batch, length, n, width), _OF_NEAR)


def _spelled(pick: Pick) -> Program:
    """The zoo's sublayer in a spelling drawn at random."""
    choices = {place: pick(list(options)) for place, options in spellings.PLACES.items()}
    n = pick([4, 2, 3])
    shape = (pick([2, n, 1]), pick([3, n, 1]), n, pick([6, n]))
    source = f"""
from tests.zoo.spellings import Spelled


class Model(Spelled):
    def __init__(self):
        super().__init__({choices!r}, n={n}, width={shape[-1]})
"""
    kinds = [kind for kind in KINDS if kind not in ("identities", "one token") and kind not in PUT.keys() - AROUND]
    return _around(pick, source, shape, kinds)


def _mutated(pick: Pick) -> Program:
    """A model of the zoo, whole, with one place of its source changed."""
    name = pick([*MODELS])
    place = pick(range(len(places(name)) + 1))
    n, width = pick([4, 2, 3]), pick([24, 6])
    given = {"streams": n, "width": width, "layers": pick([1, 2]), **MODELS[name][2]}
    source = f"""
from tests.fuzz.mutated import mutated


class Model(mutated({name!r}, {place})):  # {told(name, place)}
    def __init__(self):
        super().__init__(**{given!r})
"""
    features = ["mutant of a model"] if place else []
    shape = (pick([2, 1]), pick([3, n, 1]), width)
    calls = draw_calls(pick, features, ("bsc",), dict(zip("bsc", shape, strict=True)))
    return Program(source, shape, dynamic=pick([None] * 7 + [True]), features=tuple(features), **calls)


def _around(pick: Pick, source: str, shape: tuple[int, ...], kinds: Collection[str]) -> Program:
    """A model of the zoo, and what happens to its streams before it and to its results after it."""
    features = _drawn_kinds(pick, kinds)
    if shape[1] == 1:
        features.append("one token")
    sizes = dict(zip("bsnc", shape, strict=True))
    calls = draw_calls(pick, features, ("bsnc",), sizes)
    lines = ["x = x[:, :, :1].expand_as(x)"] if "equal streams" in features else []
    if "saturated gates" in features:
        lines.append(f"self.scale.data.fill_({pick([100.0, 300.0, 1000.0])})")
    lines += ["results = torch.utils._pytree.tree_leaves(super().forward(x))"]
    one = f"results[{pick([0, -1])}]"
    if "writes" in features:
        lines += write(pick, one)
    if "detach beside" in features:
        lines.append(pick(["results.append({v}.detach())", "results.insert(0, {v}.detach())"]).format(v=one))
    if "aliasing outputs" in features:
        lines.append(f"results.append({view(pick, one)})")
    if features:
        body = textwrap.indent("\n".join([*lines, "return results"]), " " * 8)
        source += f"\n    def forward(self, x):\n{body}\n"
    calls.setdefault("dynamic", pick([None] * 7 + [True]))
    return Program(source, shape, features=tuple(features), **calls)
