"""Parameters that have no gradient in eager code have none: zeros would be a step for weight decay and momentum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import ops, passes
from mhc_compile.passes.lists import Lists
from mhc_compile.passes.shadow import trace
from tests.passes.dynamo import graph_of
from tests.zoo.check import rewriting

N, C = 4, 8


# What takes the layer's input for its shape, dtype or device alone.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "expand_as": lambda constant, u: constant.expand_as(u),
    "view_as": lambda constant, u: constant.expand(2, 3, C).contiguous().view_as(u),
    "reshape_as": lambda constant, u: constant.expand(2, 3, C).reshape_as(u),
    "type_as": lambda constant, u: constant.expand(2, 3, C).type_as(u),
    "to": lambda constant, u: constant.expand(2, 3, C).to(u),
    "size": lambda constant, u: constant.expand(u.shape),
    "new": lambda constant, u: constant * u.new_ones(u.shape),
    "like": lambda constant, u: constant + torch.zeros_like(u),
    "compared": lambda constant, u: torch.where(u > 0, constant, 2 * constant),
}


class Sublayer(nn.Module):
    """A connection whose gates have parameters of their own; `cut` says to which of them no gradient comes back."""

    def __init__(self, cut: str, apart: bool, norm: bool) -> None:
        super().__init__()
        self.cut, self.apart, self.norm = cut, apart, norm
        self.phi = nn.Parameter(torch.randn(24, N * C) * 0.1)
        self.parts = nn.ParameterList([torch.randn(k, N * C) * 0.1 for k in (N, N, N * N)])
        self.scales = nn.ParameterList([torch.ones(()) for _ in range(3)])
        self.biases = nn.ParameterList([torch.zeros(k) for k in (N, N, N * N)])
        self.gain = nn.Parameter(torch.ones(C))
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2)
        r = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        whole = (F.linear(flat, self.phi) * r).split([N, N, N * N], -1)
        h = [F.linear(flat, part) * r for part in self.parts] if self.apart else whole
        pre, post, res = (h[i] * self.scales[i] + self.biases[i] for i in range(3))
        m = res.unflatten(-1, (N, N)).softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        u = (pre.sigmoid().unsqueeze(-1) * x).sum(-2)
        if self.norm:
            u = F.rms_norm(u, (C,), self.gain, 1e-6)
        f, gate = self.layer(u), 2 * post.sigmoid()
        if self.cut == "detached layer":
            f = f.detach()
        elif self.cut == "layer without grad":
            with torch.no_grad():
                f = f * 1.0
        elif self.cut in SHAPES:
            f = SHAPES[self.cut](self.layer.bias, u)
        elif self.cut == "h_res":
            m = m.detach()
        elif self.cut == "all gates":
            f, gate, m = f.detach(), gate.detach(), m.detach()
        return gate.unsqueeze(-1) * f.unsqueeze(-2) + m.transpose(-1, -2) @ x


def _gradients(call: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x = torch.randn(2, 3, N, C, requires_grad=True)
    call(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()} | {"x": x.grad}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("cut", ["nowhere", "detached layer", "layer without grad", "h_res", "all gates", *SHAPES])
def test_what_has_no_gradient_has_none(cut: str, apart: bool, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "INPUT_NORMS", True)
    torch.manual_seed(0)
    model = Sublayer(cut, apart, norm)
    eager = _gradients(model, model)
    call, report = rewriting(model)
    found = _gradients(call, model)
    assert {name for name, value in found.items() if value is None} == {
        name for name, value in eager.items() if value is None
    }
    for name, value in eager.items():
        if value is not None:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    operators = {site.op for site in report.rewritten}
    assert "expand_combine" in operators
    if cut in ("nowhere", "all gates"):
        assert "generate_mix_and_aggregate" in operators
    if cut == "h_res":
        told = [str(site.reason) for site in report.declined]
        assert any("a gradient reaches h_pre and h_post, but not h_res," in reason for reason in told), told


def test_operators_give_none_where_no_output_is_used() -> None:
    x, f = torch.randn(3, N, C, requires_grad=True), torch.randn(3, C, requires_grad=True)
    parameters = [torch.randn(24, N * C, requires_grad=True), torch.ones(3), torch.zeros(24)]
    parameters = [p.detach().requires_grad_() for p in parameters]
    gain = torch.ones(C, requires_grad=True)
    u, post, res = ops.generate_mix_and_aggregate(x, *parameters, input_norm_weight=gain, input_norm_eps=1e-6)
    used = torch.autograd.grad(post.sum(), [x, *parameters, gain], allow_unused=True, retain_graph=True)
    assert [g is not None for g in used] == [True, True, True, True, False]
    assert all(g is not None for g in torch.autograd.grad(u.sum(), [x, *parameters, gain]))
    new = ops.boundary(f, None, post.detach(), x, res.detach(), *parameters)[0]
    used = torch.autograd.grad(new.sum(), [f, x, *parameters], allow_unused=True)
    assert [g is not None for g in used] == [True, True, False, False, False]


# torch's own decompositions for forward mode go through torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_program_that_takes_forward_derivatives_is_left_as_it_is() -> None:
    model = Sublayer("nothing", False, False)
    x = torch.randn(2, 3, N, C)

    def derive(x: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.func.jvp(model, (x,), (x.cos(),))
        return result

    program, report = rewriting(derive)
    with torch.no_grad():
        got, want = program(x), derive(x)
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager)
    assert not report.rewritten
    assert any("forward-mode derivatives are taken" in declined.reason for declined in report.declined)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("come_back", [False, True])
@pytest.mark.parametrize("take", ["grad", "vjp", "jacrev"])
def test_derivatives_within_a_program(take: str, come_back: bool) -> None:
    """Where gradients come back to them, as in a step of MAML, they would be second ones."""
    model = Sublayer("nothing", False, False)
    x = torch.randn(2, 3, N, C)

    def derive(x: Tensor) -> Tensor:
        if take == "grad":
            result = torch.func.grad(lambda x: model(x).square().sum())(x)
        elif take == "vjp":
            (result,) = torch.func.vjp(model, x)[1](x.cos())
        else:
            result = torch.func.jacrev(lambda x: model(x).sum((-1, -2)))(x)
        return result if come_back else result.detach()

    program, report = rewriting(derive)
    got, want = program(x), derive(x)
    torch.testing.assert_close(got, want)
    assert bool(report.rewritten) != come_back
    told = any("derivatives are taken within the program" in declined.reason for declined in report.declined)
    assert told == come_back
    if come_back:
        parameters = list(model.parameters())
        ours, eager = (torch.autograd.grad(y.square().sum(), parameters, materialize_grads=True) for y in (got, want))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("take", ["grad", "vjp", "jacrev"])
def test_derivatives_of_derivatives(take: str) -> None:
    """Also where no gradient comes back to the result."""
    model = Sublayer("nothing", False, False).requires_grad_(False)
    x = torch.randn(1, 2, N, C)

    def first(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: model(x).square().sum())(x)

    def derive(x: Tensor) -> Tensor:
        if take == "grad":
            return torch.func.grad(lambda x: first(x).square().sum())(x)
        if take == "vjp":
            (result,) = torch.func.vjp(first, x)[1](x.cos())
            return result
        return torch.func.jacrev(lambda x: first(x).sum((-1, -2)))(x)

    program, report = rewriting(derive)
    torch.testing.assert_close(program(x), derive(x), rtol=1e-3, atol=1e-4)
    assert not report.rewritten
    assert any("and differentiated again" in declined.reason for declined in report.declined)
    program, report = rewriting(lambda x: first(first(x)))
    torch.testing.assert_close(program(x), first(first(x)), rtol=1e-3, atol=1e-4)
    assert report.rewritten


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_scale_that_is_made_within_torch_func() -> None:
    """The tensors there are wrapped, and tensors that are made there are fake as well."""
    model = Sublayer("nothing", False, False)
    del model.scales
    model.scales = [1.0] * 3  # type: ignore[assignment]
    x = torch.randn(2, 3, N, C)
    program, report = rewriting(lambda x: torch.func.vjp(model, x)[0])
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    assert report.rewritten
    assert not report.errors


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_stack_that_is_made_without_gradients_has_none() -> None:
    """The last of the streams in the list is made under `no_grad`, and so is the stack of them, which stands there."""
    pre, post, res, start = torch.randn(N), torch.randn(N), torch.randn(N, N), torch.randn(N, C, requires_grad=True)

    def program(e: Tensor) -> Tensor:
        xs = [e * start[i] for i in range(N - 1)]
        with torch.no_grad():
            xs.append(e * start[N - 1])
            f = torch.tanh(sum(pre[i] * xs[i] for i in range(N)))  # type: ignore[arg-type]
            return torch.stack([post[o] * f + sum(res[o, i] * xs[i] for i in range(N)) for o in range(N)], -2)

    stacked = Lists(trace(graph_of(program, torch.randn(2, 3, C)).graph), []).graph()
    assert stacked is not None
    stacks = [node.meta["example_value"] for node in stacked.nodes if node.target is torch.stack]
    assert [stack.requires_grad for stack in stacks] == [False, False]
