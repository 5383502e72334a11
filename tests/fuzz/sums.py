"""Sums with a factor of one summand, and sums and means whose result has another dtype."""

from __future__ import annotations

import re

from tests.fuzz.program import Pick
from tests.fuzz.sublayer_lines import Line

# In the place of a write's sum.
SCALED_WRITES = (
    "torch.add(mixed, outer, alpha=2)",
    "mixed.add(outer, alpha=-1)",
    "outer.add(mixed, alpha=0.5)",
    "torch.add(mixed, 2, outer)",
    "torch.sub(mixed, outer, alpha=0.5)",
    "outer.sub(mixed, alpha=-1)",
    "torch.rsub(outer, mixed, alpha=2)",
    "torch.subtract(mixed, outer, alpha=-2)",
    "mixed.add_(outer, alpha=0.5)",
    "outer.sub_(mixed, alpha=-0.5)",
    "torch.addcmul(mixed, outer, torch.ones_like(outer), value=2)",
    "torch.addcdiv(mixed, outer, torch.full_like(outer, 2.0), value=-1)",
    "torch.ops.aten.add.Tensor(mixed, outer, alpha=2)",
    "torch.ops.aten.add.Scalar(mixed + outer, 0.5, 2)",
    "torch._foreach_add([mixed], [outer], alpha=2)[0]",
)
# Of a sublayer with gates of its own.
SCALED_PRODUCTS = (
    "torch.addcmul(mixed, h_post.unsqueeze(-1), f.unsqueeze(-2), value=2)",
    "mixed.addcmul(h_post.unsqueeze(-1), f.unsqueeze(-2), value=-0.5)",
    "mixed.addcmul_(f.unsqueeze(-2), h_post.unsqueeze(-1), value=0.5)",
    "torch.addcdiv(mixed, f.unsqueeze(-2), 1 + h_post.unsqueeze(-1).square(), value=2)",
    "torch.baddbmm(mixed.flatten(0, -3), h_post.reshape(-1, N, 1), f.reshape(-1, 1, C), beta=0.5, alpha=2)"
    ".view(mixed.shape)",
    "mixed.flatten(0, -3).baddbmm(h_post.reshape(-1, N, 1), f.reshape(-1, 1, C), alpha=-1).view(mixed.shape)",
)
# Of any value.
SCALED = (
    "torch.add({v}, {v}.detach(), alpha=0.5)",
    "{v}.add({v}.sin(), alpha=-0.5)",
    "{v}.sub(1.0, alpha=0.5)",
    "torch.add({v}, 0.25, alpha=2)",
    "torch.rsub({v}, 1.0, alpha=0.75)",
    "torch.ops.aten.sub.Scalar({v}, 1.0, 0.25)",
    "torch.addcmul({v}, {v}, {v}, value=0.25)",
    "torch.sub({v}, {v}.tanh(), alpha=0.5)",
)
# Of the logits of gates.
SCALED_LOGITS = (
    "torch.rsub({v}, 1.0, alpha=3.0)",
    "torch.ops.aten.add.Scalar({v}, 1.0, 3.0)",
    "torch.ops.aten.sub.Scalar({v}, 1.0, 3.0)",
    "torch.add(self.bias[:N], {v}, alpha=1.5)",
    "{v}.add(self.bias[N : 2 * N], alpha=0.5)",
    "torch.addcmul(self.bias[:N], {v}, self.scale[0], value=0.5)",
    "torch.addmm(self.bias[:N], {v}.flatten(0, -2), torch.eye(N), beta=0.5, alpha=2).view({v}.shape)",
)
_SUMMED = re.compile(r"\.(sum|mean)\(((?:dim=)?-?\d(?:, keepdim=True)?)\)")
TYPES = ("torch.float64", "torch.float32", "torch.int64", "torch.int32", "torch.bfloat16", "torch.float16")


def put_scaled(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A sum with a factor, by position or keyword: a write, a gate's logits, or any other value."""
    made = sum_of_write(lines)
    if made is not None and pick([True, True, False]):
        choices = SCALED_WRITES
        if any(line.names == "h_post" for line in lines):
            choices += SCALED_PRODUCTS
        replace_sum(lines, texts, made, pick(choices))
        return
    logits = [index for index, line in enumerate(lines) if line.names in ("pre", "post")]
    if logits and pick([True, False]):
        made = pick(logits)
        texts[made].append(f"{lines[made].names} = " + pick(SCALED_LOGITS).format(v=lines[made].names))
    else:
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        texts[made].append(f"{lines[made].names} = " + pick(SCALED).format(v=lines[made].names))


def put_types(pick: Pick, lines: list[Line], texts: list[list[str]]) -> None:
    """A sum or mean into another dtype, which may be one of integers, and its result cast back."""
    summed = [index for index, group in enumerate(texts) if lines[index].mutable and _SUMMED.search(group[0])]
    begin = next(index for index, line in enumerate(lines) if line.names == "u") if summed else 0
    for made in {pick(summed) for _ in range(pick([1, 1, 2, 4]))} if summed else ():
        kind = pick(TYPES[:1] * 4 + TYPES)
        where, value = "x" if made >= begin else "wide", lines[made].names
        # There is no gradient of a sum of integers, and eager code raises an error.
        cut = pick([".detach()", ".detach()", ""]) if "int" in kind else ""
        texts[made][0] = _SUMMED.sub(
            lambda found, kind=kind, cut=cut: f"{cut}.{found[1]}({found[2]}, dtype={_of(found[1], kind)})",
            texts[made][0],
        )
        texts[made].insert(1, f"{value} = {value}.to({where}.dtype)")
    squares = [index for index in summed if lines[index].names == "ms"]
    if squares and pick([False] * 3 + [True]):
        value = "wide" if squares[0] < begin else "v"
        cut = pick(["", ".detach()"])
        texts[squares[0]][0] = (
            f"ms = {value}.square(){cut}.sum(-1, keepdim=True, dtype=torch.int64) / {value}.shape[-1]"
        )
    elif not summed or pick([False] * 3 + [True]):
        made = pick([index for index, line in enumerate(lines) if line.mutable])
        how, kind = pick(["sum", "mean"]), pick(TYPES)
        texts[made].append(f"kept.append({lines[made].names}.detach().{how}(-1, dtype={_of(how, kind)}))")


def _of(how: str, kind: str) -> str:
    """There is no mean of integers."""
    return "torch.float64" if how == "mean" and "int" in kind else kind


def sum_of_write(lines: list[Line]) -> int | None:
    """The last line that puts the streams and a sublayer's output together."""
    found = [index + 1 for index, line in enumerate(lines[:-1]) if line.names == "outer"]
    return found[-1] if found else None


def replace_sum(lines: list[Line], texts: list[list[str]], made: int, expression: str) -> None:
    """Put another sum in the place of a write's, with its cast."""
    cast = "x.dtype" in texts[made][0]
    texts[made][0] = f"{lines[made].names} = " + (f"({expression}).to(x.dtype)" if cast else expression)
