"""Modules that only the name of their class tells: a line in the report, in place of silence, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_compile
from mhc_compile import StrictError, ops
from mhc_compile.passes.named import named_as
from mhc_compile.passes.report import MODULE, Report
from mhc_compile.testing import capture
from tests.passes.test_zoo import _build, _inputs
from tests.zoo import ZOO, check

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # After a graph break Dynamo looks at the .grad of the tensors that the second graph is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

N, C = 4, 32
SHAPE = (2, 5, N, C)


class ThreeMatrices(nn.Module):
    """x' = P (f + R A x)"""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.r, self.a = (nn.Parameter(torch.randn(N, N)) for _ in range(3))
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a @ x
        return self.p @ (self.layer(y.mean(-2)).unsqueeze(-2) + self.r @ y)


class SeveralInputs(nn.Module):
    """The rows of one product are the mixed streams, and inputs of a sublayer that takes them together."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(C, N + 2), nn.Parameter(torch.randn(N))
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        both = self.alpha(x).tanh().mT @ x
        f = torch.relu(self.layer(both[..., :2, :])).sum(-2)
        return both[..., 2:, :] + self.beta.unsqueeze(-1) * f.unsqueeze(-2)


class Normalised(nn.Module):
    """An nGPT with streams and static gates, one of which is for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write, self.channels = (nn.Parameter(torch.randn(size)) for size in (N, N, C))
        self.layer = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        f = self.layer((self.read.unsqueeze(-1) * x).sum(-2))
        return F.normalize(x + self.write.unsqueeze(-1) * self.channels * (f.unsqueeze(-2) - x), dim=-1)


FORMS = [ThreeMatrices, SeveralInputs, Normalised]


def _called(name: str, form: type[nn.Module]) -> nn.Module:
    """The module, with another name for its class."""
    module = form()
    module.__class__ = type(name, (type(module),), {})
    return module


@pytest.mark.parametrize(
    "name",
    [
        *("HyperConnection", "HyperConnections", "Hyperconnection", "DynamicHyperConnectionBlock", "hyper_conn"),
        *("ManifoldConstrainedHyperConnections", "HyperConnLayer", "mHC", "mHCv2", "MHCLayer", "HCHead", "my_hc"),
        *("DeepseekV4HyperConnection", "MultiStreamResidual", "multistream_residuals"),
    ],
)
def test_names_of_hyper_connections(name: str) -> None:
    assert named_as(type(name, (nn.Module,), {})) == name
    assert named_as(type("Mine", (type(name, (nn.Module,), {}),), {})) == f"Mine, a {name}"


@pytest.mark.parametrize(
    "name",
    [
        *("HyperNetwork", "HyperNet", "HypergraphConv", "HyperGraphConvolution", "Hyperconv", "SkipConnection", "MHA"),
        *("HCACache", "NHCLayer", "Hcp", "SHCell", "Watchdog", "MultiStreamEncoder", "ResidualStream"),
        *("TwoStreamResidual", "Hyper", "Connection", "ConnectionHyper", "Residual", "Module"),
    ],
)
def test_names_of_others(name: str) -> None:
    assert named_as(type(name, (nn.Module,), {})) == ""


