"""Functions that reach Dynamo's recompile limit: what reports say of them, and what strict options do."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_compile
from mhc_compile import compat, records
from mhc_compile.passes.report import Report
from mhc_compile.testing import capture
from tests.test_breaks import BOTH, X, _names, _place
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Annealed(Sublayer):
    """The number of iterations changes while the model is trained."""

    iterations = 1

    def res(self, logits: Tensor) -> Tensor:
        m = self.columns(self.start(logits))
        for _ in range(self.iterations):
            m = self.columns(self.rows(m))
        return m


@pytest.mark.usefixtures("passes_only")
def test_a_function_that_is_not_compiled_any_more() -> None:
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="mhc")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for iterations in (1, 2):
            model.iterations = iterations
            compiled(torch.randn(X))
        assert mhc_compile.report().cut == []
        model.iterations = 3
        compiled(torch.randn(X))
    (site,) = mhc_compile.report().cut
    assert (site.op, site.detail, site.location.code) == ("function", "not compiled any more", "forward")
    assert site.location.name == "tests/zoo/near.py"
    words = (
        "Dynamo compiled it 2 times (torch._dynamo.config.recompile_limit), and runs it, and all that it calls, "
        "eagerly for anything new"
    )
    assert site.reason == f"{words}; what changed last: self.iterations == 2"


@pytest.mark.usefixtures("passes_only")
def test_strict_options_do_not_put_up_with_the_recompile_limit() -> None:
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="mhc", options={"mhc.strict": True})
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        model.iterations = 1
        compiled(torch.randn(X))
        model.iterations = 2
        with pytest.raises(mhc_compile.StrictError, match=r"what changed last: self\.iterations == 1"):
            compiled(torch.randn(X))
    (site,) = mhc_compile.report().cut
    torch._dynamo.reset()
    options = {"mhc.strict": True, "mhc.skip": [str(site.location)]}
    compiled = torch.compile(model, backend="mhc", options=options)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for model.iterations in (1, 2):
            compiled(torch.randn(X))
    assert mhc_compile.report().cut == [site]


def _wrapped(forward: Any) -> Any:
    """All methods that are wrapped have one code object, and one recompile limit."""

    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


class _Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Sublayer(4, 6, 3, 2)

    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


class _Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1


def _nest() -> torch.nn.Module:
    model: torch.nn.Module = _Inner()
    for _ in range(3):
        model = _Outer(model)
    return model


@pytest.mark.usefixtures("passes_only")
def test_a_function_without_sites_that_is_not_compiled_any_more() -> None:
    """Nothing that it calls is compiled, either."""
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        torch.compile(_nest(), backend="mhc")(torch.randn(X))
    report = mhc_compile.report()
    (site,) = (site for site in report.cut if site.detail == "not compiled any more")
    assert str(site.location) == _place(_Outer, "def forward")
    assert not report.sites
    assert "it, and all that it calls, eagerly" in (site.reason or "")
    assert "no hyper-connection code was found" not in str(report)


class _Resumed(_Inner):
    scale = 1

    @_wrapped
    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x * self.scale


@pytest.mark.usefixtures("passes_only")
def test_the_rest_of_a_function_is_not_compiled_any_more() -> None:
    model = _Resumed()
    compiled = torch.compile(model, backend="mhc", dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for model.scale in (1, 2):
            compiled(torch.randn(X))
    (site,) = mhc_compile.report().cut
    assert (site.location.code, str(site.location)) == ("forward", _place(_Resumed))
    assert "Dynamo compiled the part of it after an earlier break once" in (site.reason or "")


@pytest.mark.usefixtures("passes_only")
def test_strict_options_do_not_put_up_with_a_limit_above_hyper_connections() -> None:
    options: dict[str, Any] = {"mhc.strict": True, "mhc.skip": [_place(_Inner, "def forward")]}
    limit = torch._dynamo.config.patch(recompile_limit=1)
    with torch.no_grad(), limit, pytest.raises(mhc_compile.StrictError, match="not compiled any more"):
        torch.compile(_nest(), backend="mhc", options=options)(torch.randn(X))
    torch._dynamo.reset()
    options["mhc.skip"].append(_place(_Outer, "def forward"))
    with torch.no_grad(), limit:
        torch.compile(_nest(), backend="mhc", options=options)(torch.randn(X))


@pytest.mark.usefixtures("passes_only")
def test_a_limit_of_what_cannot_hold_a_hyper_connection() -> None:
    """It is told, and strict options accept it; one of another backend is nobody's business here."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh())
    for backend, told in (("mhc", 1), ("eager", 0)):
        torch._dynamo.reset()
        options = {"mhc.strict": True} if told else None
        compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
            for tokens in (3, 4):
                compiled(torch.randn(tokens, 64))
        assert [site.detail for site in mhc_compile.report().cut] == ["not compiled, cannot hold a site"] * told


