"""Which functions that Dynamo gives up on may hold hyper-connections: strict options raise for these alone."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhc_compile
from mhc_compile import backend, compat
from mhc_compile.passes.cut import can_hold
from mhc_compile.passes.report import function_at
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, C = 4, 16
STREAMS = (2, 3, N, C)


def broken(x: Tensor) -> Tensor:
    """Whoever calls this in a loop is given up."""
    for _ in range(2):
        x = x * 2
        torch._dynamo.graph_break()
    return x


def _phi(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@dataclass
class Parameters:
    phi: nn.Parameter


class Net(nn.Module):
    """A function of a module that has parameters and children."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run, self.name = run, "net"
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@dataclass(slots=True)
class Slots:
    phi: nn.Parameter


def _never(*given: Any) -> Any:
    raise AssertionError("a program's code runs while its objects are looked at")


class Computed(Mapping[str, Tensor]):
    """Its items are not stored."""

    __getitem__ = __iter__ = __len__ = _never


class Stored(Computed):
    def __init__(self, phi: nn.Parameter) -> None:
        self.parts = {"phi": phi}


class Dict(dict[str, Any]):
    __getitem__ = __iter__ = __len__ = values = items = _never


class List(list[Any]):
    __getitem__ = __iter__ = __len__ = _never


class Proxy:
    """Pretends to be of any class, and to have any attribute."""

    __getattr__ = _never
    __class__ = property(_never)


class Evasive:
    """It has no parameter."""

    __dict__ = property(_never)
    __getattr__ = _never


class Reticent(nn.Module):
    """Dynamo would ask it for its own."""

    parameters = named_parameters = named_buffers = named_children = children = buffers = _never

    def __init__(self) -> None:
        super().__init__()
        self.phi = PHI


class OfClass:
    phi = nn.Parameter(torch.randn(N * N + 2 * N, N * C))


class Property:
    """The function names the property alone."""

    def __init__(self) -> None:
        self.kept = PHI

    @property
    def phi(self) -> nn.Parameter:
        return self.kept


