"""Graphs in which a careless fusion would change a result: each is traced, fused and compared with itself before."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mhc_compile import ops, passes
from mhc_compile.passes.fuse import fuse
from tests.passes.fused import Stack, Sublayer, assert_same, fused_like_eager, program, streams
from tests.zoo import check

mhc = torch.ops.mhc
N, C, K = 2, 6, 8
TOKENS = (3, 5)
NEEDS = [True, True, True, True, False]


def _tensors() -> dict[str, Tensor]:
    shapes = {"x": (*TOKENS, N, C), "g": (*TOKENS, N, C), "f": (*TOKENS, C), "u": (*TOKENS, C), "post": (*TOKENS, N)}
    shapes |= {"res": (*TOKENS, N, N), "phi": (K, N * C), "scale": (3,), "bias": (K,), "h": (*TOKENS, K), "ms": TOKENS}
    return {name: torch.rand(shape) + 0.1 for name, shape in shapes.items()}


def mix(t: dict[str, Tensor], x: Tensor, **changed: Any) -> tuple[Tensor, ...]:
    parameters = {"phi": t["phi"], "scale": t["scale"], "bias": t["bias"]} | changed
    return mhc.generate_mix_and_aggregate(x, *parameters.values(), sinkhorn_steps=3)  # type: ignore[no-any-return]


def combine(t: dict[str, Tensor], x: Tensor, **scalars: Any) -> Tensor:
    return mhc.expand_combine(t["f"], None, t["post"], x, t["res"], **scalars)  # type: ignore[no-any-return]


def mix_back(t: dict[str, Tensor], d_u: Tensor, x: Tensor, d_x: Tensor | None = None) -> tuple[Tensor, ...]:
    saved = (x, t["phi"], t["scale"], t["bias"], None, t["h"], t["ms"])
    return mhc.generate_mix_and_aggregate_backward(d_u, None, None, None, None, *saved, NEEDS, d_x, sinkhorn_steps=3)[
        :5
    ]  # type: ignore[no-any-return]


def combine_back(t: dict[str, Tensor], g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    needs = [True, False, True, True, True]
    return mhc.expand_combine_backward(g, t["f"], None, t["post"], x, t["res"], needs)  # type: ignore[no-any-return]


def mixed_back(t: dict[str, Tensor], d_out: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return mhc.mix_streams_backward(d_out, x, t["res"], [True, True])  # type: ignore[no-any-return]


Program = Callable[[dict[str, Tensor]], Any]


def _traced(function: Program) -> fx.GraphModule:
    given = _tensors()

    def flat(*values: Tensor) -> list[Tensor]:
        return list(function(dict(zip(given, values, strict=True))))

    return make_fx(flat, tracing_mode="fake")(*given.values())


def fused(function: Program, edit: Callable[[fx.Graph], None] = lambda graph: None) -> dict[str, int]:
    """Trace, edit, fuse and run a program; returns the counts after its results were compared with the unfused ones."""
    given = _tensors()
    module, before = _traced(function), _traced(function)
    for each in (module, before):
        edit(each.graph)
        each.recompile()
    report = passes.fuse(module)
    module.graph.lint()
    assert report.errors == []
    results = []
    for each in (module, before):
        torch.manual_seed(3)
        found = each(*(value.clone() for value in given.values()))
        results.append({str(index): value for index, value in enumerate(found)})
    assert_same(*results)
    return {name: count for name, count in report.fusions.items() if count}


def _both(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The streams' gradients of a combine, and of the mix that reads the same streams."""
    d_f, _, _, dx, _ = combine_back(t, t["g"], t["x"])
    return dx, mix_back(t, d_f, t["x"])[0]