@pytest.mark.usefixtures("passes_only")
def test_a_function_to_skip_is_known_before_the_recompile_limit() -> None:
    """A place to skip is of use if Dynamo compiles the function there by itself, and the function has sites."""
    compiled, inlined = _place(Sublayer, "def forward").removeprefix("tests/"), _place(Annealed, "def res")
    options = {"mhc.skip": [compiled, inlined, "model.py:1"]}
    torch.compile(Annealed(4, 6, 3, 2), backend="mhc", options=options)(torch.randn(X))
    assert "mhc.skip" not in str(records.last())  # other graphs may have sites there
    torch.compile(torch.nn.Linear(6, 6), backend="mhc", options=options)(torch.randn(X))
    told = [line for line in str(mhc_compile.report()).splitlines() if "mhc.skip" in line]
    assert told == [f"  mhc.skip names {place}, and no site is there" for place in (inlined, "model.py:1")]


@pytest.mark.slow
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
def test_a_look_compiles_whatever_the_stance(stance: str) -> None:
    """And the stance holds again afterwards."""
    model, x = Sublayer(4, 6, 3, 2), torch.randn(X)
    with torch.compiler.set_stance(stance):
        assert _names(mhc_compile.explain(model, x).rewritten) == BOTH
        assert "expand_combine" in str(capture(model, x))
        assert _names(mhc_compile.verify(model, x, inductor=False).report.rewritten) == BOTH
        before = torch._dynamo.utils.counters["frames"]["total"]
        if stance == "fail_on_recompile":
            with pytest.raises(RuntimeError, match="stance"):
                torch.compile(model, backend="eager")(x)
        else:
            torch.compile(model, backend="eager")(x)
        assert torch._dynamo.utils.counters["frames"]["total"] == before


LIMITS = ["recompile_limit", "accumulated_recompile_limit"]


@pytest.mark.parametrize("limit", LIMITS)
def test_explaining_again_and_again(limit: str) -> None:
    """Each time Dynamo compiles the model anew, however often that is."""
    model = Sublayer(4, 6, 3, 2)
    with torch._dynamo.config.patch({limit: 2}):
        for _ in range(4):
            report = mhc_compile.explain(model, torch.randn(X))
            assert (_names(report.rewritten), report.cut) == (BOTH, [])


@pytest.mark.parametrize("limit", LIMITS)
def test_what_was_compiled_before_does_not_count_for_a_look(limit: str) -> None:
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch({limit: 2}), torch.no_grad():
        for model.iterations in (1, 2, 3):
            compiled(torch.randn(X))
        report = mhc_compile.explain(model, torch.randn(X))
        assert (_names(report.rewritten), report.cut) == (BOTH, [])
        assert "not compiled any more" not in str(capture(model, torch.randn(X)))


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("limit", LIMITS)
def test_a_look_does_not_count_for_a_run(limit: str) -> None:
    """However often the model is explained between two compilations of a run."""
    model = Annealed(4, 6, 3, 2)
    compiled = torch.compile(model, backend="mhc")
    with torch._dynamo.config.patch({limit: 2}), torch.no_grad():
        for model.iterations in (1, 2):
            compiled(torch.randn(X))
            for _ in range(3):
                mhc_compile.explain(model, torch.randn(X))
        assert mhc_compile.report().cut == []
        model.iterations = 3
        compiled(torch.randn(X))
    (site,) = mhc_compile.report().cut  # the limit is still one, and what changed is told as without a look
    assert (site.reason or "").startswith("Dynamo compiled it 2 times")
    assert (site.reason or "").endswith("; what changed last: self.iterations == 2")