class OfMethod(nn.Module):
    """The function names the method alone, and the module has grandchildren."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.layer = PHI, nn.Sequential(nn.Sequential(nn.ReLU()))

    def phi(self) -> nn.Parameter:
        return self.kept


def parametrized() -> nn.Module:
    module = nn.Module()
    module.phi = nn.Parameter(torch.randn(PHI.shape))
    return nn.utils.parametrize.register_parametrization(module, "phi", nn.Identity())


class Shapeless(Tensor):
    shape = dtype = requires_grad = property(_never)
    __torch_function__ = classmethod(_never)


PHI = _phi(N * N + 2 * N, N * C)
HIDDEN = torch.randn(2, 3, N * C)


def _global(x: Tensor) -> Tensor:
    for _ in range(2):
        x = F.linear(x, PHI)[..., : N * C] @ x.new_ones(N * N + 2 * N, N * C)
        torch._dynamo.graph_break()
    return x


def _closure(phi: nn.Parameter) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.linear(x, phi) @ phi
            torch._dynamo.graph_break()
        return x

    return inner


def _attribute(parts: list[Parameters], x: Tensor) -> Tensor:
    for _ in range(2):
        x = F.linear(x, parts[0].phi) @ parts[0].phi
        torch._dynamo.graph_break()
    return x


def _write(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    for _ in range(2):
        x = h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res @ x
        torch._dynamo.graph_break()
    return x


def _any(x: Tensor, *others: Any) -> Tensor:
    for _ in range(2):
        x = x.sin()
        torch._dynamo.graph_break()
    return x


def _by_layer(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = self.layer(x)[..., :C].sum(-1, keepdim=True) + x
        torch._dynamo.graph_break()
    return x


def _by_layers(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer.connection.phi.sum() + x
        torch._dynamo.graph_break()
    return x


def _by_name(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + len(self.name)
        torch._dynamo.graph_break()
    return x


def _layers(*parts: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(parts)


X = torch.randn(STREAMS)
CAN: dict[str, tuple[Any, ...]] = {
    "a global phi": (_global, HIDDEN),
    "a phi of a closure": (_closure(PHI), HIDDEN),
    "a phi as an argument": (_any, HIDDEN, PHI),
    "a phi of an object in a list": (_attribute, [Parameters(PHI)], HIDDEN),
    "a phi the other way round": (_any, HIDDEN, _phi(N * C, 2 * N)),
    "a phi that is not learned": (_any, X, torch.randn(N * N + 2 * N, N * C)),
    "a phi of flat streams that is not learned": (_any, HIDDEN, torch.randn(2 * N, N * C)),
    "a phi for each channel": (_any, X, _phi(C, N + 1)),
    "a projection that is called": (Net(_by_layer, layer=nn.Linear(C, N)), X),
    "a projection in a module that is called": (Net(_by_layer, layer=nn.Sequential(nn.Linear(C, N))), X),
    "a phi of a layer in a list": (Net(_by_layers, layers=_layers(Net(_any, connection=Parameters(PHI)))), HIDDEN),
    "static gates": (_any, X, _phi(N)),
    "gates beside their streams": (_write, X, X[:, :, 0], X[..., 0], X[..., :N]),
    "a matrix beside its streams": (_any, X, X[..., :N]),
}
CANNOT: dict[str, tuple[Any, ...]] = {
    "a tensor": (_any, HIDDEN),
    "streams": (_any, X),
    "a loss": (_any, HIDDEN, _phi(128, N * C), torch.zeros(2, 3, dtype=torch.long)),
    "a mask": (_any, HIDDEN, torch.ones(2, 1, 3, 3)),
    "queries, keys and values": (_any, torch.randn(2, 8, 64, C), torch.randn(2, 2, 64, C), torch.randn(2, 1, 64, 64)),
    "experts": (_any, HIDDEN, _phi(4, 2 * C, N * C)),
    "a small matrix that is not learned": (_any, HIDDEN, torch.randn(N, N)),
    "a phi that is not named": (_any, HIDDEN, Parameters(PHI)),
    "integers": (_any, X, torch.ones(2, 3, N, dtype=torch.long)),
    "a model that is called": (Net(_by_layer, layer=nn.Sequential(nn.Sequential(Sublayer(N, C, 3, 2)))), X),
    "a model whose name alone is read": (
        Net(_by_name, head=nn.Linear(N * C, N), layers=_layers(nn.Linear(3, 3))),
        HIDDEN,
    ),
    "a wide module that is called": (Net(_by_layer, layer=nn.Linear(N * C, 128)), HIDDEN),
}


@pytest.mark.parametrize("case", [*CAN, *CANNOT])
def test_what_a_function_reaches(case: str) -> None:
    function, *given = (CAN | CANNOT)[case]
    report = mhc_compile.explain(function, *given)
    (site,) = report.unknown
    assert report.torn == [one for one in report.cut if one is not site or case in CAN]
    assert site.detail == ("not compiled" if case in CAN else "not compiled, cannot hold a site")
    assert ("Strict options accept it: it reaches neither" in (site.reason or "")) == (case in CANNOT)


def _reached(*given: Any) -> frozenset[compat.Reached] | None:
    def phi(*given: Any) -> Any:
        return given[0].phi

    frame = SimpleNamespace(f_code=phi.__code__, f_locals={"given": given}, f_globals={})
    return compat.reaching.reached(frame)


def test_no_code_of_the_program_runs() -> None:
    """It may draw random numbers, raise, or never end. None: strict options cannot know either."""
    phi = frozenset({compat.Reached(tuple(PHI.shape), True)})
    for known in (
        *(Stored(PHI), Dict(phi=PHI), List([PHI]), Slots(PHI), Reticent(), UserDict(a=PHI), UserList([PHI])),
        *(OrderedDict(a=PHI), defaultdict(_never, a=PHI), deque([PHI]), {"a": [(PHI,)]}, nn.ParameterList([PHI])),
        *(MappingProxyType({"a": PHI}), {"a": PHI}.values(), iter([PHI]), reversed([PHI]), map(_never, [PHI])),
        *(
            functools.partial(_never, PHI),
            (_never(one) for one in [PHI]),
            Property(),
            OfClass(),
            OfMethod(),
            parametrized(),
        ),
        Tensor._make_subclass(Shapeless, PHI.detach(), True),
    ):
        assert _reached(known) == phi, type(known)
    module = nn.Linear(2, 3)
    for unknown in (Computed(), Proxy(), weakref.proxy(module), nn.LazyLinear(3)):
        assert _reached(unknown) is None
    assert _reached(Evasive(), module.weight.dtype, range(3), Computed, iter([3])) == frozenset()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_shape_may_be_anything() -> None:
    assert _reached(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) is None


@pytest.mark.usefixtures("passes_only")
def test_strict_options_accept_another_librarys_function() -> None:
    """It is reported all the same."""
    model, target = Sublayer(N, 6, 3, 2), torch.randn(2, 3, N, 6)

    def loss(out: Tensor) -> Tensor:
        return broken((out - target).square().mean())

    compiled = torch.compile(lambda x: loss(model(x)), backend="mhc", options={"mhc.strict": True})
    with torch.no_grad():
        compiled(torch.randn(2, 3, N, 6))
    report = mhc_compile.report()
    assert len(report.rewritten) == len(report.sites) == 2
    assert [site.location.code for site in report.unknown] == ["broken"]
    assert "; 1 function not looked at\n" in str(report)
    assert "  not compiled, cannot hold a site: 1 x function at tests/test_given_up.py:" in str(report)


def test_a_program_that_is_too_large_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.reaching, "_MOST", 3)
    assert mhc_compile.explain(_any, HIDDEN, [[1], [2], [3]]).torn != []
    assert mhc_compile.explain(_any, HIDDEN, [1, 2, 3]).torn == []


def test_the_most_streams_that_operators_take() -> None:
    """One more, and no operator could have been there."""
    assert can_hold({compat.Reached((31,), True)})
    assert not can_hold({compat.Reached((32,), True)})
    assert can_hold({compat.Reached((31, 128), True)})
    assert can_hold({compat.Reached((31 * 31 + 62, 128), True)})
    assert not can_hold({compat.Reached((67, 128), True)})
    assert not can_hold({compat.Reached((1, 128), True)})
    assert not can_hold(set())
    streams = torch.zeros(1, 32, 3)
    with pytest.raises(ValueError, match="gives n = 32 streams"):
        mhc_compile.ops.aggregate(streams, streams[..., 0])


@pytest.mark.parametrize("n", [4, 7, 8, 9, 16])
def test_a_phi_of_matrices_beside_their_streams(n: int) -> None:
    """Its rows are often the width of other layers, such as 64: without n streams they say nothing."""
    streams = compat.Reached((2, 8, n, C), False)
    for rows in (n * n, 3 * n * n):
        assert can_hold({compat.Reached((rows, n * C), True), streams})
        assert can_hold({compat.Reached((n * C, rows), True), streams})
    assert can_hold({compat.Reached((n * n + n, n * C), True)})


@pytest.mark.parametrize("tokens", [(6,), (2, 3), (2, 3, 5)])
def test_a_phi_that_is_given_beside_streams(tokens: tuple[int, ...]) -> None:
    """It need not be learned, if it multiplies all channels of a token's streams."""
    streams = compat.Reached((*tokens, N, C), False)
    assert can_hold({compat.Reached((N * N + 2 * N, N * C), False), streams})
    assert not can_hold({compat.Reached((N * N + 2 * N, C * C), False), streams})