SUMS: dict[str, tuple[Program, dict[str, int]]] = {
    "in order": (lambda t: (operator.add(*_both(t)),), {"accumulate": 1}),
    "commuted": (lambda t: (operator.add(*reversed(_both(t))),), {"accumulate": 1}),
    "flattened": (lambda t: (operator.add(*(dx.flatten(-2) for dx in _both(t))),), {"accumulate": 1}),
    "exchanged": (lambda t: (operator.add(*(dx.transpose(-1, -2) for dx in _both(t))),), {"accumulate": 1}),
    "with a third": (lambda t: (operator.add(*_both(t)) + t["g"],), {"accumulate": 2}),
    "third first, flat": (
        lambda t: (t["g"].flatten(-2) + operator.add(*(dx.flatten(-2) for dx in _both(t))),),
        {"accumulate": 2},
    ),
    "third first, exchanged": (
        lambda t: (t["g"].transpose(-1, -2) + operator.add(*(dx.transpose(-1, -2) for dx in _both(t))),),
        {"accumulate": 2},
    ),
    "third is no view, exchanged": (
        lambda t: [t["g"].transpose(-1, -3).tanh() + mix_back(t, t["u"], t["x"])[0].transpose(-1, -3)],
        {"accumulate": 1},
    ),
    "third is no view, permuted": (
        lambda t: [t["g"].permute(1, 3, 0, 2).tanh() + mix_back(t, t["u"], t["x"])[0].permute(1, 3, 0, 2)],
        {"accumulate": 1},
    ),
    "mixed streams": (lambda t: [t["g"] + mixed_back(t, t["g"] * 2, t["x"])[0]], {"accumulate": 1}),
    # The sum of two factors' worth is no sum of two.
    "weighted": (lambda t: (torch.add(*_both(t), alpha=2),), {}),
    "broadcast": (lambda t: (_both(t)[1] + t["g"][:1],), {}),
    "broadcast from one number": (lambda t: (_both(t)[1] + t["g"].sum(),), {}),
    "in float64": (lambda t: (_both(t)[1] + t["g"].double(),), {}),
    "twice itself": (lambda t: [(dx := _both(t)[1]) + dx], {}),
    "twice itself, and another": (lambda t: [(dx := _both(t)[1]) + dx + t["g"]], {}),
    "a sum doubled": (lambda t: [(both := operator.add(*_both(t))) + both], {}),
    "read elsewhere": (lambda t: [t["g"] + (dx := mix_back(t, t["u"], t["x"])[0]), dx * 2], {}),
    "accumulates already": (lambda t: [t["g"] + mix_back(t, t["u"], t["x"], t["g"] * 3)[0]], {}),
    "other layout": (lambda t: [t["g"].transpose(0, 1).contiguous().transpose(0, 1) + _both(t)[1]], {}),
    "summand from the operator itself": (
        lambda t: [(r := mix_back(t, t["u"], t["x"]))[0] + t["g"] * r[3].sum()],
        {},
    ),
    # The second reads the first, so that it is the first that can be handed over, whatever their order in the sum.
    "operators in a row": (
        lambda t: [(r := mix_back(t, t["u"], t["x"]))[0] + combine_back(t, t["g"] * r[3].sum(), t["x"])[3]],
        {"accumulate": 1},
    ),
    "late summand": (
        lambda t: [mix_back(t, t["u"], t["x"])[0] + torch.tanh(t["g"]).cumsum(0)],
        {"accumulate": 1},
    ),
}


@pytest.mark.parametrize("case", SUMS)
def test_sums(case: str) -> None:
    function, counts = SUMS[case]
    assert fused(function) == counts


def test_a_result_that_is_taken_twice() -> None:
    """A second getitem of the same result is the same tensor, to which nothing may be added."""

    def program(t: dict[str, Tensor]) -> Any:
        dx, _, _, dbias, _ = mix_back(t, t["u"], t["x"])
        return dx + t["g"], dbias

    def take_again(graph: fx.Graph) -> None:
        output = next(iter(reversed(graph.nodes)))
        (source,) = [node for node in graph.nodes if node.target is mhc.generate_mix_and_aggregate_backward.default]
        with graph.inserting_before(output):
            again = graph.call_function(operator.getitem, (source, 0))
        again.meta["val"] = source.meta["val"][0]
        output.args = ([*output.args[0], again],)

    assert fused(program) == {"accumulate": 1}
    assert fused(program, take_again) == {}