@pytest.mark.parametrize("form", FORMS)
def test_a_named_module_has_a_line(form: type[nn.Module]) -> None:
    model = nn.Sequential(*(_called("HyperConnection", form) for _ in range(3)))
    for module in model:
        module.__class__ = type(model[0])
    report = mhc_compile.explain(model, torch.randn(SHAPE))
    assert [(site.op, site.module) for site in report.declined] == [(MODULE, str(i)) for i in range(3)]
    assert report.sites == report.declined
    lines = str(report).splitlines()
    assert lines[1].startswith("  declined: 3 x module (0 and 2 others) at ")
    assert lines[1].partition("  declined")[2].split(" at ")[1].startswith("tests/passes/test_named.py:")
    assert lines[2].strip().startswith("its class is HyperConnection, ")
    assert len(lines) == 3
    graph = str(capture(model, torch.randn(SHAPE), allow_empty=True))
    assert not any(name in graph for name in ("aggregate", "expand_combine", "mix_streams", "projection"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["HyperNetwork", "GraphPooling"])
def test_without_the_name_nothing_is_said(form: type[nn.Module], name: str) -> None:
    """Otherwise structure told the form, and the name would not be needed."""
    report = mhc_compile.explain(nn.Sequential(_called(name, form)), torch.randn(SHAPE))
    assert not report.sites, str(report)


@pytest.mark.parametrize("compile_it", [lambda model: model, lambda model: model.forward])
def test_the_compiled_module_itself(compile_it: Callable[[nn.Module], Any]) -> None:
    report = mhc_compile.explain(compile_it(_called("mHC", ThreeMatrices)), torch.randn(SHAPE))
    assert [(site.op, site.module) for site in report.sites] == [(MODULE, "")]
    assert "declined: module (the compiled one) at " in str(report)


def test_a_function_says_nothing() -> None:
    """A name is that of a class. This is written in the page about limits."""
    module = ThreeMatrices()

    def hyper_connection(x: Tensor) -> Tensor:
        return module.p @ (module.r @ x + x.mean(-2, keepdim=True))

    assert not mhc_compile.explain(hyper_connection, torch.randn(SHAPE)).sites


class HyperConnectionSinkhorn(nn.Module):
    """Its products are of matrices alone."""

    def forward(self, logits: Tensor) -> Tensor:
        m = logits.exp()
        return m @ m.mT @ m


class HyperConnectionSums(nn.Module):
    """Streams are made of a vector, and put together again."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-2).unsqueeze(-2).expand(SHAPE) * x.square().mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "shape"), [(HyperConnectionSinkhorn(), (2, 5, N, N)), (HyperConnectionSums(), SHAPE)]
)
def test_small_code_and_sums_say_nothing(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert not mhc_compile.explain(nn.Sequential(model), torch.randn(shape)).sites


class HyperConnectionGates(nn.Module):
    """Gates of products of the streams with each other, which are no operator's."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alike = (x @ x.mT).tanh()
        return alike.mean(-1), alike.amax(-1), alike.cos()


class Around(nn.Module):
    """The connection, whose gates another module makes."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.gates, self.layer, self.broken = HyperConnectionGates(), nn.Linear(C, C), broken

    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post, h_res = self.gates(x)
        if self.broken:
            torch._dynamo.graph_break()
        f = self.layer((h_pre.unsqueeze(-1) * x).sum(-2))
        return h_post.sigmoid().unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


class CallsOperators(Around):
    def forward(self, x: Tensor) -> Tensor:
        h_pre, h_post, h_res = self.gates(x)
        f = self.layer(ops.aggregate(x, h_pre))
        return ops.expand_combine(f=f, layer_bias=None, h_post=h_post, x=x, h_res=h_res)


class HyperConnectionPart(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.broken, self.matrix = Around(), broken, nn.Parameter(torch.randn(N, N))

    def forward(self, x: Tensor) -> Tensor:
        x = self.matrix @ x.tanh()
        if self.broken:
            torch._dynamo.graph_break()
        return self.inner(x.cos())


@pytest.mark.parametrize(
    "model",
    [
        Around(),
        Around(broken=True),
        HyperConnectionPart(broken=False),
        HyperConnectionPart(broken=True),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_parts_of_a_connection_say_nothing(model: nn.Module, nested: bool) -> None:
    """Other code of the connection has its line, in whatever graph."""
    report = mhc_compile.explain(nn.Sequential(model) if nested else model, torch.randn(SHAPE))
    assert report.rewritten == report.sites


class HyperConnectionAfter(nn.Module):
    """Its own code reads what a connection inside it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.matrix = Around(), nn.Parameter(torch.randn(N, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix @ self.inner(x.sin()).tanh()


@pytest.mark.parametrize("model", [HyperConnectionAfter(), nn.Sequential(Around(), HyperConnectionAfter())])
def test_a_module_with_a_connection_inside_says_nothing(model: nn.Module) -> None:
    """The graph's own report has no line that later ones would leave out."""
    program, report = check.rewriting(nn.Sequential(model))
    program(torch.randn(SHAPE))
    assert report.rewritten
    assert report.rewritten == report.sites, str(report)


@pytest.mark.parametrize("nested", [False, True])
def test_parts_beside_operators_that_the_program_calls_say_nothing(nested: bool) -> None:
    model = CallsOperators()
    report = mhc_compile.explain(nn.Sequential(model) if nested else model, torch.randn(SHAPE))
    assert len(report.called) == 2
    assert not report.sites, str(report)


class Caller(nn.Module):
    """It completes the second of two connections itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _called("HyperConnection", SeveralInputs), Around()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h_pre, h_post, h_res = self.second.gates(x)
        f = self.second.layer((h_pre.unsqueeze(-1) * x).sum(-2))
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


def test_a_connection_before_another_has_its_line() -> None:
    """What the caller rewrites is made of the second one's gates, whose streams come from the first."""
    report = mhc_compile.explain(nn.Sequential(Caller()), torch.randn(SHAPE))
    assert [(site.op, site.module) for site in report.declined] == [(MODULE, "0.first")]
    assert {site.module for site in report.rewritten} == {"0"}


def test_gates_alone_have_a_line() -> None:
    """So it is the connection around them for which the test above finds none."""
    report = mhc_compile.explain(HyperConnectionGates(), torch.randn(SHAPE))
    assert [site.op for site in report.sites] == [MODULE]


def test_beside_connections_that_are_rewritten() -> None:
    """Some layers of a model may have a form that structure tells, and others not."""
    plain = mhc_compile.nn.HyperConnection(nn.Linear(C, C), dim=C)
    report = mhc_compile.explain(nn.Sequential(plain, _called("HyperConnection", SeveralInputs)), torch.randn(SHAPE))
    assert [(site.op, site.module) for site in report.declined] == [(MODULE, "1")]
    assert {site.module for site in report.rewritten} == {"0"}


@pytest.mark.parametrize("name", ZOO)
def test_modules_of_rewritten_models_have_no_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the names of their classes are."""
    named = sys.modules["mhc_compile.passes.named"]
    monkeypatch.setattr(named, "_is_named", lambda name: name not in ("Module", "object"))
    named_as.cache_clear()
    try:
        report = mhc_compile.explain(_build(name), _inputs())
    finally:
        named_as.cache_clear()
    assert report.rewritten
    assert all(site.op != MODULE for site in report.sites), str(report)


class ListOfTensors(nn.Module):
    """Learned numbers scale the tensors of a list, which no code puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(N)), nn.Linear(C, C)

    def forward(self, *streams: Tensor) -> Any:
        return self.layer(sum(a * x for a, x in zip(self.scale, streams, strict=True)))


class ListOfTensorsByToken(ListOfTensors):
    def forward(self, *streams: Tensor) -> Any:
        total = streams[0].cos()
        for x in streams:
            total = total + torch.sigmoid(x.mean(-1, keepdim=True)) * x
        return total


class ListOfScaledResiduals(ListOfTensors):
    """Each tensor has a number of its own, and all get the same."""

    def forward(self, *streams: Tensor) -> Any:
        f = self.layer(streams[0])
        return [a * x + f for a, x in zip(self.scale, streams, strict=True)]


LISTS = [ListOfTensors, ListOfTensorsByToken, ListOfScaledResiduals]


@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_list_of_scaled_tensors_has_a_line(form: type[nn.Module], dynamic: bool) -> None:
    inputs = [torch.randn(2, 5, C) for _ in range(N)]
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        report = mhc_compile.explain(_called("HyperConnection", form), *inputs)
    assert [site.op for site in report.sites] == [MODULE], str(report)
    assert not mhc_compile.explain(_called("HyperNetwork", form), *inputs).sites


class OneStream(ListOfTensors):
    """An ordinary residual with two gates: each sublayer's output is made of what it is added to."""

    def forward(self, *streams: Tensor) -> Any:
        x = streams[0]
        for a, b in (self.scale[:2], self.scale[2:]):
            x = b * self.layer(x) + a * x
        return x


class TwoBranches(ListOfTensors):
    """The outputs of two sublayers beside a residual, which may come in from outside."""

    def forward(self, *streams: Tensor) -> Any:
        x, f = streams[:2]
        return self.scale[0] * x + self.scale[1] * f


class ScaledHeads(ListOfTensors):
    """Norms of queries, keys and values, which are not added."""

    def forward(self, *streams: Tensor) -> Any:
        q, k, v = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in streams[:3])
        return torch.softmax(q @ k.mT, -1) @ v


class SumOfSquares(ListOfTensors):
    """A norm of all tensors together. What is summed is no product with gates."""

    def forward(self, *streams: Tensor) -> Any:
        x = torch.stack(streams, -2)
        return x * torch.rsqrt((x * x).sum(-2, keepdim=True) + 1e-6)


class ScaledChannels(ListOfTensors):
    """A number for each channel, as the weight of a norm has."""

    def forward(self, *streams: Tensor) -> Any:
        return sum(self.layer.bias * x for x in streams)


@pytest.mark.parametrize("form", [OneStream, TwoBranches, ScaledHeads, SumOfSquares, ScaledChannels])
def test_other_scaled_tensors_say_nothing(form: type[nn.Module]) -> None:
    inputs = [torch.randn(2, 40, C) for _ in range(N)]
    report = mhc_compile.explain(_called("HyperConnection", form), *inputs)
    assert not report.sites, str(report)


def test_strict_options_raise_for_it() -> None:
    model = nn.Sequential(_called("HyperConnection", ThreeMatrices))
    (site,) = mhc_compile.explain(model, torch.randn(SHAPE)).sites
    with pytest.raises(StrictError, match=r"raises: module at \S+test_named.py:\d+ is declined \(its class is Hyper"):
        torch.compile(model, backend="mhc", options={"mhc.strict": True})(torch.randn(SHAPE))
    torch._dynamo.reset()
    accepted = {"mhc.strict": True, "mhc.skip": [str(site.location)]}
    torch.compile(model, backend="mhc", options=accepted)(torch.randn(SHAPE))
    assert mhc_compile.report().sites == [site]
    assert not mhc_compile.report().idle


@pytest.mark.usefixtures("fresh_cache")
def test_a_cached_graph_has_the_line() -> None:
    told: list[list[Any]] = []
    for cached in (0, 1):
        torch._dynamo.reset()
        torch.compile(nn.Sequential(_called("HyperConnection", ThreeMatrices)), backend="mhc")(torch.randn(SHAPE))
        report = mhc_compile.report()
        assert report.cached == cached
        told.append(report.sites)
    assert told[0] == told[1]
    assert [site.op for site in told[0]] == [MODULE]


def test_the_line_is_stored_and_on_the_page(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mhc_compile"):
        report = mhc_compile.explain(nn.Sequential(_called("HyperConnection", Normalised)), torch.randn(SHAPE))
    assert "declined: module (0) at " in caplog.text
    assert Report.from_dict(report.as_dict()).sites == report.sites
    page = report.html()
    assert "its class is HyperConnection, but none of its code was recognised" in page
