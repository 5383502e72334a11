"""What Dynamo tears apart, throws away or does not compile any more is reported, and does not count."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhc_compile
from mhc_compile import compat, passes, records
from mhc_compile.nn import HyperConnection
from mhc_compile.passes.cut import advice
from mhc_compile.passes.report import Location, Report, SiteReport
from mhc_compile.testing import EmptyCaptureError, capture
from tests.zoo.near import Sublayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo looks at what a graph gets from the one before it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

X = (2, 3, 4, 6)
BOTH = ["generate_mix_and_aggregate", "expand_combine"]


class Broken(Sublayer):
    """A sublayer in which Dynamo breaks the graph, between its read and its write."""

    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        f = super().layer(layer_input, x)
        torch._dynamo.graph_break()
        return f


def _place(cls: type, words: str = "graph_break()") -> str:
    lines, first = inspect.getsourcelines(cls)
    line = first + next(i for i, text in enumerate(lines) if words in text)
    return f"tests/{Path(inspect.getfile(cls)).name}:{line}"


def _names(sites: list[SiteReport]) -> list[str]:
    return [site.op for site in sites]


def _check_cut(report: Report) -> None:
    assert _names(report.rewritten) == BOTH
    assert [(site.op, site.detail) for site in report.cut] == [(op, "cut") for op in BOTH]
    # `mhc.skip` takes what either list shows.
    assert {(site.op, site.location) for site in report.cut} <= {(site.op, site.location) for site in report.rewritten}
    words = f"Dynamo breaks the graph at {_place(Broken)}: Call to `torch._dynamo.graph_break()`"
    read, write = (site.reason or "" for site in report.cut)
    assert read.startswith(f"its gates are used outside this graph: {words}")
    assert write.startswith(f"its gates are made outside this graph: {words}")
    assert "2 of 2 hyper-connection sites rewritten, 1 with gates of their own, in 4 graphs" in str(report)
    assert "; 2 cut\n" in str(report)
    assert report.breaks == []
    assert "  cut: 1 x expand_combine at tests/zoo/near.py" in str(report)


def test_a_sublayer_that_a_break_cuts_is_explained() -> None:
    _check_cut(mhc_compile.explain(Broken(4, 6, 3, 2), torch.randn(X)))


@pytest.mark.usefixtures("passes_only")
def test_a_sublayer_that_a_break_cuts_is_reported() -> None:
    with torch.no_grad():
        torch.compile(Broken(4, 6, 3, 2), backend="mhc")(torch.randn(X))
    _check_cut(mhc_compile.report())


def test_a_sublayer_that_a_break_cuts_is_not_strict() -> None:
    compiled = torch.compile(Broken(4, 6, 3, 2), backend="mhc", options={"mhc.strict": True})
    words = f"its gates are used outside this graph: .*{_place(Broken)}"
    with pytest.raises(mhc_compile.StrictError, match=words) as caught:
        compiled(torch.randn(X))
    place = str(mhc_compile.report().cut[0].location)
    first, second, *report = str(caught.value).splitlines()
    assert first.startswith(
        f'options={{"mhc.strict": True}} raises: generate_mix_and_aggregate at {place} is cut '
        f"(its gates are used outside this graph: Dynamo breaks the graph at {_place(Broken)}"
    )
    assert first.endswith(
        f'). To accept this, pass options={{"mhc.skip": ["{place}"]}}: no site at these lines is rewritten then'
    )
    assert second == "The report until then:"
    assert "\n".join(report).startswith("mhc: ")


def test_strict_options_name_the_lines_that_are_skipped_already() -> None:
    """So that the list of one error need not be put together with those of errors before."""
    skipped: list[str] = []
    for _ in range(2):
        torch._dynamo.reset()
        options = {"mhc.strict": True, "mhc.skip": skipped}
        with pytest.raises(mhc_compile.StrictError) as caught:
            torch.compile(Broken(4, 6, 3, 2), backend="mhc", options=options)(torch.randn(X))
        (names,) = re.findall(r'"mhc.skip": (\[.*?\])', str(caught.value))
        assert json.loads(names)[:-1] == skipped
        skipped = json.loads(names)
    torch._dynamo.reset()
    torch.compile(Broken(4, 6, 3, 2), backend="mhc", options={"mhc.strict": True, "mhc.skip": skipped})(torch.randn(X))


def test_graphs_that_are_compiled_need_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "advice", lambda graph: ["Read no numbers on the host"])
    report = mhc_compile.explain(Broken(4, 6, 3, 2), torch.randn(X))
    assert report.cut
    assert report.advice == []


class InALoop(Sublayer):
    """Dynamo does not resume within a loop: it compiles the functions that are called there, one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * self.per_channel
            pre, post, res = self.gates(x)
            f = self.layer(self.read(x, pre), x)
            torch._dynamo.graph_break()
            x = self.write(x, f, post, res)
        return x


