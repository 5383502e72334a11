"""What each operator hands to its kernels, in the C-units of `benchmarks.units`.

A C-wide row per token that a kernel is given, is read or written by it at least once; a tensor given to two kernels
counts twice. Nothing is launched: the host functions run on CPU tensors that are never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import (
    aggregate,
    aggregate_and_norm,
    boundary,
    boundary_pass,
    expand_combine,
    expand_combine_and_read,
    generate_mix_and_aggregate,
    gpus,
    head,
    mix_streams,
    projection,
    shifted_boundary,
)
from tests.kernels.compile_kernels import _recorded

# So many that no tensor of parameters, gates or partial sums is as large as one row of C numbers per token.
TOKENS, WIDTH = 8192, 4096


def count(n: int, *, many: bool) -> dict[str, float]:
    """C-units by operator, for n bfloat16 streams and all gradients but that of a norm weight.

    Counted for TOKENS, with kernels as for many of them, or few, on a GPU of 132 processors.
    """
    processors = mock.patch.object(gpus, "processors", return_value=132)
    pays = mock.patch.object(boundary_pass, "pays", return_value=many)
    with pays, processors, mock.patch.object(gpus, "of", return_value=gpus.TABLE[90]):
        return {name: sum(_units(bound) for _, bound, _ in _recorded(call)) for name, call in _calls(n).items()}


# Arguments that a kernel writes: memory that it reads under another name moves twice.
_WRITTEN = ("dx", "df", "out")


def _units(bound: dict[str, Any]) -> float:
    wide = {name: v for name, v in bound.items() if isinstance(v, torch.Tensor) and v.numel() >= TOKENS * WIDTH}
    tensors = {(v.data_ptr(), name in _WRITTEN): v for name, v in wide.items()}
    return sum(tensor.nbytes for tensor in tensors.values()) / (TOKENS * WIDTH * torch.bfloat16.itemsize)


def _calls(n: int) -> dict[str, Callable[[], object]]:
    k = n * n + 2 * n

    def streams() -> torch.Tensor:
        return torch.empty(TOKENS, n, WIDTH, dtype=torch.bfloat16)

    def row() -> torch.Tensor:
        return torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)

    pre, post, res = torch.empty(TOKENS, n), torch.empty(TOKENS, n), torch.empty(TOKENS, n, n)
    h, ms = torch.empty(TOKENS, k), torch.empty(TOKENS)
    mix = torch.empty(k, n * WIDTH), torch.empty(3), torch.empty(k)
    only_pre = torch.empty(n, n * WIDTH), torch.empty(1), torch.empty(n)
    forms: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
    needs = [True, True, True, True, False]
    x, new, f, d_input = streams(), streams(), row(), row()
    combine = f, None, post, x, res
    saved = h, ms
    return {
        "projection": lambda: projection.forward(x, mix[0]),
        "projection_backward": lambda: projection.backward(h, ms, x, mix[0], None, [True, True, False]),
        "aggregate": lambda: aggregate.forward(x, pre),
        "aggregate_backward": lambda: aggregate.backward(d_input, x, pre, [True, True]),
        "aggregate_and_norm": lambda: aggregate_and_norm.forward(x, pre, input_norm_eps=1e-6),
        "aggregate_and_norm_backward": lambda: aggregate_and_norm.backward(
            d_input, x, pre, [True, True, False], input_norm_eps=1e-6
        ),
        "mix_streams": lambda: mix_streams.forward(x, res),
        "mix_streams_backward": lambda: mix_streams.backward(new, x, res, [True, True]),
        "generate_mix_and_aggregate": lambda: generate_mix_and_aggregate.forward(x, *mix, **forms),
        "generate_mix_and_aggregate_backward": lambda: generate_mix_and_aggregate.backward(
            d_input, post, res, None, None, x, *mix, None, *saved, needs, **forms
        ),
        "head": lambda: head.forward(x, *only_pre, rms=Rms(), pre_eps=0.0),
        "head_backward": lambda: head.backward(
            d_input, None, None, x, *only_pre, None, torch.empty(TOKENS, n), ms, needs, rms=Rms(), pre_eps=0.0
        ),
        "expand_combine": lambda: expand_combine.forward(*combine),
        "expand_combine_backward": lambda: expand_combine.backward(new, *combine, [True, False, True, True, True]),
        "boundary": lambda: boundary.forward(*combine, *mix, **forms),
        "boundary_backward": lambda: boundary.backward(
            streams(), d_input, post, res, None, None, *combine, *mix, None, new, *saved,
            [True, False, True, True, True, *needs[1:]], **forms,
        ),
        "expand_combine_and_read": lambda: expand_combine_and_read.forward(*combine, None, mix[0]),
        "expand_combine_and_read_backward": lambda: expand_combine_and_read.backward(
            streams(), d_input, h, ms, *combine, pre, mix[0], None, new,
            [True, False, True, True, True, False, True, False],
        ),
        "shifted_boundary": lambda: shifted_boundary.forward(*combine, pre, *mix, **forms),
        "shifted_boundary_backward": lambda: shifted_boundary.backward(
            streams(), d_input, pre, post, res, None, None, *combine, pre, *mix, None, new, *saved,
            [True, False, True, True, True, True, *needs[1:]], **forms,
        ),
    }  # fmt: skip
