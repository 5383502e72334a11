"""Kernels have NaN and infinities where the references have them: no maximum of a GPU's loses a NaN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mhc_compile.forms import RMS_MODES, SINKHORN_AXES, SINKHORN_STARTS
from mhc_compile.ops._register import KERNELS, REFERENCES
from tests.kernels.cases import DEVICE, MARKS

pytestmark = MARKS
N = 4


def _same_kinds(operator: str, *args: Tensor | int | None, **scalars: object) -> None:
    def results(table: dict[str, object], device: str) -> Sequence[Tensor]:
        moved = (arg.to(device) if isinstance(arg, Tensor) else arg for arg in args)
        made = table[operator](*moved, **scalars)  # type: ignore[operator]
        return made if isinstance(made, (tuple, list)) else (made,)

    for ours, theirs in zip(results(KERNELS, DEVICE), results(REFERENCES, "cpu"), strict=True):
        assert torch.equal(ours.cpu().isnan(), theirs.isnan())
        assert torch.equal(ours.cpu().isinf(), theirs.isinf())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("start", "first", "clamp"), [*itertools.product(SINKHORN_STARTS, SINKHORN_AXES, (False, True))]
)
def test_sinkhorn(start: str, first: str, clamp: bool, value: float) -> None:
    form = {"steps": 4, "start": start, "first": first, "eps": 1e-6, "start_eps": 1e-6, "clamp": clamp}
    torch.manual_seed(0)
    logits, gradient = torch.randn(3, N, N), torch.randn(3, N, N)
    spoiled = logits.clone()
    spoiled[1, 2, 1] = value
    _same_kinds("sinkhorn", spoiled, **form)
    _same_kinds("sinkhorn_backward", gradient, spoiled, **form)
    gradient[1, 2, 1] = value
    _same_kinds("sinkhorn_backward", gradient, logits, **form)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("mode", RMS_MODES)
@pytest.mark.parametrize("spoiled", ["h", "ms", "scale", "bias"])
def test_scale(mode: str, spoiled: str) -> None:
    torch.manual_seed(0)
    rows = 2 * N + N * N
    given = {"h": torch.randn(3, rows), "ms": torch.rand(3), "scale": torch.ones(3), "bias": torch.zeros(rows)}
    given[spoiled].view(-1)[1] = math.nan
    _same_kinds("scale", *given.values(), N, rms_mode=mode)
