"""What stands between the parts of a hyper-connection: nothing may move past it, and nothing may be lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import passes
from mhc_compile.passes.report import Report
from tests.passes.dynamo import graph_of
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N, C = 4, 8


def sinkhorn(logits: Tensor) -> Tensor:
    p = logits.softmax(-1) + 1e-6
    p = p / (p.sum(-2, keepdim=True) + 1e-6)
    for _ in range(4):
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    return p


class Layer(nn.Module):
    """A sublayer whose middle, between reading and writing the streams, is for the tests to fill."""

    def __init__(self) -> None:
        super().__init__()
        rows = N * N + 2 * N
        self.phi = nn.Parameter(torch.randn(rows, N * C) * (N * C) ** -0.5)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.bias = nn.Parameter(torch.randn(rows))
        self.weight = nn.Parameter(torch.randn(C, C) * C**-0.5)

    def project(self, x: Tensor) -> Tensor:
        flat = x.flatten(-2).float()
        return F.linear(flat, self.phi.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)

    def pre(self, h: Tensor) -> Tensor:
        return torch.sigmoid(h[..., :N] * self.scale[0] + self.bias[:N]) + 1e-6

    def post(self, h: Tensor) -> Tensor:
        return 2 * torch.sigmoid(h[..., N : 2 * N] * self.scale[1] + self.bias[N : 2 * N])

    def logits(self, h: Tensor) -> Tensor:
        return (h[..., 2 * N :] * self.scale[2] + self.bias[2 * N :]).unflatten(-1, (N, N))

    def read(self, pre: Tensor, x: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * x).sum(-2)

    def write(self, f: Tensor, post: Tensor, x: Tensor, res: Tensor) -> Tensor:
        return post.unsqueeze(-1) * f.unsqueeze(-2) + res.transpose(-1, -2) @ x

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        return self.write(f, self.post(h), x, sinkhorn(self.logits(h)))


class StreamsFirst(Layer):
    """The streams are the first factor where they are read."""

    def read(self, pre: Tensor, x: Tensor) -> Tensor:
        return (x * pre.unsqueeze(-1)).sum(-2)


class WriteBetween(Layer):
    """An operand of h_post is computed after a write into the buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        self.buffer.add_(5.0)
        bias = torch.exp(self.buffer * 0.1) * self.bias[N : 2 * N].detach()
        post = 2 * torch.sigmoid(h[..., N : 2 * N] * self.scale[1] + bias)
        return self.write(f, post, x, sinkhorn(self.logits(h)))


class WriteInVmapBetween(Layer):
    """A bias of h_post is written inside torch.vmap after the read."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        bias = self.bias[N : 2 * N].detach() * 1.0
        f = torch.tanh(self.read(torch.sigmoid(h[..., :N] + bias), x) @ self.weight)
        torch.vmap(torch.vmap(lambda b: b.mul_(5.0)))(bias.view(2, N // 2))
        post = 2 * torch.sigmoid(h[..., N : 2 * N] * self.scale[1] + bias)
        return self.write(f, post, x, sinkhorn(self.logits(h)))


class GradModeBetween(Layer):
    """A product of parameters, computed with gradients, stands between two stretches without."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.project(x)
            u = self.read(self.pre(h), x)
        bias = self.bias[N : 2 * N] * 3.0
        with torch.no_grad():
            res = sinkhorn(self.logits(h))
        post = 2 * torch.sigmoid(h[..., N : 2 * N] * self.scale[1] + bias)
        return self.write(torch.tanh(u @ self.weight), post, x, res)


class AutocastBetween(Layer):
    """A parameter of h_post is computed in bfloat16, by autocast, between the parts."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        with torch.autocast("cpu", torch.bfloat16):
            bias = (self.bias[N : 2 * N].view(1, N) @ self.weight[:N, :N]).view(N)
        post = 2 * torch.sigmoid(h[..., N : 2 * N] * self.scale[1] + bias)
        return self.write(f, post, x, sinkhorn(self.logits(h)))


class GatesWritten(Layer):
    """The gates are bfloat16 tensors of their own, changed in place before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        post, res = self.post(h).bfloat16().float(), sinkhorn(self.logits(h))
        post.view(-1).mul_(0.25)
        res.mul_(2.0)
        return self.write(f, post, x, res)


