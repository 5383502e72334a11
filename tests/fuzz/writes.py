"""Writes into what a program has made, in every form there is, through views and at any later place.

Also tensors that are written piece by piece, and streams that are copied over the old ones.
"""

from __future__ import annotations

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line
from tests.fuzz.sums import sum_of_write
from tests.fuzz.views import view

# Statements that write into {w}.
WRITES = (
    "{w}.add_(0.125)",
    "{w}.mul_(0.75)",
    "{w}.copy_({w} * 0.5 + 0.1)",
    "{w}.fill_(0.25)",
    "{w}.zero_()",
    "{w}.clamp_(max=0.4)",
    "{w}.tanh_()",
    "{w}.masked_fill_({w} > 0.2, 0.1)",
    "{w}.index_fill_(0, torch.tensor([0]), 0.3)",
    "{w}.index_add_(0, torch.tensor([0]), torch.full_like({w}[:1], 0.5))",
    "{w}.index_copy_(-1, torch.tensor([0]), torch.full_like({w}[..., :1], 0.5))",
    "{w}.index_put_((torch.tensor([0]),), torch.tensor(0.25, dtype={w}.dtype))",
    "{w}.index_put_((torch.tensor([0]),), torch.tensor(0.25, dtype={w}.dtype), accumulate=True)",
    "{w}.scatter_(-1, torch.zeros_like({w}[..., :1], dtype=torch.long), 0.25)",
    "{w}.lerp_(torch.ones_like({w}), 0.25)",
    "{w}.addcmul_({w}.detach().clone(), torch.ones_like({w}))",
    "{w}[...] = 0.25",
    "{w}[..., :1] = 0.5",
    "{w}[0] *= 0.5",
    "{w}[torch.tensor([0])] = 0.25",
    "{w}[[0]] += 0.25",
    "w = {w}; w += 0.125",
    "w = {w}; w *= 0.5",
    "torch.mul({w}.detach(), 0.5, out={w}.detach())",
    "torch.add({w}.detach(), 0.5, out={w}.data)",
    "torch._foreach_mul_([{w}], 0.5)",
    "torch._foreach_add_([{w}, torch.ones(2)], 0.25)",
    "F.relu_({w})",
    "F.hardtanh({w}, -0.5, 0.5, inplace=True)",
    "F.dropout({w}, 0.0, inplace=True)",
    "torch.ops.fuzz.halve_({w}.detach())",
    "torch.ops.fuzz.halve_({w})",
    "allowed.halve({w})",
    "checkpoint(lambda w: w.mul_(0.5).sum(), {w}, use_reentrant=False)",
    "torch.cond({w}.sum() > 0, lambda w: w.mul(0.5), lambda w: w * 1.5, ({w},))",
    "with torch.no_grad(): {w}.add_(0.125)",
    "with torch.no_grad(): {w}.copy_(torch.ones_like({w}))",
)
# What slices are assigned to, and those of them that may lie one over another.
EMPTY = ("torch.zeros_like(old)", "old.clone()", "torch.ones_like(old)", "old.sin()")
SLICES = ("0:2", "1:3", "1:", ":2", "0:1", "-2:", "0:N", ":", "-1:")
SOURCES = ("old", "old", "old.sin()", "0.5 * old", "old.flip(-1)", "torch.zeros_like(old)")
# Streams {s} before they are written one by one, and how.
BEGUN = (
    "xs.clone()",
    "xs.clone()",
    "torch.clone(xs)",
    "mixed.clone()",
    "xs + 0",
    "xs.contiguous().clone()",
    "xs.sin()",
)
ONE_BY_ONE = (
    "{s}[..., i, :] = {s}[..., i, :] + {p} * f",
    "{s}[..., i, :] = {p} * f + {s}[..., i, :]",
    "{s}[..., i, :] += {p} * f",
    "{s}[..., i, :].add_({p} * f)",
    "{s}.select(-2, i).add_({p} * f)",
    "{s}[..., i, :].copy_({s}[..., i, :] + {p} * f)",
    "{s}[..., i : i + 1, :] = {s}[..., i : i + 1, :] + ({p} * f).unsqueeze(-2)",
    "{s}[..., i, :] = xs[..., i, :] + {p} * f",
    "{s}[..., i, :] = {s}[..., i - 1, :] + {p} * f",
)
RANGES = ("range(N)", "range(N)", "reversed(range(N))", "range(1, N)", "(0, N - 1)")
COPIES = (
    "{x}.copy_({y})",
    "{x}.copy_({y}, non_blocking=True)",
    "{x}[...] = {y}",
    "{x}[:] = {y}",
    "{x}[:1].copy_({y}[:1])",
    "{x}.transpose(0, 1).copy_({y}.transpose(0, 1))",
    "{x}.detach().copy_({y})",
)
COPIED = ("{y} = {x}", "{y} = {x} * 1.5", "kept.append({x})", "kept += [{y}, {x}]", "{y} = {y} + {x}", "pass")