def test_functions_of_a_function_that_is_not_compiled_are_cut() -> None:
    """They are reported, and so is that function, whose own sites are unknown."""
    report = mhc_compile.explain(InALoop(4, 6, 3, 2), torch.randn(X))
    assert "; 3 cut; 1 function not looked at\n" in str(report)
    assert report.unknown == report.cut[:1]
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]
    assert _names(report.cut) == ["function", *_names(report.rewritten)]
    assert all("outside this graph" in (site.reason or "") for site in report.cut[1:])


class OneFunction(Sublayer):
    """All of a hyper-connection is code of one function, which Dynamo gives up if it is broken."""

    broken = True

    def forward(self, x: Tensor) -> Tensor:
        n = self.n
        for _ in range(2):
            mixes = (x.flatten(2) @ self.phi.T) * torch.rsqrt(x.flatten(2).square().mean(-1, keepdim=True) + 1e-6)
            pre, post, res = (mixes + self.bias).split((n, n, n * n), -1)
            layer_input = (torch.sigmoid(pre).unsqueeze(-1) * x).sum(2)
            if self.broken:
                torch._dynamo.graph_break()
            out = torch.sigmoid(post).unsqueeze(-1) * layer_input.tanh().unsqueeze(2)
            x = out + res.unflatten(-1, (n, n)).softmax(-1) @ x
        return x


def _one_function(broken: bool = True) -> OneFunction:
    model = OneFunction(4, 6, 3, 2)
    model.broken = broken
    return model


def _check_given_up(text: str) -> None:
    place = _place(OneFunction, "def forward")
    words = "Call to `torch._dynamo.graph_break()`: User-inserted graph break. Message: None (graph break in loop)"
    assert f"  not compiled: 1 x function at {place}  forward\n" in text
    assert f"      Dynamo gives up on it at {_place(OneFunction)}: {words}. Its own lines run eagerly" in text


def test_a_function_that_is_given_up_is_explained() -> None:
    report = mhc_compile.explain(_one_function(), torch.randn(X))
    _check_given_up(str(report))
    assert (report.sites, report.graphs, report.unknown) == ([], 0, report.cut)
    assert "0 of 0 hyper-connection sites rewritten in 0 graphs (0.00 s); 1 function not looked at\n" in str(report)


def test_a_part_of_a_function_that_is_given_up() -> None:
    class Behind(OneFunction):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            for _ in range(2):
                x = x.cos()
                torch._dynamo.graph_break()
            return x

    report = mhc_compile.explain(Behind(4, 6, 3, 2), torch.randn(X))
    (site,) = report.unknown
    assert (site.location.code, report.graphs) == ("forward", 1)
    assert "(graph break in loop). Its own lines after an earlier break run eagerly" in (site.reason or "")


def test_a_function_that_is_given_up_is_reported() -> None:
    """Once, whatever was explained; not that of another backend."""
    mhc_compile.explain(_one_function(), torch.randn(X))
    torch.compile(InALoop(4, 6, 3, 2), backend="eager")(torch.randn(X))
    assert mhc_compile.report().cut == []
    torch.compile(_one_function(), backend="mhc")(torch.randn(X))
    _check_given_up(str(mhc_compile.report()))
    assert len(mhc_compile.report().cut) == 1


def test_a_function_that_is_given_up_is_not_strict() -> None:
    compiled = torch.compile(_one_function(), backend="mhc", options={"mhc.strict": True})
    for _ in range(2):  # Dynamo does not give up on what raises
        with pytest.raises(mhc_compile.StrictError) as caught:
            compiled(torch.randn(X))
        _check_given_up(str(caught.value))
    torch._dynamo.reset()
    with mhc_compile.enable({"mhc.strict": True}), pytest.raises(mhc_compile.StrictError, match="function not looked"):
        torch.compile(_one_function())(torch.randn(X))


