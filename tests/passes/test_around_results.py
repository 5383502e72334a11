"""Results of a site that the program treats in its own way: under another grad mode, on another device, at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mhc_compile import passes
from mhc_compile.passes.report import Report
from tests.fuzz.functions import Noise
from tests.zoo.check import rewriting

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, C = 4, 8


def _gates(x: Tensor, phi: Tensor) -> tuple[Tensor, Tensor]:
    flat = x.flatten(-2)
    logits = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), phi)
    return torch.sigmoid(logits[..., :N]), torch.sigmoid(logits[..., N:])


def _read(x: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x).sum(-2)


def _write(x: Tensor, post: Tensor, f: Tensor) -> Tensor:
    return x + post.unsqueeze(-1) * f.unsqueeze(-2)


def _write_without_gradient(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
    pre, post = _gates(x, phi)
    f = _read(x, pre) @ w
    with torch.no_grad():
        y = _write(x, post, f)
    return y.to(torch.bfloat16) * (1 + x.mean())


def _read_without_gradient(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
    pre, post = _gates(x, phi)
    with torch.no_grad():
        u = _read(x, pre)
    return _write(x, post, (u.to(torch.bfloat16) @ w.bfloat16()).float())


def _all_without_gradient(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        pre, post = _gates(x, phi)
        y = _write(x, post, _read(x, pre) @ w)
    return y.to(torch.bfloat16) * (1 + w.mean())


def _arguments() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, N, C), (2 * N, N * C), (C, C))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("step", [_write_without_gradient, _read_without_gradient, _all_without_gradient])
def test_a_cast_after_no_grad(step: Callable[..., Tensor]) -> None:
    """The operator's result may be the cast one, but not where gradients begin with the cast."""

    def gradients(call: Callable[..., Tensor]) -> list[Tensor | None]:
        given = _arguments()
        return list(torch.autograd.grad(call(*given).float().sin().sum(), given, allow_unused=True))

    call, report = rewriting(step)
    found = gradients(call)
    assert report.rewritten
    for have, want in zip(found, gradients(step), strict=True):
        assert (have is None) == (want is None)
        if have is not None and want is not None:
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_move_to_another_device(dtype: torch.dtype) -> None:
    def step(x: Tensor, phi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        pre, post = _gates(x, phi)
        u = _read(x, pre)
        return u.to("meta", dtype), _write(x, post, u @ w).to("meta", dtype)

    call, _ = rewriting(step)
    assert [(value.device.type, value.dtype) for value in call(*_arguments())] == [("meta", dtype)] * 2


def test_a_move_of_streams_and_gates() -> None:
    def step(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
        pre, post = _gates(x, phi)
        u = _read(x, pre) @ w
        return _write(x.to("meta"), post.to("meta"), u.to("meta"))

    call, report = rewriting(step)
    assert call(*_arguments()).device.type == "meta"
    (left,) = report.declined
    assert left.reason == "this is computed on meta, but the streams that the sublayer read are on cpu"


def test_random_numbers_of_one_call_are_drawn_once() -> None:
    """A dropout of whole streams is a product with numbers that the program has not got."""

    def step(x: Tensor, post: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        d = F.dropout1d(x, 0.5)
        u = d.sum(-2)
        return _write(x, torch.sigmoid(x.flatten(-2) @ post), torch.tanh(u @ w)), d, u

    torch.manual_seed(0)
    call, _ = rewriting(step)
    _, d, u = call(torch.randn(6, N, C), torch.randn(N * C, N), torch.randn(C, C))
    torch.testing.assert_close(u, d.sum(-2))


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda x: x * torch.rand(x.shape),
    "operator": torch.ops.fuzz.noise,
    "operator without a tag": torch.ops.fuzz.untagged_noise,
    "autograd.Function": Noise.apply,
    "region": lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=False),
}


# Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("drawn", [True, False])
def test_random_numbers_are_drawn_in_order(kind: str, drawn: bool) -> None:
    """An operand that draws may not come before the sublayer, if that draws as well. Any other may."""
    noise = NOISES[kind]

    def step(x: Tensor, phi: Tensor, w: Tensor, b: Tensor) -> Tensor:
        flat = x.flatten(-2)
        logits = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), phi)
        f = torch.tanh(noise(_read(x, torch.sigmoid(logits[..., :N])) @ w))
        return _write(x, torch.sigmoid(logits[..., N:] + (noise(b) if drawn else b.exp())), f)

    given = [*_arguments(), torch.randn(N)]
    call, report = rewriting(step)
    with torch.set_grad_enabled("Function" in kind):
        torch.manual_seed(5)
        found = call(*given)
        torch.manual_seed(5)
        wanted = step(*given)
    torch.testing.assert_close(found, wanted)
    assert any("which may draw random numbers, as " in str(site.reason) for site in report.declined) == drawn
    assert bool(report.declined) == drawn
    assert report.rewritten


