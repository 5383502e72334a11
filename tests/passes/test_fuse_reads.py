"""A write with what reads its streams without gates of their own: one operator forward and one backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from mhc_compile import ops
from mhc_compile.testing.graph_text import graph_text
from tests.passes.fused import (
    assert_same,
    fused_and_not,
    fused_like_eager,
    judge,
    program,
    streams,
)
from tests.passes.test_fuse_shifted import read, read_back
from tests.passes.test_fuse_traps import N, Program, combine, combine_back, fused
from tests.zoo import check
from tests.zoo.common import STREAMS, WIDTH, CheapLayer, random_parameter, random_phi

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

mhc = torch.ops.mhc


class Fixed(nn.Module):
    """A sublayer whose gates are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.post = random_parameter(STREAMS), random_parameter(STREAMS)
        self.res = random_parameter(STREAMS, STREAMS)
        self.layer = CheapLayer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[:-2]
        f = self.layer(ops.aggregate(x, self.pre.expand(*tokens, -1)))
        post, res = self.post.expand(*tokens, -1), self.res.expand(*tokens, -1, -1)
        return ops.expand_combine(f, None, post, x, res)


class Own(nn.Module):
    """A sublayer that makes its gates from one projection, in a way that no operator does."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = random_phi(3 * STREAMS, STREAMS * WIDTH)
        self.layer = CheapLayer(WIDTH)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, ms = ops.projection(x, self.phi)
        pre, post, turn = (h * torch.rsqrt(ms + 1e-6).unsqueeze(-1)).split(STREAMS, -1)
        return pre.softmax(-1), post.cos(), torch.diag_embed(turn.tanh())

    def forward(self, x: Tensor) -> Tensor:
        pre, post, res = self.gates(x)
        return ops.expand_combine(self.layer(ops.aggregate(x, pre)), None, post, x, res)


class Each(Own):
    """Each stream makes the gates of its own, and its row of the matrix (arXiv 2409.19606)."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = random_phi(STREAMS + 2, WIDTH)
        self.weight = random_parameter(WIDTH, mean=1.0)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, ms = ops.projection(x.unsqueeze(-2), self.phi, self.weight)
        pre, post, res = (h * torch.rsqrt(ms + 1e-6).unsqueeze(-1)).split([1, 1, STREAMS], -1)
        return pre.squeeze(-1).tanh(), post.squeeze(-1).cos(), res.tanh()


class Chain(nn.Module):
    """Sublayers one after the other; with `late` each reads with the gates that the one before has made."""

    def __init__(self, kind: type[Fixed] | type[Own], layers: int = 3, late: bool = False) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(kind() for _ in range(layers))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        pre = x.mean(-1)
        for sublayer in self.sublayers:
            if self.late:
                read_with, (pre, post, res) = pre, sublayer.gates(x)
                x = ops.expand_combine(sublayer.layer(ops.aggregate(x, read_with)), None, post, x, res)
            else:
                x = sublayer(x)
        return x


def _counts(layers: int, readers: int) -> dict[str, int]:
    """Streams have a write and so many other readers, but the last, which nothing reads."""
    both = {"combine_and_read": layers - 1, "combine_and_read_backward": layers - 1}
    return {"accumulate": readers * layers} | both