def _boundary(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    return (x_new, *mix(t, x_new))


def _hoisted(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    return (x_new, *mix(t, x_new, phi=torch.cat([t["phi"][:4], t["phi"][4:] * 2])))


def _dependent(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    return (x_new, *mix(t, x_new, bias=t["bias"] * x_new.mean()))


def _random(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    noise = torch.rand_like(t["g"])
    return (x_new, *mix(t, x_new, bias=torch.rand_like(t["bias"])), noise)


def _written(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    t["phi"].mul_(0.5)
    return (x_new, *mix(t, x_new))


def _written_after(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    results = _boundary(t)
    t["phi"].mul_(0.5)
    return results


def _cast(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"]).bfloat16()
    return (x_new.float(), *(value.float() for value in mix(t, x_new)))


def _two_mixes(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x_new = combine(t, t["x"])
    return (*mix(t, x_new), *mix(t, x_new, bias=t["bias"] * 2), mhc.aggregate(x_new, t["post"]))


def _two_combines(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (*mix(t, combine(t, t["x"])), *mix(t, combine(t, t["g"])))


def _in_a_row(t: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The parameters of the second mix come from the first, and its combine reads the first's streams."""
    first = combine(t, t["x"])
    u, *_ = mix(t, first)
    bias = t["bias"] * u.mean()
    second = mhc.expand_combine(u, None, t["post"], first, t["res"])
    return (second, *mix(t, second, bias=bias, phi=t["phi"] * 2))


BOUNDARIES: dict[str, tuple[Program, dict[str, int]]] = {
    "plain": (_boundary, {"boundary": 1}),
    "viewed and back": (
        lambda t: mix(t, combine(t, t["x"]).flatten(-2).unflatten(-1, (N, C))),
        {"boundary": 1},
    ),
    "exchanged and back": (
        lambda t: mix(t, combine(t, t["x"]).transpose(-1, -2).permute(0, 1, 3, 2)),
        {"boundary": 1},
    ),
    "copied into another layout": (
        lambda t: mix(t, combine(t, t["x"]).transpose(-1, -2).contiguous().transpose(-1, -2)),
        {},
    ),
    "exchanged streams": (lambda t: mix(t, combine(t, t["x"]).flip(-2)), {}),
    "as many streams as columns": (
        # Reshaped to the same number of elements, and other streams.
        lambda t: mix(t, combine(t, t["x"]).view(*reversed(TOKENS), N, C)),
        {},
    ),
    "parameters computed between": (_hoisted, {"boundary": 1}),
    "parameters from the streams": (_dependent, {}),
    "parameters drawn between": (_random, {}),
    "written between": (_written, {}),
    "written after": (_written_after, {"boundary": 1}),
    "cast between": (_cast, {}),
    "float32 from float32 asked for": (
        lambda t: mix(t, combine(t, t["x"], out_dtype=torch.float32)),
        {"boundary": 1},
    ),
    "float32 from bfloat16": (
        lambda t: mix(t, combine(t, t["x"].bfloat16(), out_dtype=torch.float32)),
        {"boundary": 1},
    ),
    "float32 from float64": (
        lambda t: mix(t, combine(t, t["x"].double(), out_dtype=torch.float32)),
        {},
    ),
    "two mixes": (_two_mixes, {"boundary": 1}),
    "two combines": (_two_combines, {"boundary": 2}),
    "in a row": (_in_a_row, {"boundary": 2}),
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_boundaries(case: str) -> None:
    function, counts = BOUNDARIES[case]
    assert fused(function) == counts


def _behind(t: dict[str, Tensor], d_new: Tensor) -> tuple[Tensor, ...]:
    d_f, _, d_post, dx, d_res = combine_back(t, d_new, t["x"])
    return d_f, d_post, dx, d_res


BACKWARD: dict[str, tuple[Program, dict[str, int]]] = {
    "plain": (lambda t: _behind(t, mix_back(t, t["u"], t["g"])[0]), {"boundary_backward": 1}),
    "with a sum": (
        lambda t: _behind(t, t["g"] + mix_back(t, t["u"], t["g"])[0]),
        {"accumulate": 1, "boundary_backward": 1},
    ),
    "exchanged and back": (
        lambda t: _behind(t, mix_back(t, t["u"], t["g"])[0].transpose(-1, -2).transpose(-1, -2)),
        {"boundary_backward": 1},
    ),
    "bfloat16 streams between float32 ones": (
        lambda t: [v.float() for v in _behind(t, mix_back(t, t["u"].bfloat16(), t["g"].bfloat16())[0])],
        {"boundary_backward": 1},
    ),
    "float32 streams between float64 ones": (
        lambda t: _behind(t | {"x": t["x"].double()}, mix_back(t, t["u"], t["g"])[0]),
        {},
    ),
    "gradient of the streams read elsewhere": (
        lambda t: [*_behind(t, dx := mix_back(t, t["u"], t["g"])[0]), dx],
        {},
    ),
    "scaled between": (lambda t: _behind(t, 2 * mix_back(t, t["u"], t["g"])[0]), {}),
    "combine of what the mix computes": (
        # f is made from the mix's own results, so that the combine cannot stand where the mix is.
        lambda t: [
            *combine_back(t | {"f": t["f"] * (r := mix_back(t, t["u"], t["g"]))[3].sum()}, r[0], t["x"])[2:],
        ],
        {},
    ),
    "written between": (
        lambda t: [r := mix_back(t, t["u"], t["g"])[0], t["post"].mul_(2), *_behind(t, r)][2:],
        {},
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_boundaries_backward(case: str) -> None:
    function, counts = BACKWARD[case]
    assert fused(function) == counts


def test_streams_that_backward_does_not_read_are_not_computed_again() -> None:
    """A view that they are made of stays, where others read it."""

    def program(t: dict[str, Tensor]) -> list[Tensor]:
        f = t["f"].flatten().view(*TOKENS, C)
        first = combine(t, t["x"])
        second = combine(t | {"f": f}, first)
        return [mhc.aggregate(first, t["post"]), mhc.aggregate(second, t["post"]), mix_back(t, t["u"], first)[0]]

    module, before = _traced(program), _traced(program)
    assert +fuse(module.graph, layers=3) == {"combine_and_read": 2, "recompute": 1}
    module.recompile()
    given = _tensors().values()
    assert all(map(torch.allclose, module(*given), before(*given)))
    assert len(module.graph.find_nodes(op="call_function", target=mhc.expand_combine.default)) == 1


def test_random_draws_keep_their_order() -> None:
    """The operator would have to wait for the second draw, and the first draw for the operator."""

    def program(t: dict[str, Tensor]) -> Any:
        dx, _, _, dbias, _ = mix_back(t, t["u"], t["x"])
        first = torch.rand_like(dbias)
        second = torch.rand_like(t["g"])
        return dx + second, first

    module = _traced(program)
    before = module.code
    report = passes.fuse(module)
    assert "would change places" in report.errors[0]
    assert module.code == before
    with pytest.raises(RuntimeError, match="would change places"):
        fuse(module.graph)


class Counting(nn.Module):
    """Streams through sublayers, with a buffer written on the way, dropout, and streams changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Sublayer(), Sublayer(), Sublayer()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        self.seen.add_(x.detach().mean())
        x = self.second(nn.functional.dropout(x, 0.3))
        bias = x.mean(-1)
        x.mul_(1 + self.seen)
        return self.third(x), bias


@pytest.mark.usefixtures("fresh_dynamo")
def test_buffers_dropout_and_writes() -> None:
    model, x = Counting(), streams()
    other = copy.deepcopy(model)
    assert_same(check.evaluate(program(model).call, model, (x,)), check.evaluate(program(other, ()).call, other, (x,)))
    assert torch.equal(model.seen, other.seen)
    assert model.seen != 0


class Consumers(nn.Module):
    """One set of streams read by two sublayers, a head and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Sublayer(), Sublayer(), Sublayer()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        head = ops.head(x, self.first.phi[:4], self.first.scale[:1], self.first.bias[:4])
        return self.second(x), self.third(x), head, ops.contract(x), *self._reads(x)

    def _reads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.aggregate(x, x[..., 0]), ops.mix_streams(x, x[..., :3])


@pytest.mark.usefixtures("fresh_dynamo")
def test_streams_with_many_readers() -> None:
    found = fused_like_eager(Consumers(), (streams(),))
    # Seven operators add to the gradient of the streams inside, beside the mean and the slices; one to that outside.
    assert found.counts == {"accumulate": 8, "boundary": 1, "boundary_backward": 1}


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_same_sublayer_again() -> None:
    class Looped(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            for _ in range(2):
                (x,) = super().forward(x)
            return (x,)

    found = fused_like_eager(Looped(layers=2), (streams(),))
    assert found.counts == {"accumulate": 4, "boundary": 3, "boundary_backward": 3}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_results_of_equal_calls_are_tensors_of_their_own(fused: bool, view: bool) -> None:
    """torch makes one call of equal ones, if they have several results."""

    class Twice(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            found: list[Tensor] = []
            first, second = self.sublayers[0], self.sublayers[1]
            for _ in range(3):
                u, *_ = ops.generate_mix_and_aggregate(first(x) if fused else x, second.phi, second.scale, second.bias)
                found.append(u.flatten(0, 1) if view else u)
            return tuple(found)

    torch.manual_seed(0)
    model, x = Twice(layers=2), streams()
    found = fused_like_eager(model, (x,))
    one, other, third = found.call(x)
    expected = other.detach().clone()
    one.detach().zero_()
    third.detach().zero_()
    assert torch.equal(other, expected)
