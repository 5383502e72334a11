"""The RMS norm that reads a layer input: the operator takes it in, in every spelling, and no other norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from mhc_compile import compat, passes, records
from mhc_compile.testing import capture, graph_text
from tests.passes import fused
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "taken_in")

N, WIDTH = 2, 12


@pytest.fixture
def taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if norms were taken in wherever nobody says otherwise."""
    monkeypatch.setattr(passes, "INPUT_NORMS", True)


Norm = Callable[["Sublayer", Tensor], Any]


def _functional(self: Sublayer, u: Tensor) -> Tensor:
    return F.rms_norm(u, (WIDTH,), self.gain, 1e-5)


def _without_eps(self: Sublayer, u: Tensor) -> Tensor:
    return F.rms_norm(u, (WIDTH,), self.gain)


def _module(self: Sublayer, u: Tensor) -> Tensor:
    return self.norm(u)  # type: ignore[no-any-return]


def _llama(self: Sublayer, u: Tensor) -> Tensor:
    """Back in the model's dtype before the weight, as in HF's LlamaRMSNorm and DeepseekV4RMSNorm."""
    dtype = u.dtype
    u = u.to(torch.float32)
    variance = u.pow(2).mean(-1, keepdim=True)
    u = u * torch.rsqrt(variance + 1e-6)
    return self.gain * u.to(dtype)


def _gemma(self: Sublayer, u: Tensor) -> Tensor:
    wide = u.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + self.gain.float())).type_as(u)


def _divided(self: Sublayer, u: Tensor) -> Tensor:
    return u / torch.sqrt((u * u).sum(dim=-1, keepdim=True) / WIDTH + 1e-5) * self.gain


def _by_norm(self: Sublayer, u: Tensor) -> Tensor:
    return self.gain * (u * (u.norm(dim=-1, keepdim=True) ** 2 * WIDTH**-1 + 1e-3) ** -0.5)


def _flattened(self: Sublayer, u: Tensor) -> Tensor:
    flat = u.reshape(-1, WIDTH)
    return F.rms_norm(flat, (WIDTH,), self.gain, 1e-6).view(u.shape)


def _plain(self: Sublayer, u: Tensor) -> Tensor:
    return F.rms_norm(u, (WIDTH,), eps=1e-6)


SPELLINGS: dict[str, Norm] = {
    "F.rms_norm": _functional,
    "F.rms_norm without eps": _without_eps,
    "nn.RMSNorm": _module,
    "cast before the weight": _llama,
    "one more than the weight": _gemma,
    "divided by the root": _divided,
    "from the vector norm": _by_norm,
    "flattened": _flattened,
    "without a weight": _plain,
}


def _read_again(self: Sublayer, u: Tensor) -> Tensor:
    return _llama(self, u) + u


def _factor_read(self: Sublayer, u: Tensor) -> Tensor:
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6)
    return u * r * self.gain + r


def _of_another(self: Sublayer, u: Tensor) -> Tensor:
    return u * torch.rsqrt((2 * self.gain * u).square().mean(-1, keepdim=True) + 1e-6)


def _wrong_axis(self: Sublayer, u: Tensor) -> Tensor:
    return u * torch.rsqrt(u.square().mean(-2, keepdim=True) + 1e-6)


