"""Streams that are equal, as after an embedding that is expanded: h_res has no effect, and its logits no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import records
from mhc_compile.testing import Errors, judge

WIDTH, TOKENS, RATE = 32, 128, 1e-3


class _First(nn.Module):
    """The first sublayer, with a Sinkhorn of plain exponentials and quotients without eps."""

    def __init__(self, n: int, iterations: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        rows = n * n + 2 * n
        # Without a bias, whose gradient Inductor alone sums less accurately than eager does.
        self.n, self.iterations, self.layer = n, iterations, nn.Linear(WIDTH, WIDTH, bias=False)
        self.phi = nn.Parameter(torch.randn(rows, n * WIDTH, generator=generator) * 0.05)
        self.scale = nn.Parameter(torch.rand(3, generator=generator) + 0.5)
        self.bias = nn.Parameter(torch.randn(rows, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        n = self.n
        x = x.unsqueeze(-2).expand(*x.shape[:-1], n, WIDTH)
        sizes = [n, n, n * n]
        parts = F.linear(F.rms_norm(x.flatten(-2), (n * WIDTH,)), self.phi).split(sizes, -1)
        pre, post, res = (h * s + b for h, s, b in zip(parts, self.scale, self.bias.split(sizes), strict=True))
        p = res.unflatten(-1, (n, n)).exp()
        for _ in range(self.iterations):
            p = p / p.sum(-1, keepdim=True)
            p = p / p.sum(-2, keepdim=True)
        y = self.layer((pre.sigmoid().unsqueeze(-1) * x).sum(-2))
        return (torch.matmul(p, x) + (2 * post.sigmoid()).unsqueeze(-1) * y.unsqueeze(-2)).mean(-2)


def _gradients(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (call(x) * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_and_steps(n: int) -> None:
    torch.manual_seed(0)
    model, wide = _First(n, 20), _First(n, 20).double()
    start: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    torch._dynamo.reset()
    records.forget()
    compiled = torch.compile(model, backend="mhc")
    inputs = [torch.randn(TOKENS, WIDTH) for _ in range(3)]
    compiled(inputs[0])
    report = records.report()
    assert any("no eps" in site.detail for site in report.rewritten), str(report)
    wide.load_state_dict(start)
    errors = Errors(), Errors()
    for x in inputs:
        exact = _gradients(wide, wide, x.double())
        for found, call in zip(errors, (model, compiled), strict=True):
            found.add(_gradients(call, model, x), exact)
    assert [numbers for _, numbers in errors[0].vanishing["phi"]] == [n * n * n * WIDTH] * 3
    assert [str(finding) for finding in judge(*errors, list(exact), "gradients") if not finding.ok] == []

    moves = []
    for call in (model, compiled):
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for x in inputs:
            _gradients(call, model, x)
            optimizer.step()
        moves.append((model.phi.detach() - start["phi"]).abs())
    assert moves[1][2 * n :].max() <= 10 * moves[0][2 * n :].max()
    assert moves[0][2 * n :].max() < 1e-3 * RATE
    torch.testing.assert_close(moves[1][: 2 * n], moves[0][: 2 * n], rtol=1e-2, atol=1e-2 * RATE)