class LogitsClamped(Layer):
    """A clamp that shows only at logits beyond 100."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        logits = (self.logits(h) * 100).clamp(-100, 100)
        return self.write(f, self.post(h), x, sinkhorn(logits))


class SizeAsNumber(Layer):
    """A gate that depends on the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x) @ self.weight)
        return self.write(f, x.shape[1] * torch.sigmoid(h[..., N : 2 * N]), x, sinkhorn(self.logits(h)))


def _run(model: nn.Module, x: Tensor, backend: Callable[..., Any] | None, **options: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    call = model if backend is None else torch.compile(model, backend=backend, **options)
    out = call(x)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach()} | grads


class _Rewrite:
    def __init__(self) -> None:
        self.report = Report()

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.report.add(passes.run_recursively(gm))
        return gm.forward


@pytest.mark.parametrize(
    "kind",
    [
        *(Layer, WriteBetween, WriteInVmapBetween, GradModeBetween, AutocastBetween, GatesWritten, LogitsClamped),
        SizeAsNumber,
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_are_eagers(kind: type[Layer], dynamic: bool) -> None:
    model, rewrite = kind(), _Rewrite()
    for tokens in (5, 7):
        x = torch.randn(2, tokens, N, C)
        eager, got = _run(model, x, None), _run(model, x, rewrite, dynamic=dynamic)
        assert got.keys() == eager.keys()
        for name, want in eager.items():
            # two float32 evaluations of the same sums
            torch.testing.assert_close(got[name], want, rtol=2e-4, atol=2e-5 * float(want.abs().max()), msg=name)
    assert rewrite.report.errors == []
    if kind is Layer:
        assert rewrite.report.declined == []
        assert {site.op for site in rewrite.report.rewritten} == {"generate_mix_and_aggregate", "expand_combine"}


def test_a_write_between_costs_the_site_that_would_move_past_it() -> None:
    """Those of the layers before it and after it are rewritten."""
    model, rewrite = nn.Sequential(Layer(), WriteBetween(), Layer()), _Rewrite()
    torch.compile(model, backend=rewrite)(torch.randn(2, 5, N, C))
    report = rewrite.report
    assert len(report.rewritten) == 5
    (site,) = report.declined
    assert site.module == "1"
    assert "after an operation that writes in place" in str(site.reason)


class Dropped(Layer):
    """Its dropout drops nothing, and so is a name of the streams."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.0))


@pytest.mark.parametrize(("kind", "kept"), [(Layer, []), (StreamsFirst, []), (Dropped, [F.dropout])])
def test_nothing_is_left_that_nothing_reads(kind: type[Layer], kept: list[Any]) -> None:
    """But what may draw random numbers is: later ones are others without it."""
    modules: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: object) -> Callable[..., Any]:
        assert len(passes.run_recursively(module).rewritten) == 2
        modules.append(module)
        return module.forward

    torch.compile(kind(), backend=backend)(torch.randn(2, 5, N, C))
    (module,) = modules
    assert [node.target for node in module.graph.nodes if not node.users and node.op != "output"] == kept


class ReadAndWritten(Layer):
    def forward(self, x: Tensor) -> Any:
        h = self.project(x)
        f = torch.tanh(self.read(self.pre(h), x))
        return f, self.write(f, self.post(h), x, sinkhorn(self.logits(h)))


def test_a_write_that_nothing_reads_is_not_told() -> None:
    """Dynamo leaves no such code, but other passes may."""
    module = graph_of(ReadAndWritten(), torch.randn(2, 5, N, C))
    output = module.graph.output_node()
    output.args = (output.args[0][:1],)  # type: ignore[index]
    assert [site.op for site in passes.run_recursively(module).rewritten] == ["generate_mix_and_aggregate"]


class _Amp(Sublayer):
    """Mixed precision as it is written: whatever is large in bfloat16, Sinkhorn in an island without autocast."""

    def res(self, logits: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().res(logits.float())

    def body(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().body(x).float()


class _AmpLayer(Sublayer):
    """Autocast around the sublayer alone, which ends in a linear layer with a bias."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.linear = nn.Linear(C, C)

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(layer_input)


class _FrozenLayer(_AmpLayer):
    """Without gradients for the layer: h_post times its bias, seen apart, would give the bias one."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.linear(layer_input)


@pytest.mark.parametrize("kind", [_Amp, _AmpLayer, _FrozenLayer])
def test_what_is_switched_on_and_off_inside(kind: type[Sublayer]) -> None:
    outcome = check.run(kind(N, C, 3, 2), (torch.randn(2, 3, N, C),), repeats=2)
    check.assert_as_accurate(outcome)
    assert outcome.report.declined == [], str(outcome.report)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"]


class _WeightsTogether(Sublayer):
    """phi is put together for each call from what is kept apart."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.parts = nn.ParameterList(part.detach().clone() for part in self.phi.split([N, N, N * N]))

    def project(self, flat: Tensor) -> Tensor:
        return F.linear(flat, torch.cat(list(self.parts)))


def test_a_projection_by_weights_put_together_is_one() -> None:
    """Its first rows are a projection by the first weight as well, and would be missed among those of the whole."""
    outcome = check.run(_WeightsTogether(N, C, 3, 2), (torch.randn(2, 3, N, C),), exact=False)
    check.assert_equal_to_eager(outcome)
    assert outcome.report.declined == [], str(outcome.report)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"]


def test_parameters_are_folded_in_float32() -> None:
    """bfloat16 parameters that the program multiplies and adds into float32 one by one keep that precision."""

    class Folded(Layer):
        def pre(self, h: Tensor) -> Tensor:
            return torch.sigmoid(h[..., :N] * self.scale[0] * self.scale[1] + self.bias[:N] + self.bias[N : 2 * N])

    model = Folded().bfloat16()
    x, rewrite = torch.randn(2, 5, N, C), _Rewrite()
    model.weight.data = model.weight.data.float()
    model.weight = nn.Parameter(model.weight.data)
    eager, got = _run(model, x, None), _run(model, x, rewrite)
    assert len(rewrite.report.rewritten) == 2
    # bfloat16 arithmetic would be off by 4e-3; these are float32 roundings
    torch.testing.assert_close(got["out"], eager["out"], rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    rewrite = _Rewrite()
    out = torch.compile(Layer(), backend=rewrite)(torch.randn(0, 3, N, C))
    assert out.shape == (0, 3, N, C)
    assert rewrite.report.errors == []


class _KeepsTheRest(Sublayer):
    """What is left of the tokens after whole chunks is returned: logits, gates and matrices without elements."""

    def forward(self, x: Tensor) -> Any:
        logits = self.logits(self.split(self.mixes(x)))
        h_pre, h_post, h_res = self.pre(logits[0]), self.post(logits[1]), self.res(logits[2])
        rest = slice(x.shape[1] // 3 * 3, None)
        layer_input = self.read(x, h_pre)
        out = self.write(x, self.layer(layer_input, x), h_post, h_res)
        empty = [value[:, rest] for value in (*logits, h_pre, h_post, h_res, layer_input, out, x)]
        return out, empty, self.read(x[:, rest], h_pre[:, rest]), self.res(h_res[:, rest])


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_without_elements(dynamic: bool) -> None:
    outcome = check.run(_KeepsTheRest(N, C, 3, 2), (torch.randn(2, 3, N, C),), exact=False, dynamic=dynamic)
    check.assert_equal_to_eager(outcome)
    assert outcome.report.errors == []
    assert outcome.report.declined == [], str(outcome.report)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"]


class _SumsNothing(Sublayer):
    """A sum over what is left of rows of one, which are no streams."""

    def forward(self, x: Tensor) -> Any:
        rest = x.flatten(1).square().mean(-1, keepdim=True).tensor_split(2, -1)[1]
        return super().forward(x), rest.sum(), rest.sum(-1)


def test_a_sum_without_elements() -> None:
    outcome = check.run(_SumsNothing(N, C, 3, 2), (torch.randn(2, 3, N, C),), exact=False)
    check.assert_equal_to_eager(outcome)
    assert outcome.report.errors == []
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"]


class _WritesLater(Sublayer):
    """The norm and the weighted sum keep copies of the transposed streams, so eager code may write into these."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x * self.per_channel).to(x.dtype)
        streams = x.transpose(1, 2)
        flat = x.transpose(1, 2).flatten(-2)
        h = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), self.phi[: 2 * N])
        pre = torch.sigmoid(h[..., :N] * self.scale[0] + self.bias[:N])
        post = torch.sigmoid(h[..., N:] * self.scale[1] + self.bias[N : 2 * N])
        f = self.layer(torch.einsum("...n,...nc->...c", pre, streams), x)
        with torch.no_grad():
            streams.add_(0.125)
        return (post.unsqueeze(-1) * f.unsqueeze(-2) + streams).transpose(1, 2)


class _WidensTheSum(Sublayer):
    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        return layer_input.double().mul(1.25).to(x.dtype)


def test_streams_that_are_written_to_later_stay_eager() -> None:
    outcome = check.run(_WritesLater(N, C, 3, 2), (torch.randn(2, N, 3, C),))
    check.assert_as_accurate(outcome)
    assert any("that the backward pass needs" in str(site.reason) for site in outcome.report.declined), str(
        outcome.report
    )


def test_a_cast_to_float64_is_not_part_of_an_operator() -> None:
    outcome = check.run(_WidensTheSum(N, C, 3, 2), (torch.randn(2, 3, N, C),))
    check.assert_as_accurate(outcome)
    assert outcome.operators


class _WrittenBeforeCast(Layer):
    """Streams, the sublayer's output or a gate change after the sums in float32 and before these are cast.

    The operators return bfloat16, and so stand where the casts are.
    """

    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.change = write

    def forward(self, x: Tensor) -> Tensor:
        pre, post, res = self.bias[:N], self.bias[N : 2 * N], self.bias[2 * N :].view(N, N)
        kept = x.clone()
        u = self.read(pre, x)
        self.change(x, pre, u)
        f = torch.tanh(u.bfloat16().float() @ self.weight)
        new = self.write(f, post, kept, res)
        self.change(kept, post, f)
        return new.bfloat16()


@pytest.mark.parametrize(
    "write",
    [
        lambda x, gate, f: x.zero_(),
        lambda x, gate, f: x.detach()[:, 1:].mul_(2.0),
        lambda x, gate, f: x.flatten(-2).__setitem__(0, 1.0),
        lambda x, gate, f: torch.exp(x, out=x),
        lambda x, gate, f: gate.add_(1.0),
        lambda x, gate, f: x.unbind(-2)[0].copy_(f),
    ],
)
def test_a_write_before_the_cast_comes_after_the_sum(write: Callable[..., Any]) -> None:
    model, rewrite = _WrittenBeforeCast(write), _Rewrite()
    x = torch.randn(2, 3, N, C)
    with torch.no_grad():
        want = copy.deepcopy(model)(x.clone())
        got = torch.compile(model, backend=rewrite)(x.clone())
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-6)  # one rounding to bfloat16, and that of u before f
    assert not rewrite.report.errors
    assert any("writes in place into a tensor that the site uses" in str(s.reason) for s in rewrite.report.declined)


def test_a_write_elsewhere_before_the_cast_costs_nothing() -> None:
    model, rewrite = _WrittenBeforeCast(lambda x, gate, f: model.buffer.add_(1.0)), _Rewrite()
    model.register_buffer("buffer", torch.ones(()))
    with torch.no_grad():
        torch.compile(model, backend=rewrite)(torch.randn(2, 3, N, C))
    assert {site.op for site in rewrite.report.rewritten} == {"aggregate", "expand_combine"}, str(rewrite.report)


class _ParametersWritten(Layer):
    """Gates are views of a parameter, which changes in the end."""

    def forward(self, x: Tensor) -> Tensor:
        pre, post, res = self.bias[:N], self.bias[N : 2 * N], self.bias[2 * N :].view(N, N)
        new = self.write(torch.tanh(self.read(pre, x) @ self.weight), post, x, res)
        pre.add_(1.0)
        return new


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_that_change_without_gradients(mode: Callable[..., Any]) -> None:
    """Autograd forbids what computes with the views afterwards, and the examples of operators are made afterwards."""
    model, rewrite, x = _ParametersWritten(), _Rewrite(), torch.randn(2, 3, N, C)
    with mode():
        want = copy.deepcopy(model)(x)
        got = torch.compile(model, backend=rewrite)(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # two float32 evaluations of the same sums
    assert not rewrite.report.errors
    assert {site.op for site in rewrite.report.rewritten} == {"aggregate", "expand_combine"}, str(rewrite.report)