def write(pick: Pick, value: str, plain: bool = False) -> list[str]:
    """Statements that write into a value, or into a view of it."""
    target = value if plain else pick([value, None, None, None]) or view(pick, value)
    statement = pick(WRITES)
    if pick([False, False, True]) and target != value:  # through a name, so that the view is made once
        return [f"seen = {target}", *statement.format(w="seen").split("; ")]
    if statement.count("{w}") > 1 or " if " in target:
        return [f"seen = {target}", *statement.format(w="seen").split("; ")]
    return statement.format(w=target).split("; ")


def put_writes(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """One or two writes: each after the line that makes the value, or after a later one."""
    for _ in range(pick([1, 1, 2])):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        value = pick([lines[made].names] * 8 + ["xs", "x"])
        at = made + pick([0, 0, 0, 1, 2, 3, 5, 8])
        texts[min(at, len(texts) - 1)] += write(pick, value)
        if pick([False] * 3 + [True]):  # the value itself is an output, too
            texts[made].append(f"kept.append({value})")


def put_slices(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Slices of a value, mostly of streams, assigned to a tensor one over another."""
    likely = [index for index, line in enumerate(lines) if line.names in ("xs", "h_pre", "h_post", "mixed", "outer")]
    written = sum_of_write(lines)
    likely += [] if written is None else [written] * 3
    made = pick([*likely * 2, *(index for index, line in enumerate(lines) if line.mutable)])
    value = lines[made].names
    form = "..., {}" if value in ("h_pre", "h_post") else pick(["..., {}, :", "..., {}, :", "..., {}"])
    texts[made] += [f"old = {value}", f"{value} = {pick(EMPTY)}"]
    if pick([False, True]):  # all of it is written, most of it twice
        place = form.format("i : i + 2")
        texts[made] += [
            f"for i in {pick(['range(N - 1)', 'reversed(range(N - 1))'])}:",
            f"    {value}[{place}] = (old.sin() if i % 2 else {pick(SOURCES)})[{place}]",
        ]
        return
    for _ in range(pick([2, 3, 2, 4])):
        place = form.format(pick(SLICES))
        source = pick(SOURCES)
        texts[made].append(f"{value}[{place}] = ({source})[{place}]")


def put_one_by_one(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """Streams that are copied, and to each of which its own share of the sublayer's output is added in place."""
    made = sum_of_write(lines)
    assert made is not None, "the kind needs a write"
    out, cast = lines[made].names, "x.dtype" in texts[made][0]
    share = pick(["h_post[..., i, None]", "h_post[..., i, None]", "h_post[..., i : i + 1]", "self.bias[i]"])
    written = pick([out, "xs"]) if out != "xs" else "xs"
    line = pick(ONE_BY_ONE).format(s=written, p=share)
    line = line.replace(f"{share} * f", f"({share} * f).to(x.dtype)") if cast else line
    texts[made][0] = f"{written} = " + (f"({pick(BEGUN)}).to(x.dtype)" if cast else pick(BEGUN))
    texts[made][1:1] = [f"for i in {pick(RANGES)}:", f"    {line}", f"{out} = {written}"]


def put_copies(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """New streams copied into the old ones, with a gradient or without."""
    made, x = sum_of_write(lines), "xs"
    if made is None or pick([False, True]):
        made, x = len(lines) - 1, "x"  # in the layout of the input
    y = "state" if lines[made].names == "xs" else lines[made].names
    new = [] if y == "out" else [f"{y} = {lines[made].names} * 1.5"]
    if pick([False, True]):  # what eager code keeps for its backward pass is not written
        new.append(f"{x} = {pick([f'{x}.clone()', f'torch.zeros_like({x})', f'torch.empty_like({x})'])}")
    copy = pick(COPIES[:1] * 4 + COPIES).format(x=x, y=y)
    texts[made] += [*new, pick(["{}", "with torch.no_grad(): {}"]).format(copy), pick(COPIED).format(x=x, y=y)]