def test_what_needs_no_gradient_gets_none() -> None:
    """Of several results of an operator, one may be made of frozen parameters alone."""

    def step(x: Tensor, phi: Tensor, b_pre: Tensor, b_post: Tensor, w: Tensor) -> Any:
        flat = x.flatten(-2)
        logits = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), phi)
        u = _read(x, torch.sigmoid(logits[..., :N] + b_pre))
        return _write(x, torch.sigmoid(logits[..., N:] + b_post), torch.tanh(u @ w)), u

    torch.manual_seed(0)
    given = [torch.randn(2, 3, N, C), torch.randn(2 * N, N * C), torch.randn(N), torch.randn(N), torch.randn(C, C)]
    given[3].requires_grad_()
    call, report = rewriting(step)
    out, u = call(*given)
    assert report.rewritten
    assert out.requires_grad
    assert not u.requires_grad
    (found,) = torch.autograd.grad(out.sin().sum(), given[3])
    (wanted,) = torch.autograd.grad(step(*given)[0].sin().sum(), given[3])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_norm_of_zeros_is_zero() -> None:
    """A token of padding: programs ask for it, and its gradient is zero as in eager code."""

    def step(x: Tensor, phi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(-2)
        size = flat.norm(dim=-1, keepdim=True)
        logits = F.linear(flat, phi) / torch.where(size == 0, torch.ones_like(size), size)
        f = torch.tanh(_read(x, torch.sigmoid(logits[..., :N])) @ w)
        return _write(x, torch.softmax(logits[..., N:], -1), f), size

    given = _arguments()
    given[0].data[:, -1] = 0
    call, report = rewriting(step)
    out, size = call(*given)
    assert report.rewritten
    own, own_size = step(*given)
    assert torch.equal(size == 0, own_size == 0)
    found = torch.autograd.grad(out.sin().sum() + size.sum(), given)
    wanted = torch.autograd.grad(own.sin().sum() + own_size.sum(), given)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


class Stop(torch.autograd.Function):
    """The backward has no gradient for its input, and one for the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


@torch.library.custom_op("tests_around_results::stop", mutates_args=())
def stop(x: Tensor, y: Tensor) -> Tensor:
    """As `Stop`, of a library."""
    return x + y


stop.register_fake(torch.add)
stop.register_autograd(lambda ctx, gradient: (None, gradient.sum((0, 1))))


@pytest.mark.parametrize("last", [Stop.apply, stop])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_backward_that_returns_none(last: Callable[..., Tensor]) -> None:
    """The gate of the read has no gradient, and so its parameter has none, in place of zeros."""

    def step(x: Tensor, phi_pre: Tensor, phi_post: Tensor, w: Tensor, shift: Tensor) -> Tensor:
        flat = x.flatten(-2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        f = torch.tanh(_read(x, torch.sigmoid(F.linear(flat, phi_pre))) @ w)
        return _write(x, torch.sigmoid(F.linear(flat, phi_post)), last(f, shift))

    torch.manual_seed(0)
    shapes = ((2, 3, N, C), (N, N * C), (N, N * C), (C, C), (C,))
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    call, report = rewriting(step)
    found = torch.autograd.grad(call(*given).sin().sum(), given, allow_unused=True)
    wanted = torch.autograd.grad(step(*given).sin().sum(), given, allow_unused=True)
    assert report.rewritten
    assert (
        [value is None for value in found] == [value is None for value in wanted] == [False, True, False, True, False]
    )
    assert found[0] is not None
    assert wanted[0] is not None
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)


def test_squares_for_a_log() -> None:
    """A mean of squares of the new streams under no_grad, whose projection makes gates of the program's own."""

    def step(x: Tensor, phi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        pre, post = _gates(x, phi)
        x = _write(x, post, _read(x, pre) @ w)
        flat = x.flatten(-2)
        with torch.no_grad():
            size = flat.square().mean(-1)
        gate = torch.nn.functional.softplus(F.linear(flat, phi[:N])).sqrt()
        return _read(x, gate) @ w, size

    given = _arguments()
    call, report = rewriting(step)
    out, size = call(*given)
    own, own_size = step(*given)
    assert "projection" in [site.op for site in report.rewritten]
    assert not size.requires_grad
    torch.testing.assert_close(size, own_size)
    found = torch.autograd.grad(out.sin().sum(), given)
    wanted = torch.autograd.grad(own.sin().sum(), given)
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_streams_that_are_written_without_gradient() -> None:
    """No backward pass needs the streams that the new ones are copied over."""

    def step(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(2):
                pre, post = _gates(x, phi)
                x.copy_(_write(x, post, _read(x, pre) @ w))
        return x.mean(-2)

    x, phi, w = _arguments()
    call, report = rewriting(step)
    streams, own_streams = x.detach().clone(), x.detach().clone()
    out, own = call(streams, phi, w), step(own_streams, phi, w)
    assert len(report.rewritten) == 4
    assert not report.declined
    torch.testing.assert_close(out, own)
    torch.testing.assert_close(streams, own_streams)


def test_a_write_that_is_assigned_to_zeros() -> None:
    """Its one user has no result."""

    def step(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
        pre, post = _gates(x, phi)
        y = torch.zeros_like(x)
        y[...] = _write(x, post, torch.tanh(_read(x, pre) @ w))
        return y

    given = _arguments()
    call, report = rewriting(step)
    torch.testing.assert_close(call(*given), step(*given))
    assert not report.errors
    assert {site.op for site in report.rewritten} == {"generate_mix_and_aggregate", "expand_combine"}


@torch.library.custom_op("tests_around_results::pick", mutates_args=())
def pick(x: Tensor) -> Tensor:
    """As many tokens as the data says."""
    return x[x[:, 0] > 0]


@pick.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[1])


pick.register_autograd(
    lambda ctx, gradient: ctx.like.new_zeros(ctx.like.shape),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "like", inputs[0]),
)


def test_an_operator_whose_result_depends_on_data() -> None:
    """What its backward gives is looked at, and no size is left behind."""

    def step(x: Tensor, phi: Tensor, w: Tensor) -> Tensor:
        pre, post = _gates(x, phi)
        x = _write(x, post, torch.tanh(_read(x, pre) @ w))
        return pick(x.mean(-2).flatten(0, 1)).sum()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        report.add(passes.run_recursively(gm))
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    report, given = Report(), _arguments()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        out = torch.compile(step, backend=backend)(*given)
    assert len(report.rewritten) == 2
    torch.testing.assert_close(out, step(*given))