def _half_of_the_channels(self: Sublayer, u: Tensor) -> Tensor:
    half = u.unflatten(-1, (2, WIDTH // 2))
    return F.rms_norm(half, (WIDTH // 2,)).flatten(-2) * self.gain


def _layer_norm(self: Sublayer, u: Tensor) -> Tensor:
    return F.layer_norm(u, (WIDTH,), self.gain)


def _eps_outside(self: Sublayer, u: Tensor) -> Tensor:
    return u / (u.square().mean(-1, keepdim=True).sqrt() + 1e-3) * self.gain


def _scaled(self: Sublayer, u: Tensor) -> Tensor:
    """A constant in the middle of a norm could go into the weight; a norm of twice the size is none of ours."""
    return u * (2 * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6))


def _negated(self: Sublayer, u: Tensor) -> Tensor:
    return u * -torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6) * self.gain


def _detached(self: Sublayer, u: Tensor) -> Tensor:
    return u * torch.rsqrt(u.detach().square().mean(-1, keepdim=True) + 1e-6) * self.gain


def _detached_factor(self: Sublayer, u: Tensor) -> Tensor:
    return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-6).detach() * self.gain


def _without_gradient(self: Sublayer, u: Tensor) -> Tensor:
    with torch.no_grad():
        return _llama(self, u)


NEAR: dict[str, Norm] = {
    "the layer input is read again": _read_again,
    "the factor is read again": _factor_read,
    "the squares of something else": _of_another,
    "over the tokens": _wrong_axis,
    "over half of the channels": _half_of_the_channels,
    "a layer norm": _layer_norm,
    "eps outside the root": _eps_outside,
    "twice a norm": _scaled,
    "a negated norm": _negated,
    "the squares are detached": _detached,
    "the factor is detached": _detached_factor,
    "all of it without gradient": _without_gradient,
}
WITHOUT_WEIGHT = {"a weight of tokens": lambda self, u: _plain(self, u) * self.of_tokens}


class Sublayer(nn.Module):
    """Streams to streams with a norm of this spelling in front of the cheapest of layers."""

    def __init__(self, norm: Norm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.apply_norm = norm
        self.phi = random_phi(N * N + 2 * N, N * WIDTH)
        self.scale = random_parameter(3, mean=1.0, std=0.2)
        self.bias = random_parameter(N * N + 2 * N, std=0.5)
        self.gain = nn.Parameter(random_parameter(WIDTH, mean=1.0, std=0.3).detach().to(dtype))
        self.of_tokens = random_parameter(5, 1, mean=1.0, std=0.3)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5, dtype=dtype)
        self.weight = nn.Parameter(random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5).detach().to(dtype))

    def reads_with(self, logits: Tensor) -> Tensor:
        """The gates of the read."""
        return torch.sigmoid(logits)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        mixes = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), self.phi)
        pre, post, res = mixes.split([N, N, N * N], -1)
        h_pre = self.reads_with(pre * self.scale[0] + self.bias[:N])
        h_post = 2 * torch.sigmoid(post * self.scale[1] + self.bias[N : 2 * N])
        m = (res * self.scale[2] + self.bias[2 * N :]).unflatten(-1, (N, N)).softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        u = (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)
        f = torch.tanh(self.apply_norm(self, u) @ self.weight)
        return (h_post.unsqueeze(-1) * f.unsqueeze(-2) + m.transpose(-1, -2) @ x.float()).to(x.dtype)