def test_strict_options_do_without_a_function_that_they_skip() -> None:
    options = {"mhc.strict": True, "mhc.skip": [_place(OneFunction, "def forward").removeprefix("tests/")]}
    model, x = _one_function(), torch.randn(X)
    assert torch.equal(torch.compile(model, backend="mhc", options=options)(x), model(x))


def test_a_function_that_is_given_up_is_verified() -> None:
    result = mhc_compile.verify(_one_function(), torch.randn(X), grad=False, inductor=False, say=None)
    _check_given_up(str(result))
    assert str(result).endswith("ok: right, but nothing was rewritten; what is cut or not compiled stands above")
    assert not mhc_compile.report().cut


def test_a_function_that_is_given_up_in_a_snapshot() -> None:
    with pytest.raises(EmptyCaptureError) as caught:
        capture(_one_function(), torch.randn(X))
    _check_given_up(str(caught.value))
    lines = str(capture(InALoop(4, 6, 3, 2), torch.randn(X))).splitlines()
    assert lines[0] == "not compiled: Dynamo gives up on forward, at torch._dynamo.graph_break()"
    assert [line.partition("(")[0].partition(",")[0] for line in lines[1:] if "break" in line or "mix" in line][:2] == [
        "cut: Dynamo breaks the graph in forward",
        "%0 = generate_mix",
    ]


def test_a_break_in_a_snapshot() -> None:
    lines = str(capture(Broken(4, 6, 3, 2), torch.randn(X))).splitlines()
    cut = "cut: Dynamo breaks the graph in "
    read, write = (i for i, line in enumerate(lines) if any(f"{name}(" in line for name in BOTH))
    assert not lines[0].startswith(cut)
    assert any(line.startswith(cut) for line in lines[read:write])
    assert "cut" not in str(capture(Sublayer(4, 6, 3, 2), torch.randn(X)))


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize("look", [mhc_compile.explain, capture])
def test_a_look_leaves_nothing_behind(look: Callable[..., Any]) -> None:
    """What Dynamo gives up on meanwhile it compiles afterwards, and what it had compiled it still has."""
    x, calls = torch.randn(X), []

    def counting(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            calls.append(gm)
            return gm.forward(*given)

        return run

    compiled = torch.compile(_one_function(broken=False), backend=counting)
    compiled(x)
    assert "4 of 4" in str(mhc_compile.explain(_one_function(broken=False), x))
    with contextlib.suppress(EmptyCaptureError):
        look(_one_function(), x)
    assert "4 of 4" in str(mhc_compile.explain(_one_function(broken=False), x))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)
    assert calls == 2 * calls[:1]
    with torch.no_grad():
        torch.compile(_one_function(broken=False), backend="mhc", options={"mhc.strict": True})(x)
    assert "4 of 4" in str(mhc_compile.report())


@pytest.mark.parametrize("look", [mhc_compile.explain, capture])
def test_a_look_at_what_dynamo_had_given_up(look: Callable[..., Any]) -> None:
    """It is looked at, and stays given up."""
    x, broken = torch.randn(X), torch.compile(_one_function(), backend="eager")
    broken(x)
    assert "expand_combine" in str(look(_one_function(broken=False), x))
    with torch.compiler.set_stance("fail_on_recompile"):
        broken(x)


def _in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="eager")
    return model


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "in place": _in_place,
    "a call of a model compiled in place": lambda model: _in_place(model).__call__,
    "a model of models compiled in place": lambda model: nn.Sequential(_in_place(model)),
    "a module": lambda model: torch.compile(model, backend="eager"),
    "a module compiled in place": lambda model: torch.compile(_in_place(model), backend="eager"),
    "a method": lambda model: torch.compile(model.forward, backend="eager"),
    "a function": lambda model: torch.compile(lambda x: model(x), backend="eager"),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_look_at_a_compiled_model(way: str, called: bool) -> None:
    """It is the model as it is written, and stays compiled."""
    model, x = Sublayer(4, 6, 3, 2), torch.randn(X)
    compiled = WAYS[way](model)
    if called:
        compiled(x)
    there = model._compiled_call_impl
    assert _names(mhc_compile.explain(compiled, x).rewritten) == BOTH
    assert "expand_combine(" in str(capture(compiled, x))
    assert model._compiled_call_impl is there
    if called:
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(x)


