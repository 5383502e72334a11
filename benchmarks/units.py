"""The C-unit table: what each operator's kernels move by design, in rows of C numbers of the streams' dtype per token.

A unit is one such row, read or written. Parameters, gates and partial sums are not counted: beside n rows of C they
are small. An operator whose gates depend on a whole token reads x twice, once for the projection and once for what
the gates weigh, but where it keeps x meanwhile. The same counts are in docs/performance.md, and a test compares
them with what the host functions hand to their kernels.
"""

from __future__ import annotations

from collections.abc import Callable

# The numbers of bfloat16 streams that a boundary goes through once, on the GPU that is measured.
_IN_ONE_PASS = (2, 4)
# Operators that, of many tokens, do not read these streams again to weigh them.
_WITH_GATES = ("boundary", "generate_mix_and_aggregate")

# n: the number of streams. What one kernel reads and writes is in brackets.
_UNITS: dict[str, Callable[[int], int]] = {
    "projection": lambda n: n,
    "projection_backward": lambda n: n + n,
    "aggregate": lambda n: n + 1,
    "aggregate_backward": lambda n: n + 1 + n,
    "aggregate_and_norm": lambda n: n + 1,
    # The gradient of what the norm reads.
    "aggregate_and_norm_backward": lambda n: n + 1 + 1,
    # As many rows as there are streams.
    "mix_streams": lambda n: n + n,
    "mix_streams_backward": lambda n: n + n + n,
    "generate_mix_and_aggregate": lambda n: n + (n + 1),
    # d h_pre first (x, d layer_input), which dx needs for every column (x and d layer_input again, dx).
    "generate_mix_and_aggregate_backward": lambda n: (n + 1) + (n + 1 + n),
    "head": lambda n: n + (n + 1),
    "head_backward": lambda n: (n + 1) + (n + 1 + n),
    "expand_combine": lambda n: n + 1 + n,
    "expand_combine_backward": lambda n: n + n + 1 + n + 1,
    # The combine projects x' while it writes it; only the sum that the gates weigh reads it. Otherwise both read it.
    "boundary": lambda n: (n + 1 + n) + (n + 1) + (0 if n in _IN_ONE_PASS else n),
    # d h_pre first, as above; then one pass from x', its gradient, d layer_input, x and f to dx and df. Otherwise the
    # gradient of x' is written where it was, and the backward of the combine reads that.
    "boundary_backward": lambda n: (
        (n + 1) + (n + n + 1 + n + 1 + n + 1 if n in _IN_ONE_PASS else (n + 1 + n + n) + (n + n + 1 + n + 1))
    ),
    # The gates of the read are there before x' is: one pass combines, reads and projects. Otherwise each reads x'.
    "shifted_boundary": lambda n: n + 1 + n + 1 if n in _IN_ONE_PASS else (n + 1 + n) + (n + 1) + n,
    # As that of boundary: the gradient of the given gates first, then the rest.
    "shifted_boundary_backward": lambda n: _UNITS["boundary_backward"](n),
    # With a projection whose gates the program makes; the gradient of the gates of the read is apart.
    "expand_combine_and_read": lambda n: (n + 1 + n) + (0 if n in _IN_ONE_PASS else n),
    "expand_combine_and_read_backward": lambda n: _UNITS["boundary_backward"](n) - (n + 1),
}
OPERATORS = tuple(_UNITS)

# One sublayer of a long chain, whatever the operators: x and f in, x' and layer_input out; for the step also
# dx', x', x, d layer_input and f in, dx and df out.
_FLOORS: dict[str, Callable[[int], int]] = {
    "forward": lambda n: (n + 1) + (n + 1),
    "step": lambda n: (n + 1) + (n + 1) + (3 * n + 2) + (n + 1),
}


def are_many(tokens: int, width: int) -> bool:
    """Whether streams of `width` columns are not read again to be weighed, in a CUDA graph."""
    return tokens >= (384 if width > 1984 else 6144)


def units(operator: str, n: int, *, many: bool = False) -> int:
    """The C-units that the kernels of `operator` move for n streams; many: of as many tokens as `are_many` says.

    KeyError for an operator without a count.
    """
    again = n if many and n in _IN_ONE_PASS and operator in _WITH_GATES else 0
    return _UNITS[operator](n) - again


def floor(mode: str, n: int) -> int:
    """The fewest C-units with which a sublayer can run: mode "forward", or "step" for forward and backward."""
    return _FLOORS[mode](n)


def milliseconds(count: float, tokens: int, width: int, itemsize: int, bandwidth: float) -> float:
    """The time that `count` units take at `bandwidth` (GB/s of a copy, both directions counted)."""
    return count * tokens * width * itemsize / bandwidth / 1e6