KINDS = {"fixed": (Fixed, False, 1), "own": (Own, False, 2), "own, late": (Own, True, 2)}
KINDS |= {"each": (Each, False, 2), "each, late": (Each, True, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_accurate_as_eager(kind: str) -> None:
    sublayer, late, readers = KINDS[kind]
    assert judge(Chain(sublayer, late=late), (streams(),)).counts == _counts(3, readers)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_accurate_as_eager(kind: str) -> None:
    sublayer, late, readers = KINDS[kind]
    model = Chain(sublayer, late=late)
    for each in model.sublayers:
        each.layer.bfloat16()  # type: ignore[operator]
    assert judge(model, (streams().bfloat16(),)).counts == _counts(3, readers)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters(kind: str) -> None:
    sublayer, late, readers = KINDS[kind]
    model = Chain(sublayer, late=late)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("layer.weight"))
    assert fused_like_eager(model, (streams(),)).counts == _counts(3, readers)


@pytest.mark.parametrize("kind", KINDS)
def test_inference(kind: str) -> None:
    sublayer, late, _ = KINDS[kind]
    model, x = Chain(sublayer, late=late).eval(), streams()
    compiled, apart = program(model), program(model, ())
    with torch.no_grad():
        results = [call(x) for call in (compiled.call, apart.call, model)]
    # One operator after the other, in the same order: not a bit differs.
    assert torch.equal(results[0], results[1])
    assert_same({"out": results[0]}, {"out": results[2]})
    assert compiled.counts == {"combine_and_read": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_shapes(kind: str) -> None:
    sublayer, late, readers = KINDS[kind]
    model = Chain(sublayer, late=late)
    compiled = program(model, dynamic=True)
    for length in (5, 9):
        x = streams(length)
        assert_same(check.evaluate(compiled.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert compiled.counts == {name: count * len(compiled.graphs) for name, count in _counts(3, readers).items()}


@pytest.mark.parametrize("layers", [2, 3])
def test_recompute(layers: int) -> None:
    """What writes streams and reads them in one is computed again as a write."""
    model, x = Chain(Own, 6), streams()
    blocks = program(model, layers=layers)
    assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert blocks.counts["recompute"] > 0


def test_the_graph_of_own_gates() -> None:
    """The gradient of the gates of a read goes through the program that made them before that of the projection."""
    model, x = Chain(Own, 2), streams()
    compiled = program(model)
    check.evaluate(compiled.call, model, (x,))
    assert_expected_inline(
        graph_text(compiled.graphs[0]),
        """\
%0 = projection(x=f32[2, 3, 4, 24], phi=f32[12, 96])
%1 = aggregate(x=f32[2, 3, 4, 24], h_pre=f32[2, 3, 4](%0.0, %0.1))
%2 = expand_combine_and_read(f=f32[2, 3, 24](%1), h_post=f32[2, 3, 4](%0.0, %0.1), x=f32[2, 3, 4,
    24], h_res=f32[2, 3, 4, 4](%0.0, %0.1), phi=f32[12, 96])
%3 = aggregate(x=%2.0, h_pre=f32[2, 3, 4](%2.2, %2.3))
%4 = expand_combine(f=f32[2, 3, 24](%3), h_post=f32[2, 3, 4](%2.2, %2.3), x=%2.0, h_res=f32[2, 3, 4,
    4](%2.2, %2.3))
%5 = expand_combine_backward(d_x_new=f32[2, 3, 4, 24], f=f32[2, 3, 24](%3), h_post=f32[2, 3,
    4](%2.2, %2.3), x=%2.0, h_res=f32[2, 3, 4, 4](%2.2, %2.3), needs=[True, False, True, True,
    True])
%6 = aggregate_backward(d_out=f32[2, 3, 24](%5.0, %3), x=%2.0, h_pre=f32[2, 3, 4](%2.2, %2.3),
    needs=[False, True])
%7 = expand_combine_and_read_backward(d_x_new=%5.3, d_layer_input=f32[2, 3, 24](%5.0, %3),
    d_h=f32[2, 3, 12](%6.1, %2.2, %2.3, %5.2, %5.4), d_ms=f32[2, 3](%6.1, %2.2, %2.3, %5.2, %5.4),
    f=f32[2, 3, 24](%1), h_post=f32[2, 3, 4](%0.0, %0.1), x=f32[2, 3, 4, 24], h_res=f32[2, 3, 4,
    4](%0.0, %0.1), h_pre=f32[2, 3, 4](%2.2, %2.3), phi=f32[12, 96], x_new=%2.0, needs=[True, False,
    True, True, True, False, True, False])
%8 = aggregate_backward(d_out=f32[2, 3, 24](%7.0, %1), x=f32[2, 3, 4, 24], h_pre=f32[2, 3, 4](%0.0,
    %0.1), d_x=%7.3, needs=[True, True])
%9 = projection_backward(d_h=f32[2, 3, 12](%8.1, %0.0, %0.1, %7.2, %7.4), d_ms=f32[2, 3](%8.1, %0.0,
    %0.1, %7.2, %7.4), x=f32[2, 3, 4, 24], phi=f32[12, 96], d_x=%8.0, needs=[True, True, False])
return %4, %9.0, %9.1, %7.0, %1, %7.6, %5.0, %3""",
    )


FORWARD: dict[str, tuple[Program, int]] = {
    "a read": (lambda t: [read(t, new := combine(t, t["x"])), new], 1),
    "a projection": (lambda t: [*mhc.projection(new := combine(t, t["x"]), t["phi"]), new], 1),
    "both": (lambda t: [read(t, new := combine(t, t["x"])), *mhc.projection(new, t["phi"])], 1),
    "both, the projection first": (lambda t: [*mhc.projection(new := combine(t, t["x"]), t["phi"]), read(t, new)], 1),
    "a read with gates of the projection": (
        lambda t: [*(h := mhc.projection(new := combine(t, t["x"]), t["phi"])), read(t, new, h[0][..., :N].sigmoid())],
        1,
    ),
    "two reads": (lambda t: [read(t, new := combine(t, t["x"])), read(t, new, t["post"] * 2)], 1),
    "gates made between": (lambda t: [read(t, combine(t, t["x"]), t["f"][..., :N].sigmoid())], 1),
    "float32 from bfloat16": (
        lambda t: [
            read(t, new := combine(t, t["x"].bfloat16(), out_dtype=torch.float32)),
            *mhc.projection(new, t["phi"]),
        ],
        1,
    ),
    "viewed and back": (lambda t: [read(t, combine(t, t["x"]).flatten(-2).unflatten(-1, (N, -1)))], 1),
    "gates of the new streams": (lambda t: [read(t, new := combine(t, t["x"]), new.mean(-1))], 0),
    "other streams": (lambda t: [read(t, combine(t, t["x"]) * 2)], 0),
    "streams in another order": (lambda t: [read(t, combine(t, t["x"]).flip(-2))], 0),
    "each stream alone": (lambda t: [*mhc.projection(combine(t, t["x"]).unsqueeze(-2), _of_one(t))], 1),
    "each stream alone, and a read": (
        lambda t: [*mhc.projection((new := combine(t, t["x"])).unsqueeze(-2), _of_one(t)), read(t, new)],
        1,
    ),
    "each token of all streams alone": (
        lambda t: [*mhc.projection(combine(t, t["x"]).flatten(0, -2)[:, None], _of_one(t))],
        0,
    ),
    "every channel a stream": (
        lambda t: [*mhc.projection((new := combine(t, t["x"])).mT.contiguous(), t["phi"]), new],
        0,
    ),
    "old streams": (lambda t: [read(t, t["x"]), combine(t, t["x"])], 0),
}


@pytest.mark.parametrize("case", FORWARD)
def test_forward(case: str) -> None:
    function, count = FORWARD[case]
    assert fused(function).get("combine_and_read", 0) == count


def test_a_write_between_stays_between() -> None:
    def written(t: dict[str, Tensor]) -> list[Tensor]:
        new = combine(t, t["x"])
        t["post"].mul_(0.5)
        return [read(t, new), new]

    assert fused(written) == {}


def test_logits_of_another_layout_stay_those_of_the_projection() -> None:
    def transpose(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=mhc.projection.default):
            for item in node.users:
                if item.meta["val"].dim() == 3:
                    item.meta["val"] = item.meta["val"].mT.contiguous().mT

    assert fused(lambda t: [*mhc.projection(combine(t, t["x"]), t["phi"])], transpose) == {}


def _of_one(t: dict[str, Tensor]) -> Tensor:
    """phi of one stream."""
    return t["phi"][:, : t["x"].shape[-1]].contiguous()


def projected_back(t: dict[str, Tensor], x: Tensor, d_x: Tensor | None = None, d_h: Tensor | None = None) -> Any:
    d_h = t["h"] if d_h is None else d_h
    return mhc.projection_backward(d_h, t["ms"], x, t["phi"], None, [True, True, False], d_x)[:2]


def _behind(t: dict[str, Tensor], d_new: Tensor) -> list[Tensor]:
    d_f, _, d_post, dx, d_res = combine_back(t, d_new, t["x"])
    return [d_f, d_post, dx, d_res]


def _own(t: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of h is made from that of the read's gates."""
    new = combine(t, t["x"])
    dx, d_pre = read_back(t, new, t["g"])
    d_new, d_phi = projected_back(t, new, dx, t["h"] * d_pre.sum(-1, keepdim=True))
    return [*_behind(t, d_new), d_pre, d_phi, new]


def _each(t: dict[str, Tensor], first: bool = False) -> list[Tensor]:
    """As `_own`, each stream projected alone; `first`: before the read."""
    new, d_x, d_pre = combine(t, t["x"]), t["g"], t["post"]
    if not first:
        d_x, d_pre = read_back(t, new, d_x)
    d_h = t["h"].unsqueeze(-2) * d_pre.unsqueeze(-1)
    d_ms = t["ms"].unsqueeze(-1) * d_pre
    each = mhc.projection_backward(
        d_h, d_ms, new.unsqueeze(-2), _of_one(t), None, [True, True, False], d_x.unsqueeze(-2)
    )
    d_new = each[0].squeeze(-2)
    if first:
        d_new, d_pre = read_back(t, new, d_new)
    return [*_behind(t, d_new), d_pre, each[1], new]


def _of_flat_tokens(t: dict[str, Tensor]) -> list[Tensor]:
    """The read has its tokens in one dimension, and the write has not."""
    new = combine(t, t["x"])
    d_new, d_pre = mhc.aggregate_backward(
        t["f"].flatten(0, -2), new.flatten(0, -3), t["post"].flatten(0, -2), [True, True], t["g"].flatten(0, -3)
    )
    return [*_behind(t, d_new.view_as(new)), d_pre, new]


def _made_between(t: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of phi is used before the read's backward is there."""
    new = combine(t, t["x"])
    dx, d_phi = projected_back(t, new, t["g"])
    used = d_phi.bfloat16()
    d_new, d_pre = read_back(t, new, dx)
    return [*_behind(t, d_new), d_pre, used.float()]


def _straight_through(t: dict[str, Tensor]) -> list[Tensor]:
    """What is read is not what was written, and its gradient goes through all the same."""
    new = combine(t, t["x"])
    return [*_behind(t, read_back(t, new.round(), t["g"])[0]), new]


def _another_write(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t | {"f": t["f"] * 2}, t["x"])
    return [*_behind(t, read_back(t, new, t["g"])[0]), new]


def _scaled_between(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"])
    dx, d_pre = read_back(t, new, t["g"])
    return [*_behind(t, projected_back(t, new, 2 * dx)[0]), d_pre]


def _read_elsewhere(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"])
    d_new, d_pre = read_back(t, new, t["g"])
    return [*_behind(t, d_new), d_pre, d_new]


def _projection_alone(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"])
    return [*_behind(t, projected_back(t, new, t["g"])[0]), new]


BACKWARD: dict[str, tuple[Program, int]] = {
    "a read": (lambda t: [*_behind(t, read_back(t, new := combine(t, t["x"]), t["g"])[0]), new], 1),
    "the only reader": (lambda t: [*_behind(t, read_back(t, new := combine(t, t["x"]))[0]), new], 1),
    "gates of the projection": (_own, 1),
    "the projection's gradient first": (_made_between, 1),
    "each stream alone": (_each, 1),
    "each stream alone, its gradient first": (lambda t: _each(t, first=True), 1),
    "tokens in another shape": (_of_flat_tokens, 0),
    "straight through": (_straight_through, 0),
    "of another write": (_another_write, 0),
    "scaled between": (_scaled_between, 0),
    "read elsewhere": (_read_elsewhere, 0),
    "a projection alone": (_projection_alone, 0),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_backward(case: str) -> None:
    function, count = BACKWARD[case]
    assert fused(function).get("combine_and_read_backward", 0) == count


def test_fused_and_not_are_alike() -> None:
    assert fused_and_not(Chain(Own), (streams(),)).counts == _counts(3, 2)