@pytest.mark.usefixtures("passes_only")
def test_looks_do_not_use_up_compilations() -> None:
    model, x = Sublayer(4, 6, 3, 2), torch.randn(X)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for _ in range(2):
            mhc_compile.explain(model, x)
            capture(model, x)
        torch.compile(model, backend="mhc", options={"mhc.strict": True})(x)
    assert _names(mhc_compile.report().rewritten) == BOTH


class Static(nn.Module):
    """A connection of streams of six channels that has the same gates for all tokens, and a break around it."""

    def __init__(self, keep: Callable[[nn.Module, str, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        for name, gate in self.made().items():
            keep(self, name, gate)

    def made(self) -> dict[str, Tensor]:
        return {"pre": torch.rand(4), "post": torch.rand(1, 1, 4), "mix": torch.rand(4, 4)}

    def gates(self) -> tuple[Any, ...]:
        return self.pre, self.post, self.mix

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        pre, post, mix = self.gates()
        f = self.layer((pre.unsqueeze(-1) * x).sum(-2))
        out: Tensor = post.unsqueeze(-1) * f.unsqueeze(-2) + mix @ x
        return out


class StaticTogether(Static):
    """The gates are columns and blocks of one matrix."""

    def made(self) -> dict[str, Tensor]:
        return {"all": torch.rand(4, 6)}

    def gates(self) -> tuple[Any, ...]:
        return self.all[:, 0], self.all[:, 1], self.all[:, 2:]


KEPT: dict[str, Callable[[Any, str, Tensor], None]] = {
    "a buffer": lambda model, name, gate: model.register_buffer(name, gate),
    "a plain attribute": setattr,
    "a parameter": lambda model, name, gate: setattr(model, name, nn.Parameter(gate)),
}


@pytest.mark.parametrize("tokens", [(2, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("kind", [Static, StaticTogether])
def test_static_gates_are_not_cut(kind: type[Static], kept: str, tokens: tuple[int, ...]) -> None:
    report = mhc_compile.explain(kind(KEPT[kept]), torch.randn(*tokens, 4, 6))
    assert (_names(report.rewritten), report.cut) == (["aggregate", "expand_combine"], [])


def test_static_gates_of_one_token_are_not_cut() -> None:
    """They have no dimension for tokens."""

    class OneToken(Static):
        def made(self) -> dict[str, Tensor]:
            return super().made() | {"post": torch.rand(4)}

    report = mhc_compile.explain(OneToken(KEPT["a buffer"]), torch.randn(1, 1, 4, 6))
    assert (_names(report.rewritten), report.cut) == (["aggregate", "expand_combine"], [])


def test_static_gates_of_a_functional_call_are_not_cut() -> None:
    model = Static(KEPT["a parameter"])
    given = {name: one.detach() for name, one in model.named_parameters()}
    report = mhc_compile.explain(lambda x: torch.func.functional_call(model, given, (x,)), torch.randn(X))
    assert (_names(report.rewritten), report.cut) == (["aggregate", "expand_combine"], [])


@pytest.mark.parametrize("tokens", [(1, 1), (1, 3), (3,), (1,)], ids=str)
def test_gates_of_few_tokens_are_cut(tokens: tuple[int, ...]) -> None:
    """One token's have as many elements as static ones."""
    if len(tokens) > 1:
        report = mhc_compile.explain(Broken(4, 6, 3, 2), torch.randn(*tokens, 4, 6))
        assert _names(report.cut) == BOTH
        return

    def read(x: Tensor) -> Tensor:
        pre = x.mean(-1).softmax(-1)
        torch._dynamo.graph_break()
        return (pre.unsqueeze(-1) * x).sum(-2)

    report = mhc_compile.explain(read, torch.randn(*tokens, 4, 6))
    assert _names(report.rewritten) == _names(report.cut)


def test_a_gate_for_each_sequence_is_cut() -> None:
    """It is the same for all tokens of a sequence, and another graph makes it."""

    mix = nn.Parameter(torch.rand(4, 4))

    def connection(x: Tensor) -> Tensor:
        post = x.mean((1, 3)).sigmoid().unsqueeze(1)
        torch._dynamo.graph_break()
        f = (x.mean(-1).softmax(-1).unsqueeze(-1) * x).sum(-2).tanh()
        return post.unsqueeze(-1) * f.unsqueeze(-2) + mix @ x

    report = mhc_compile.explain(connection, torch.randn(X))
    assert (_names(report.rewritten), _names(report.cut)) == (["aggregate", "expand_combine"], ["expand_combine"])


def test_a_region_that_gets_its_gates_is_not_cut() -> None:
    """A checkpoint region is a graph of its own, that another calls, whatever else Dynamo breaks."""

    class Region(Sublayer):
        def write(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().write, x, f, h_post, h_res, use_reentrant=False)
            return out

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            torch._dynamo.graph_break()
            return out + 1.0

    report = mhc_compile.explain(Region(4, 6, 3, 2), torch.randn(X))
    assert (sorted(_names(report.rewritten)), report.cut) == (sorted(BOTH), [])
    assert report.declined == []


def test_parts_that_the_program_compiles_one_by_one_are_not_cut() -> None:
    model = Sublayer(4, 6, 3, 2)
    x = torch.randn(X)
    _, post, res = model.gates(x)
    report = mhc_compile.explain(model.write, x, x.sum(2), post, res)
    assert (_names(report.rewritten), report.cut) == (["expand_combine"], [])
    report = mhc_compile.explain(model.gates, x)
    assert (_names(report.rewritten), report.cut) == (["generate_mix"], [])


@torch.library.custom_op("mhc_test::reads_in_backward", mutates_args=())
def _reads_in_backward(f: Tensor) -> Tensor:
    return f.clone()


_reads_in_backward.register_fake(torch.empty_like)
_reads_in_backward.register_autograd(lambda ctx, d_f: d_f * d_f.sum().item())


class NoBackward(Sublayer):
    def layer(self, layer_input: Tensor, x: Tensor) -> Tensor:
        out: Tensor = _reads_in_backward(super().layer(layer_input, x))
        return out


def test_a_graph_that_is_thrown_away_does_not_count(capfd: pytest.CaptureFixture[str]) -> None:
    """Autograd cannot trace it. Dynamo tries again, and in the end compiles what is called, one by one."""
    report = mhc_compile.explain(NoBackward(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]
    assert report.lost == []
    assert {site.detail for site in report.cut} == {"cut"}
    assert all("Backend compiler `mhc` failed with aten._local_sc" in (site.reason or "") for site in report.cut)
    assert "Traceback" not in "".join(capfd.readouterr())


class WritesItself(NoBackward):
    """Its own lines write the streams. Dynamo gives up on them, after an attempt in which the write was compiled."""

    def body(self, x: Tensor) -> Tensor:
        h_pre, h_post, h_res = self.gates(x)
        f = self.layer(self.read(x, h_pre), x)
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x


class WritesInALoop(WritesItself):
    def body(self, x: Tensor) -> Tensor:
        for _ in range(2):
            h_pre, h_post, h_res = self.gates(x)
            f = self.layer(self.read(x, h_pre), x)
            x = h_post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.transpose(-1, -2) @ x
        return x


@pytest.mark.parametrize(("model", "writes"), [(WritesItself, 1), (WritesInALoop, 2)])
def test_lines_that_dynamo_gives_up_on_after_all_are_lost(
    model: type[NoBackward], writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "advice", lambda graph: ["Read no numbers on the host"])
    report = mhc_compile.explain(model(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate"]
    assert _names(report.lost) == writes * ["expand_combine"]
    assert "Dynamo gives up on the graph at " in (report.lost[0].reason or "")
    head, first, *_ = str(report).splitlines()
    assert f"mhc: 2 of {2 + writes} hyper-connection sites rewritten" in head
    assert head.endswith(f"; 2 cut, {writes} not compiled")
    assert first == "  advice: Read no numbers on the host"
    assert f"<title>Hyper-connections of the model: 2 of {2 + writes} sites rewritten" in report.html()
    assert f"\n2 of {2 + writes} hyper-connection sites rewritten" in str(mhc_compile.Verification(report=report))


@pytest.mark.slow
def test_verify_prints_no_traceback_of_such_a_graph(capfd: pytest.CaptureFixture[str]) -> None:
    result = mhc_compile.verify(NoBackward(4, 6, 3, 2), torch.randn(X), inductor=False, raises=False, say=None)
    assert _names(result.report.cut) == ["generate_mix", "aggregate", "expand_combine"]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_what_was_compiled_before_a_reset_is_forgotten() -> None:
    """Dynamo numbers its frames anew, whichever backends it had."""
    torch.compile(lambda x: x.sin(), backend="eager")(torch.randn(3))
    torch._dynamo.reset()
    report = mhc_compile.explain(NoBackward(4, 6, 3, 2), torch.randn(X))
    assert _names(report.rewritten) == ["generate_mix", "aggregate", "expand_combine"]


# torch 2.14 warns while it traces the text of a dataclass. As an error, this would end the caller's compilation there.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.usefixtures("passes_only")
def test_code_without_a_hash() -> None:
    """vmap asks for the module's text, which Dynamo cannot trace: the code that it makes has a dict as a constant."""
    model, x = HyperConnection(nn.Linear(6, 6), dim=6), torch.randn(X)
    out = torch.compile(lambda x: torch.vmap(model)(x), backend="mhc")(x)
    torch.testing.assert_close(out, torch.vmap(model)(x))
    (forward,) = [site for site in mhc_compile.report().torn if site.location.code == "forward"]
    assert "a transform of torch.func calls it, which is not compiled itself" in str(forward.reason)
    torch._dynamo.reset()
    with pytest.raises(mhc_compile.StrictError, match=r"not compiled: 1 x function at mhc_compile/nn\.py"):
        torch.compile(lambda x: torch.vmap(model)(x), backend="mhc", options={"mhc.strict": True})(x)
    code = (lambda: None).__code__.replace(co_consts=(None, {}))
    compat.watched.broken[code] = compat.GraphBreak(0, 0, ("f", "a.py"), "a.py", 1, "", False)
    assert code in compat.watched.broken


def test_advice_for_graphs_that_are_given_up() -> None:
    def grouped_mm_fallback(x: Tensor) -> Tensor:
        return x

    graph = torch.fx.Graph()
    graph.output((graph.call_function(grouped_mm_fallback, (graph.placeholder("x"),)),))
    (words,) = advice(graph)
    assert words.startswith("On a CPU, ")  # it may follow a full stop
    assert 'model.set_experts_implementation("batched_mm") keeps the graph whole' in words


def test_a_failure_in_an_earlier_attempt_is_one_of_a_compilation() -> None:
    failed, later = records.Compiled(failure="RuntimeError: planted"), records.Compiled()
    found = records._Compilation(1, [later], before=records._Compilation(0, [failed])).failure(None, None)
    assert found == "its graph failed: RuntimeError: planted"
    assert records._Compilation(1, [later]).failure(None, None) is None


def test_strict_options_do_not_put_up_with_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "advice", lambda graph: ["Read no numbers on the host"])
    model, strict = NoBackward(4, 6, 3, 2), {"mhc.strict": True}
    words = r"a graph with 2 hyper-connection sites is not compiled: \w+: .*_local_scalar_dense.default. Read no"
    with pytest.raises(mhc_compile.StrictError, match=words):
        torch.compile(model, backend="mhc", options=strict)(torch.randn(X))


def test_a_report_for_people_has_one_screen() -> None:
    def site(op: str, line: int, words: str = "n = 4", reason: str | None = None) -> SiteReport:
        return SiteReport(op, Location("model.py", line, "x = " + 200 * "y"), words, reason)

    report = Report(graphs=3)
    report.sites += [site("expand_combine", line // 10) for line in range(40)]
    report.sites += [site("aggregate", line, f"n = {line}") for line in range(20)]
    report.sites += [site("gate", line, "", f"reason {line}") for line in range(20)]
    report.cut += [site("aggregate", line, "cut", f"reason {line}") for line in range(20)]
    report.called += [site(f"operator{line}", line) for line in range(20)]
    report.errors += [f"error {line}" for line in range(20)]
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160
    assert lines[1].startswith("  40 x expand_combine               model.py:0 and 3 other lines  x = yy")
    assert lines[1].endswith("yy...")
    assert "  16 more kinds of declined sites: print(report.details())" in lines
    everything = report.details()
    for line in range(20):
        assert f"n = {line}" in everything
        assert f"reason {line}" in everything
        assert f"error {line}" in everything
    assert everything.count("x expand_combine") == 4