class _Sizes:
    """A backend that notes how many sizes of each graph are symbols."""

    def __init__(self) -> None:
        self.symbols: list[int] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.symbols.append(sum(isinstance(value, torch.SymInt) for value in example_inputs))
        return gm.forward


@pytest.mark.parametrize("looks", [(), (4,), (4, 5)])
def test_sizes_of_a_look_are_forgotten(looks: tuple[int, ...]) -> None:
    """The first size of a run is static, and from the second on it is dynamic, whatever was explained in between."""
    sizes = _Sizes()
    compiled = torch.compile(Sublayer(4, 6, 3, 2), backend=sizes)
    with torch.no_grad():
        for tokens in (3, 6, 7):
            for other in looks:
                mhc_compile.explain(Sublayer(4, 6, 3, 2), torch.randn(2, other, *X[2:]))
            compiled(torch.randn(2, tokens, *X[2:]))
    assert sizes.symbols == [0, 1]


def test_a_look_knows_no_sizes() -> None:
    """They are those of the run before."""
    model, sizes = Sublayer(4, 6, 3, 2), _Sizes()
    before = mhc_compile.explain(model, torch.randn(X))
    compiled = torch.compile(model, backend=sizes)
    with torch.no_grad():
        for tokens in (3, 6):
            compiled(torch.randn(2, tokens, *X[2:]))
    again = mhc_compile.explain(model, torch.randn(X))
    assert again.sites == before.sites
    assert [site.before for site in again.sites] == [site.before for site in before.sites]
    assert all(site.before is not None for site in again.sites)  # a site with symbolic sizes has no count


def test_a_look_inside_a_look_leaves_the_sizes_of_the_run() -> None:
    """The sizes of the run are put back when the last look is over."""
    model, sizes = Sublayer(4, 6, 3, 2), _Sizes()
    compiled = torch.compile(model, backend=sizes)

    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        mhc_compile.explain(model, torch.randn(2, 9, *X[2:]))
        return x + 1

    with torch.no_grad():
        for tokens in (3, 6):
            mhc_compile.explain(outer, torch.randn(X))
            compiled(torch.randn(2, tokens, *X[2:]))
    assert sizes.symbols == [0, 1]


def test_a_run_inside_a_look_keeps_its_sizes() -> None:
    """A function that the model compiles itself, which Dynamo does not look into: it is compiled for runs."""
    sizes = _Sizes()
    inner = torch.compile(Sublayer(4, 6, 3, 2), backend=sizes)
    hidden = torch.compiler.disable(lambda x: inner(x))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for tokens in range(2, 12):
            mhc_compile.explain(lambda x: hidden(x) + 1, torch.randn(2, tokens, *X[2:]))
    assert sizes.symbols == [0, 1]


def test_looks_that_overlap_leave_dynamo_as_it_was() -> None:
    """The one that began first ends first, and a function has reached its limit in it."""
    model = Annealed(4, 6, 3, 2)
    looks = [contextlib.ExitStack() for _ in range(2)]

    def begin(stack: contextlib.ExitStack) -> _Sizes:
        backend = _Sizes()
        stack.enter_context(compat.apart(backend, lambda function: None, lambda frame, limit: None))
        return backend

    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(model, backend=begin(looks[0]))
        for model.iterations in (1, 2, 3):
            compiled(torch.randn(X))
        begin(looks[1])
        for stack in looks:
            stack.close()
        sizes = _Sizes()
        torch.compile(model, backend=sizes)(torch.randn(X))
    assert sizes.symbols == [0]