class Softmax(Sublayer):
    """The gates of the read are the program's own."""

    def reads_with(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class Parameters(Sublayer):
    """The gates of the read are there before the streams are."""

    def reads_with(self, logits: Tensor) -> Tensor:
        return self.bias[:N].sin().expand_as(logits)


class Chain(nn.Module):
    def __init__(self, *norms: Norm, kind: type[Sublayer] = Sublayer) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(kind(norm) for norm in norms)

    def forward(self, x: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x = sublayer(x)
        return x


_READS = ("generate_mix_and_aggregate", "aggregate", "aggregate_and_norm")


def _details(outcome: check.Outcome) -> list[str]:
    return [site.detail for site in outcome.report.rewritten if site.op in _READS]


@pytest.mark.parametrize("kind", [Sublayer, Softmax])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_taken_into_the_operator(name: str, dtype: torch.dtype, kind: type[Sublayer]) -> None:
    torch.manual_seed(0)
    outcome = check.run(kind(SPELLINGS[name], dtype), [torch.randn(2, 5, N, WIDTH, dtype=dtype)])
    assert "input norm eps" in "".join(_details(outcome)), outcome.report
    assert ("aggregate_and_norm" in outcome.operators) == (kind is Softmax)
    check.assert_as_accurate(outcome)


@pytest.mark.parametrize("kind", [Sublayer, Softmax])
@pytest.mark.parametrize("name", [*NEAR, *WITHOUT_WEIGHT])
def test_left_alone(name: str, kind: type[Sublayer]) -> None:
    torch.manual_seed(0)
    outcome = check.run(kind((NEAR | WITHOUT_WEIGHT)[name]), [torch.randn(2, 5, N, WIDTH)])
    (detail,) = _details(outcome)
    # The norm in front of a weight of tokens is one.
    assert ("input norm" in detail) == (name in WITHOUT_WEIGHT)
    assert ("stays apart: something else reads the layer input" in detail) == name.endswith("is read again")
    apart = ["aggregate" if name in NEAR else "aggregate_and_norm", "expand_combine", "projection", "sinkhorn"]
    assert outcome.operators == (["expand_combine", "generate_mix_and_aggregate"] if kind is Sublayer else apart)
    check.assert_as_accurate(outcome)


def test_gates_that_are_there_before_the_streams() -> None:
    """Such a read becomes a part of the write, which leaves a norm of its result to the program. The first has none."""
    torch.manual_seed(0)
    model = Chain(_llama, _llama, kind=Parameters)
    program = fused.judge(model, [torch.randn(2, 5, N, WIDTH)])
    assert program.counts["shifted_boundary"] == 1
    first, second = (site for site in program.report.rewritten if site.op.startswith("aggregate"))
    assert (first.op, second.op) == ("aggregate_and_norm", "aggregate")
    assert "stays apart: h_pre is not made of these streams" in second.detail


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_own_reads_are_lowered(eps: float, caplog: pytest.LogCaptureFixture) -> None:
    """An eps that may be a default is handed on as any other."""
    model = Softmax(lambda self, u: F.rms_norm(u, (WIDTH,), self.gain, eps))
    compiled = torch.compile(model, backend="mhc", options={"mhc.fuse.input_norm": True})
    with torch.no_grad(), caplog.at_level("WARNING"):
        x = torch.randn(2, 5, N, WIDTH)
        torch.testing.assert_close(compiled(x), model(x))
    assert "not lowered" not in caplog.text


def test_returned_layer_input_stays() -> None:
    class Returning(Sublayer):
        def forward(self, x: Tensor) -> Any:
            seen = []

            def norm(self: Sublayer, u: Tensor) -> Tensor:
                seen.append(u)
                return _llama(self, u)

            self.apply_norm = norm
            return super().forward(x), *seen

    outcome = check.run(Returning(_llama), [torch.randn(2, 5, N, WIDTH)])
    assert "input norm" not in _details(outcome)[0]
    assert "stays apart: something else reads" in _details(outcome)[0]
    check.assert_as_accurate(outcome)


def test_frozen_weight_and_no_gradient() -> None:
    model = Sublayer(_llama)
    model.gain.requires_grad_(False)
    x = torch.randn(2, 5, N, WIDTH)
    for backward in (True, False):
        outcome = check.run(model, [x], backward=backward)
        assert "input norm" in _details(outcome)[0]
        check.assert_as_accurate(outcome)


def test_graph() -> None:
    text, _ = _captured(Sublayer(_llama))
    assert_expected_inline(
        text,
        """\
%0 = generate_mix_and_aggregate(x=f32[2, 5, 2, 12], phi=f32[8, 24], scale=f32[3], bias=f32[8],
    input_norm_weight=f32[12], sinkhorn_steps=1, input_norm_eps=1e-06)
%1 = expand_combine(f=f32[2, 5, 12](%0.0), h_post=%0.1, x=f32[2, 5, 2, 12], h_res=%0.2)
%2 = expand_combine_backward(d_x_new=f32[2, 5, 2, 12], f=f32[2, 5, 12](%0.0), h_post=%0.1, x=f32[2,
    5, 2, 12], h_res=%0.2, needs=[True, False, True, False, True])
%3 = generate_mix_and_aggregate_backward(d_layer_input=f32[2, 5, 12](%2.0, %0.0), d_h_post=%2.2,
    d_h_res=%2.4, x=f32[2, 5, 2, 12], phi=f32[8, 24], scale=f32[3], bias=f32[8], h=f32[2, 5,
    8](%0.3), ms=%0.4, input_norm_weight=f32[12], needs=[False, True, True, True, False, True],
    sinkhorn_steps=1, input_norm_eps=1e-06)
return %1, %3.1, %3.2, %3.3, %3.5, %0.0, %2.0""",
    )


def _captured(model: nn.Module) -> tuple[str, fused.Program]:
    program = fused.program(model)
    program.call(torch.randn(2, 5, N, WIDTH))
    return graph_text(program.graphs[0]), program


def test_gradients_of_own_reads_are_fused() -> None:
    """The gradient of the streams comes from what the norm reads, as if the norm were apart."""
    torch.manual_seed(0)
    model = Chain(_llama, _functional, _plain, kind=Softmax)
    program = fused.judge(model, [torch.randn(2, 5, N, WIDTH)])
    assert program.counts["combine_and_read"] == program.counts["combine_and_read_backward"] == 2
    text = graph_text(program.graphs[0])
    # The norm's backward is alone in all sublayers, and only the first one has streams that no write has made.
    assert text.count("aggregate_and_norm_backward(") == 3
    assert text.count("= aggregate_backward(") == 1


def test_own_reads_with_streams_computed_again() -> None:
    model = Chain(_llama, _functional, _llama, kind=Softmax)
    program = fused.program(model, layers=2)
    check.assert_as_accurate(check.compare(model, program.call, program.report, [torch.randn(2, 5, N, WIDTH)]))


def test_boundaries_take_the_norm_along() -> None:
    torch.manual_seed(0)
    model = Chain(_llama, _functional, _plain)
    program = fused.judge(model, [torch.randn(2, 5, N, WIDTH)])
    assert program.counts == {"accumulate": 3, "boundary": 2, "boundary_backward": 2}
    text = graph_text(program.graphs[0])
    assert text.count("input_norm_eps") == 6


def test_boundaries_with_streams_computed_again() -> None:
    model = Chain(_llama, _functional, _llama)
    program = fused.program(model, layers=2)
    check.assert_as_accurate(check.compare(model, program.call, program.report, [torch.randn(2, 5, N, WIDTH)]))
    assert program.counts["recompute"] == 1


def _shape_unpacked(self: Sublayer, u: Tensor) -> Tensor:
    batch, length, width = u.shape
    return _llama(self, u).reshape(batch, length, 3, width // 3).flatten(2)


def _shape_given(self: Sublayer, u: Tensor) -> Tensor:
    return F.rms_norm(u.reshape(-1, WIDTH), (WIDTH,), self.gain, 1e-5).view(u.size()) + torch.ones(u.shape)


@pytest.mark.parametrize("kind", [Sublayer, Softmax])
@pytest.mark.parametrize("norm", [_llama, _flattened, _shape_unpacked, _shape_given])
def test_any_number_of_tokens(norm: Norm, kind: type[Sublayer]) -> None:
    model = kind(norm)
    outcome = check.run(model, [torch.randn(3, 5, N, WIDTH)], dynamic=True)
    assert "input norm" in _details(outcome)[0]
    check.assert_as_accurate(outcome)


def test_eps_as_it_was_written() -> None:
    """Not as torch rounds it to float32 on the way, 9.999999747378752e-06."""
    text = str(capture(Chain(_functional), torch.randn(2, 5, N, WIDTH)))
    assert "input_norm_eps=1e-05" in text


def test_option() -> None:
    with pytest.raises(Exception, match=r"'mhc.fuse.input_norm' is 1; expected True, False or None"):
        torch.compile(torch.sin, backend="mhc", options={"mhc.fuse.input_norm": 1})(torch.zeros(2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [Sublayer, Softmax])
def test_where_nobody_says_so(device: str, kind: type[Sublayer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "INPUT_NORMS", None)
    model = Chain(_llama, _functional, kind=kind).to(device)
    outcome = check.run(model, [torch.randn(2, 5, N, WIDTH, device=device)])
    assert ("input norm" in "".join(_details(outcome))) == (device == "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("taken", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_compiled(taken: bool) -> None:
    """With Inductor, and with the option; results are those of eager code either way."""
    torch.manual_seed(0)
    model, x = Chain(_llama, _functional), torch.randn(2, 5, N, WIDTH)
    compiled = torch.compile(model, backend="mhc", options={"mhc.fuse.input_norm": taken})
    with compat.fresh_inductor_cache():  # a graph from the cache has no report
        fused.assert_same(check.evaluate(compiled, model, [x]), check.evaluate(model, model, [x]))
    assert ("input norm" in str(records.last())) == taken