@pytest.mark.parametrize("rows", [64, 192, 256, 768])
def test_usual_layers_cannot_hold_a_site(rows: int) -> None:
    """Not even beside heads, unless these are the n streams of n * n rows."""
    others = {compat.Reached(shape, False) for shape in ((2, 8, 512), (2, 8, 4, 128), (2, 8, 32, 16), (2, 8, 512, 1))}
    assert not can_hold({compat.Reached((rows, 512), True), *others})
    assert not can_hold({compat.Reached((512, rows), True), *others})
    assert not can_hold({compat.Reached((64, 512), False), compat.Reached((2, 16, 8, 64), False)})  # is not learned


@pytest.mark.parametrize("n", [4, 8])
def test_the_rest_of_a_write_whose_gates_are_of_one_phi(n: int) -> None:
    class Write(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi = nn.Linear(n * C, n + n * n)

        def forward(self, x: Tensor, f: Tensor) -> Tensor:
            try:
                logits = self.phi(x.flatten(-2))
                torch._dynamo.graph_break()
                post, mix = logits.sigmoid().split([n, n * n], -1)
                return post[..., None] * f[..., None, :] + mix.unflatten(-1, (n, n)) @ x
            except ValueError:
                return x

    report = mhc_compile.explain(Write(), torch.randn(2, 3, n, C), torch.randn(2, 3, C))
    assert [site.detail for site in report.torn] == ["not compiled"]


@pytest.mark.usefixtures("passes_only")
def test_what_another_backend_gave_up_stays_eager() -> None:
    """Nobody is asked again, so it is not reported."""
    torch.compile(broken, backend="eager")(HIDDEN)
    torch.compile(lambda x: broken(x).sin(), backend="mhc")(HIDDEN)
    assert mhc_compile.report().unknown == []
    torch._dynamo.reset()
    torch.compile(lambda x: broken(x).sin(), backend="mhc")(HIDDEN)
    assert [site.location.code for site in mhc_compile.report().unknown] == ["broken"]


def _as_it_is(*given: Any) -> Callable[[Any], Any]:
    return lambda function: function


@_as_it_is(
    "a decorator of several lines",
)
@_as_it_is()
def decorated(x: Tensor) -> Tensor:
    return broken(x)


@_as_it_is(lambda x: x)
async def asynchronous() -> None: ...


def test_a_decorated_function_is_at_its_def() -> None:
    """Python has its code begin with the first decorator. What does not read so stays where it was said to be."""
    lines = Path(__file__).read_text().splitlines()
    for function, text in ((decorated, "def decorated("), (asynchronous, "async def asynchronous("), (broken, "def b")):
        code = function.__code__
        found = function_at(code.co_filename, code.co_firstlineno, code.co_name)
        assert lines[found.line - 1].startswith(text)
        assert function_at(code.co_filename, code.co_firstlineno, "another").line == code.co_firstlineno
    assert function_at("no file", 3, "broken").line == 3


@pytest.mark.usefixtures("passes_only")
def test_a_decorated_function_that_is_given_up_is_skipped_by_its_def() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        return _decorated_loop(x, self.phi)

    def run(skip: list[str]) -> None:
        torch._dynamo.reset()
        options = {"mhc.strict": True, "mhc.skip": skip}
        torch.compile(Net(forward, phi=PHI), backend="mhc", options=options)(HIDDEN)

    with pytest.raises(mhc_compile.StrictError):
        run([])
    (site,) = mhc_compile.report().cut
    assert Path(__file__).read_text().splitlines()[site.location.line - 1].startswith("def _decorated_loop(")
    run([str(site.location)])


@_as_it_is()
def _decorated_loop(x: Tensor, phi: Tensor) -> Tensor:
    for _ in range(2):
        x = F.linear(x, phi) @ phi
        torch._dynamo.graph_break()
    return x


@pytest.mark.usefixtures("passes_only")
def test_the_backends_function_is_the_backend() -> None:
    """With options of its own, too."""
    strict = {"options": {"mhc.strict": True}}
    for ours, options in ((backend.mhc, strict), (functools.partial(backend.mhc, **strict), {})):
        torch._dynamo.reset()
        with pytest.raises(mhc_compile.StrictError, match="_global"):
            torch.compile(_global, backend=ours, **options)(HIDDEN)
        assert [site.location.code for site in mhc_compile.report().unknown] == ["_global"]
