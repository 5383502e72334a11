"""Views of values: what is written through, and what is returned together with the values themselves."""

from __future__ import annotations

from tests.fuzz.program import Pick

# Tensors that share memory with {v}, whatever its number of dimensions is, from two on.
VIEWS = (
    "{v}.select(1, -1)",
    "{v}[:, -1]",
    "{v}[..., :1]",
    "{v}[:1]",
    "{v}.narrow(-1, 0, 1)",
    "{v}.split(1, -1)[0]",
    "{v}.chunk(2, 0)[0]",
    "{v}.unbind(0)[-1]",
    "{v}.tensor_split(2, -1)[1]",
    "{v}.view(-1)",
    "{v}.view({v}.shape)",
    "{v}.view_as({v})",
    "{v}.flatten(0, 1)",
    "{v}.reshape(-1, {v}.shape[-1])",
    "{v}.unflatten(0, (1, -1))",
    "{v}.unsqueeze(0)",
    "{v}.squeeze(1)",
    "{v}.squeeze()",
    "{v}.transpose(-1, -2)",
    "{v}.mT",
    "{v}.movedim(0, -1)",
    "{v}.permute(*reversed(range({v}.dim())))",
    "{v}.diagonal(dim1=-2, dim2=-1)",
    "{v}.unfold(-1, 1, 1)",
    "{v}.expand(2, *{v}.shape)",
    "{v}.expand_as({v})",
    "{v}.as_strided({v}.shape, {v}.stride())",
    "{v}[None]",
    "{v}[...]",
    "{v}.detach()",
    "{v}.data",
    "{v}.contiguous()",
    "{v}.to({v}.dtype)",
    "{v}.sum(1) if {v}.shape[1] == 1 else {v}",
)


def view(pick: Pick, value: str) -> str:
    """A view of a value, or a view of a view."""
    once = pick(VIEWS).format(v=value)
    if pick([False, False, True]):
        return pick(VIEWS).format(v=f"({once})")
    return once