def test_a_look_compiles_nothing_again() -> None:
    """What was compiled for a run is none of a look's."""
    model = Sublayer(4, 6, 3, 2)
    with torch.no_grad():
        torch.compile(model, backend="eager")(torch.randn(X))
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert _names(mhc_compile.explain(model, torch.randn(X)).rewritten) == BOTH


def _compiled_in_place(model: torch.nn.Module, limit: int) -> torch.nn.Module:
    model.compile(backend="mhc", recompile_limit=limit)
    return model


_compile: Any = torch.compile  # whose types do not know all of its arguments
HOW: dict[str, Callable[[torch.nn.Module, int], Any]] = {
    "a module": lambda model, limit: _compile(model, backend="mhc", recompile_limit=limit),
    "in place": _compiled_in_place,
    "a function": lambda model, limit: _compile(lambda x: model(x), backend="mhc", recompile_limit=limit),
}


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("how", HOW)
def test_a_limit_that_was_given_to_compile(how: str) -> None:
    """explain obeys it, as the run does; without it, the limit is the setting."""
    model = Iterated()
    with torch.no_grad():
        assert "not compiled any more" not in str(mhc_compile.explain(model, torch.randn(X)))
        compiled = HOW[how](model, 2)
        explained = mhc_compile.explain(compiled, torch.randn(X))
        assert mhc_compile.report().cut == []
        compiled(torch.randn(X))
    assert "not compiled any more: 1 x function" in str(explained)
    assert "Dynamo compiled it 2 times (the recompile_limit of torch.compile), and" in str(explained)
    assert _told(explained) == _told(mhc_compile.report())


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("explain", [False, True])
def test_a_limit_is_reported_whatever_dynamo_logs(explain: bool) -> None:
    log = logging.getLogger("torch._dynamo")
    before = log.level
    try:
        log.setLevel(logging.ERROR)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
            report = mhc_compile.explain(Iterated(), torch.randn(X))
            if not explain:
                torch.compile(Iterated(), backend="mhc")(torch.randn(X))
                report = mhc_compile.report()
    finally:
        log.setLevel(before)
    (site,) = (site for site in report.cut if site.detail == "not compiled any more")
    assert (site.reason or "").endswith("; what changed last: self.iterations == 2")


class Iterated(torch.nn.Module):
    """Compiles its layer anew for each number of iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Annealed(4, 6, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for self.layer.iterations in (1, 2, 3):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x


def _told(report: Report) -> Any:
    cut = [(site.op, site.location, site.detail, site.reason) for site in report.cut]
    return [(site.op, site.location, site.told) for site in report.sites], cut, report.graphs, report.compiled


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("make", "most"), [(_nest, 1), (Iterated, 2)])
def test_a_limit_is_explained_as_it_is_run(make: Callable[[], torch.nn.Module], most: int, limit: str) -> None:
    """Before the run, and after it."""
    model = make()
    with torch.no_grad(), torch._dynamo.config.patch({limit: most}):
        explained = mhc_compile.explain(model, torch.randn(X))
        assert mhc_compile.report().cut == []
        torch.compile(model, backend="mhc")(torch.randn(X))
        again = mhc_compile.explain(model, torch.randn(X))
    ran = mhc_compile.report()
    assert "not compiled any more: 1 x function" in str(ran)
    assert _told(explained) == _told(again) == _told(ran)


@pytest.mark.usefixtures("passes_only")
def test_what_was_explained_does_not_change_what_a_run_has_told() -> None:
    model, words = Iterated(), []
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        torch.compile(model, backend="mhc")(torch.randn(X))
        words.append(str(mhc_compile.report()))
        with torch._dynamo.config.patch(recompile_limit=1):
            assert "compiled it once" in str(mhc_compile.explain(model, torch.randn(X)))
        words.append(str(mhc_compile.report()))
    assert words[0] == words[1]


def test_a_limit_in_a_snapshot() -> None:
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        lines = str(capture(Iterated(), torch.randn(X))).splitlines()
    told = [line for line in lines if line.startswith("not compiled any more")]
    assert told == ["not compiled any more: forward reaches accumulated_recompile_limit"]
