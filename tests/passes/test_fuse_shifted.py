"""Reads that come one sublayer after their gates: each boundary is one operator forward and one backward."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from mhc_compile import hooks, records
from mhc_compile.passes.fuse.shifted import shifted_boundary_backward
from mhc_compile.testing.graph_text import graph_text
from tests.passes.fused import ALL, assert_same, fused_and_not, fused_like_eager, judge, program, streams
from tests.passes.shifted import ORDERS, Model, Stack
from tests.passes.test_fuse_recompute import _bytes, _kept_streams, _saved
from tests.passes.test_fuse_traps import NEEDS, N, Program, _traced, combine, combine_back, fused
from tests.zoo import check
from tests.zoo.common import BATCH, LENGTH, WIDTH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

mhc = torch.ops.mhc
NAMES = ("shifted_boundary", "shifted_boundary_backward")
LAST = {"combine_and_read": 1, "combine_and_read_backward": 1}


def _hidden(dtype: torch.dtype = torch.float32, *tokens: int) -> Tensor:
    return torch.randn(*(tokens or (BATCH, LENGTH)), WIDTH, dtype=dtype)


def _counts(layers: int) -> dict[str, int]:
    """Each set of streams but the last has three readers, and so two additions; the last set has one reader.

    The read and the mix of the first streams stay alone. The last streams have a read with given gates, and no mix.
    """
    shifted = {"shifted_boundary": layers - 1, "shifted_boundary_backward": layers - 1}
    return {"accumulate": 2 * layers} | shifted | LAST


def test_three_sublayers() -> None:
    model, x = Model(), _hidden()
    compiled = program(model)
    check.evaluate(compiled.call, model, (x,))
    assert compiled.counts == _counts(3)
    assert_expected_inline(
        graph_text(compiled.graphs[0]),
        """\
%0 = aggregate(x=f32[2, 3, 4, 24], h_pre=f32[2, 3, 4])
%1 = generate_mix(x=f32[2, 3, 4, 24], phi=f32[24, 96], scale=f32[3], bias=f32[24], pre_eps=1e-06,
    sinkhorn_steps=5)
%2 = shifted_boundary(f=f32[2, 3, 24](%0), h_post=%1.1, x=f32[2, 3, 4, 24], h_res=%1.2, h_pre=%1.0,
    phi=f32[24, 96], scale=f32[3], bias=f32[24], pre_eps=1e-06, sinkhorn_steps=5)
%3 = shifted_boundary(f=f32[2, 3, 24](%2.1), h_post=%2.3, x=%2.0, h_res=%2.4, h_pre=%2.2,
    phi=f32[24, 96], scale=f32[3], bias=f32[24], pre_eps=1e-06, sinkhorn_steps=5)
%4 = expand_combine_and_read(f=f32[2, 3, 24](%3.1), h_post=%3.3, x=%3.0, h_res=%3.4, h_pre=%3.2)
%5 = expand_combine_and_read_backward(d_layer_input=f32[2, 3, 24], f=f32[2, 3, 24](%3.1),
    h_post=%3.3, x=%3.0, h_res=%3.4, h_pre=%3.2, x_new=%4.0, needs=[True, False, True, True, True,
    True, False, False])
%6 = shifted_boundary_backward(d_x_new=%5.3, d_layer_input=f32[2, 3, 24](%5.0, %3.1),
    d_next_pre=%5.5, d_next_post=%5.2, d_next_res=%5.4, f=f32[2, 3, 24](%2.1), h_post=%2.3, x=%2.0,
    h_res=%2.4, h_pre=%2.2, phi=f32[24, 96], scale=f32[3], bias=f32[24], x_new=%3.0, h=f32[2, 3,
    24](%3.5), ms=f32[2, 3](%3.6), needs=[True, False, True, True, True, True, True, True, True,
    False], pre_eps=1e-06, sinkhorn_steps=5)
%7 = shifted_boundary_backward(d_x_new=%6.3, d_layer_input=f32[2, 3, 24](%6.0, %2.1),
    d_next_pre=%6.5, d_next_post=%6.2, d_next_res=%6.4, f=f32[2, 3, 24](%0), h_post=%1.1, x=f32[2,
    3, 4, 24], h_res=%1.2, h_pre=%1.0, phi=f32[24, 96], scale=f32[3], bias=f32[24], x_new=%2.0,
    h=f32[2, 3, 24](%2.5), ms=f32[2, 3](%2.6), needs=[True, False, True, True, True, True, True,
    True, True, False], pre_eps=1e-06, sinkhorn_steps=5)
%8 = generate_mix_backward(d_h_pre=%7.5, d_h_post=%7.2, d_h_res=%7.4, x=f32[2, 3, 4, 24],
    phi=f32[24, 96], scale=f32[3], bias=f32[24], h=f32[2, 3, 24](%1.3), ms=f32[2, 3](%1.4),
    d_x=%7.3, needs=[True, True, True, True, False], pre_eps=1e-06, sinkhorn_steps=5)
%9 = aggregate_backward(d_out=f32[2, 3, 24](%7.0, %0), x=f32[2, 3, 4, 24], h_pre=f32[2, 3, 4],
    d_x=%8.0, needs=[True, False])
return %4.1, %9.0, %7.0, %0, %8.1, %8.2, %8.3, %6.0, %2.1, %7.6, %7.7, %7.8, %5.0, %3.1, %6.6, %6.7, %6.8""",
    )


def test_float32_is_as_accurate_as_eager() -> None:
    assert judge(Model(), (_hidden(),)).counts == _counts(3)


def test_bfloat16_streams_are_as_accurate_as_eager() -> None:
    """Streams and layers in bfloat16, gates in float32."""
    model = Model()
    model.embedding.data = model.embedding.data.bfloat16()
    for sublayer in model.sublayers:
        sublayer.layer.bfloat16()  # type: ignore[operator]
    assert judge(model, (_hidden(torch.bfloat16),)).counts == _counts(3)


def test_bfloat16_is_as_accurate_as_eager() -> None:
    """Gradients of parameters are rounded on the way out, some of them before the read's backward is there."""
    assert judge(Model().bfloat16(), (_hidden(torch.bfloat16),)).counts == _counts(3)


@pytest.mark.parametrize("order", ORDERS)
def test_gates_are_made_at_any_time(order: str) -> None:
    assert fused_and_not(Stack(order=order), (streams(),)).counts == _counts(3)


@pytest.mark.slow
def test_dynamic_shapes() -> None:
    model = Stack()
    compiled = program(model, dynamic=True)
    for length in (5, 9):
        x = streams(length)
        assert_same(check.evaluate(compiled.call, model, (x,)), check.evaluate(model, model, (x,)))
    assert compiled.counts == {name: count * len(compiled.graphs) for name, count in _counts(3).items()}


@pytest.mark.parametrize("frozen", ["phi", "layer.", "sublayers.1"])
def test_frozen_parameters(frozen: str) -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert fused_like_eager(model, (streams(),)).counts == _counts(3)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tokens", [(BATCH, LENGTH), (1, 1)])
def test_inference(around: Any, tokens: tuple[int, int]) -> None:
    """A prompt, and a single token."""
    model, x = Model().eval(), _hidden(torch.float32, *tokens)
    compiled, apart = program(model), program(model, ())
    with around():
        results = [call(x) for call in (compiled.call, apart.call, model)]
    # One operator after the other, in the same order: not a bit differs.
    assert torch.equal(results[0], results[1])
    assert_same({"out": results[0]}, {"out": results[2]})
    assert compiled.counts == {"shifted_boundary": 2, "combine_and_read": 1}


@pytest.mark.parametrize(
    ("where", "forward"),
    # What is between two checkpoint regions belongs to neither: streams that are kept.
    [("sublayers", 0), ("all", 2), ("layers", 2)],
)
def test_checkpointing(where: str, forward: int) -> None:
    found = fused_like_eager(Stack(where=where), (streams(),)).counts
    assert [found.get(name, 0) for name in NAMES] == [forward, 2]


@pytest.mark.parametrize("where", [None, "sublayers", "all", "layers"])
def test_checkpointed_steps_are_as_accurate_as_eager(where: str | None) -> None:
    # Float64 and eager code come from a model without checkpoints that has the same parameters: the mode that runs
    # code in float64 does not reach what a checkpoint computes again.
    plain, model = Stack(), Stack(where=where)
    for own, shared in zip(model.modules(), plain.modules(), strict=True):
        own._parameters.update(shared._parameters)
    compiled = program(model)
    check.assert_as_accurate(check.compare(plain, compiled.call, compiled.report, (streams(),)))
    assert compiled.counts["shifted_boundary_backward"] == 2


@pytest.mark.parametrize("names", [NAMES, ()])
@pytest.mark.parametrize(("layers", "kept"), [(2, 2), (3, 1), (6, 0)])
def test_recompute(layers: int, kept: int, names: tuple[str, ...]) -> None:
    """The streams after every k-th layer are kept, of five inner ones, and nothing replaces the others."""
    model, x = Stack(6), streams()
    blocks, whole = program(model, names, layers), program(model, names)
    fewer, saved = _saved(blocks.call, model, x), _saved(whole.call, model, x)
    # The last streams are kept for the read that is the output; in a block they are made again like the others.
    last = 1 if 6 % layers else 0
    assert _kept_streams(saved, x) == 6
    assert _kept_streams(fewer, x) == kept + 1 - last
    assert _bytes(saved) - _bytes(fewer) == (5 - kept + last) * x.nbytes
    assert_same(check.evaluate(blocks.call, model, (x,)), check.evaluate(model, model, (x,)))


@pytest.mark.parametrize("name", NAMES)
def test_a_fusion_is_left_out_by_its_name(name: str) -> None:
    fuse = hooks.FusePass({f"mhc.fuse.{name}": False})
    assert fuse.uuid() != hooks.FusePass().uuid()
    model = Stack()
    compiled = program(model, [each for each in ALL if fuse.options[f"mhc.fuse.{each}"]])
    check.evaluate(compiled.call, model, (streams(),))
    # Their reads are fused with their writes all the same.
    others = {name.replace("shifted_boundary", "combine_and_read"): 3}
    assert compiled.counts == {key: count for key, count in _counts(3).items() if key != name} | others


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("tokens", [(BATCH, LENGTH), (1, 1)])
def test_training_through_inductor(tokens: tuple[int, int]) -> None:
    model, x = Model(), _hidden(torch.float32, *tokens)
    compiled = torch.compile(model, backend="mhc", options={"mhc.recompute": 2})
    results = check.evaluate(compiled, model, (x,))
    assert records.last().errors == []
    assert dict(records.last().fusions) == _counts(3) | {"recompute": 2}
    assert {name: records.last().lowered[name] for name in NAMES} == dict.fromkeys(NAMES, 2)
    assert_same(results, check.evaluate(model, model, (x,)))


def read(t: dict[str, Tensor], x: Tensor, h_pre: Tensor | None = None) -> Tensor:
    return mhc.aggregate(x, t["post"] if h_pre is None else h_pre)  # type: ignore[no-any-return]


def gates(t: dict[str, Tensor], x: Tensor, **changed: Any) -> tuple[Tensor, ...]:
    parameters = {"phi": t["phi"], "scale": t["scale"], "bias": t["bias"]} | changed
    return mhc.generate_mix(x, *parameters.values(), sinkhorn_steps=3)  # type: ignore[no-any-return]


def _plain(t: dict[str, Tensor], **scalars: Any) -> list[Tensor]:
    new = combine(t, t["x"], **scalars)
    return [new, read(t, new), *gates(t, new)]


def _written(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"])
    u = read(t, new)
    t["phi"].mul_(0.5)
    return [u, *gates(t, new)]


def _written_after(t: dict[str, Tensor]) -> list[Tensor]:
    results = _plain(t)
    t["post"].mul_(0.5)
    return results


def _cast(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"]).bfloat16()
    return [value.float() for value in (read(t, new), *gates(t, new))]


def _from_the_mix(t: dict[str, Tensor]) -> list[Tensor]:
    """The usual order."""
    new = combine(t, t["x"])
    h_pre, *others = gates(t, new)
    return [read(t, new, h_pre), *others]


def _from_the_read(t: dict[str, Tensor]) -> list[Tensor]:
    new = combine(t, t["x"])
    u = read(t, new)
    return [u, *gates(t, new, bias=t["bias"] * u.mean())]


def _in_a_row(t: dict[str, Tensor]) -> list[Tensor]:
    """What the second mix is given comes from the first, which comes after the second combine."""
    first = combine(t, t["x"])
    u = read(t, first)
    second = mhc.expand_combine(u, None, t["post"], first, t["res"])
    h_pre, *others = gates(t, first)
    return [second, read(t, second), *gates(t, second, bias=t["bias"] * h_pre.mean()), *others]


def _both(t: dict[str, Tensor]) -> list[Tensor]:
    """A mix with a read of its own is a boundary, whatever else reads the streams."""
    new = combine(t, t["x"])
    own = mhc.generate_mix_and_aggregate(new, t["phi"], t["scale"], t["bias"])
    return [*own, read(t, new), *gates(t, new)]


ONE = {"shifted_boundary": 1}
# The read and the write alone.
READ = {"combine_and_read": 1}
FORWARD: dict[str, tuple[Program, dict[str, int]]] = {
    "read first": (_plain, ONE),
    "mix first": (lambda t: [*gates(t, new := combine(t, t["x"])), read(t, new)], ONE),
    "viewed and back": (
        lambda t: [read(t, new := combine(t, t["x"])), *gates(t, new.flatten(-2).unflatten(-1, (N, -1)))],
        ONE,
    ),
    "two reads and two mixes": (
        lambda t: [
            *(read(t, new := combine(t, t["x"])), read(t, new, t["post"] * 2)),
            *(*gates(t, new), *gates(t, new, bias=t["bias"] * 2)),
        ],
        ONE,
    ),
    "the second read alone can": (
        lambda t: [read(t, new := combine(t, t["x"]), new.mean(-1)), read(t, new), *gates(t, new)],
        ONE,
    ),
    "gates of the read made between, of f": (
        lambda t: [read(t, new := combine(t, t["x"]), t["f"][..., :N].sigmoid()), *gates(t, new)],
        ONE,
    ),
    "parameters made between": (
        lambda t: [read(t, new := combine(t, t["x"])), *gates(t, new, phi=torch.cat([t["phi"][:4], t["phi"][4:] * 2]))],
        ONE,
    ),
    "written after": (_written_after, ONE),
    "in a row": (_in_a_row, {"shifted_boundary": 2}),
    "float32 from bfloat16": (
        lambda t: _plain(t | {"x": t["x"].bfloat16()}, out_dtype=torch.float32),
        ONE,
    ),
    "behind one without a read": (
        lambda t: [
            *gates(t, new := combine(t, t["x"])),
            *(read(t, newer := combine(t, new), t["post"]), *gates(t, newer)),
        ],
        ONE,
    ),
    "boundary": (_both, {"boundary": 1}),
    "float32 from float64": (
        lambda t: _plain(t | {"x": t["x"].double()}, out_dtype=torch.float32),
        {},
    ),
    "gates of the read from the new streams": (
        lambda t: [read(t, new := combine(t, t["x"]), new.mean(-1)), *gates(t, new)],
        {},
    ),
    "gates of the read from the mix": (_from_the_mix, {}),
    "gates of the read drawn between": (
        lambda t: [read(t, new := combine(t, t["x"]), torch.rand_like(t["post"])), *gates(t, new)],
        {},
    ),
    "parameters from what is read": (_from_the_read, READ),
    "old streams are read": (lambda t: [read(t, t["x"]), *gates(t, combine(t, t["x"]))], {}),
    "old streams are mixed": (lambda t: [read(t, combine(t, t["x"])), *gates(t, t["x"])], READ),
    "other streams are read": (lambda t: [read(t, (new := combine(t, t["x"])) * 2), *gates(t, new)], {}),
    "streams in another order are mixed": (
        lambda t: [read(t, new := combine(t, t["x"])), *gates(t, new.flip(-2))],
        READ,
    ),
    "no mix": (lambda t: [read(t, combine(t, t["x"]))], READ),
    "no read": (lambda t: gates(t, combine(t, t["x"])), {}),
    "written between": (_written, READ),
    "cast between": (_cast, {}),
}


@pytest.mark.parametrize("case", FORWARD)
def test_forward(case: str) -> None:
    function, counts = FORWARD[case]
    assert fused(function) == counts


def read_back(t: dict[str, Tensor], x: Tensor, d_x: Tensor | None = None, d_u: Tensor | None = None) -> Any:
    return mhc.aggregate_backward(t["u"] if d_u is None else d_u, x, t["post"], [True, True], d_x)


def gates_back(t: dict[str, Tensor], x: Tensor, d_x: Tensor | None = None) -> Any:
    saved = (x, t["phi"], t["scale"], t["bias"], None, t["h"], t["ms"], NEEDS, d_x)
    return mhc.generate_mix_backward(t["post"], t["post"] * 2, t["res"], None, None, *saved, sinkhorn_steps=3)[:4]


def _behind(t: dict[str, Tensor], d_new: Tensor) -> list[Tensor]:
    d_f, _, d_post, dx, d_res = combine_back(t, d_new, t["x"])
    return [d_f, d_post, dx, d_res]


def _made_between(t: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of parameters are used before the read's backward is there."""
    dx, *parameters = gates_back(t, t["g"])
    used = [value.bfloat16() for value in parameters]
    d_new, d_pre = read_back(t, t["g"], dx)
    return [*_behind(t, d_new), d_pre, *(value.float() for value in used)]


def _drawn_between(t: dict[str, Tensor]) -> list[Tensor]:
    dx, *parameters = gates_back(t, t["g"])
    noise = [torch.rand_like(value) * value for value in parameters]
    return [*_behind(t, read_back(t, t["g"], dx)[0]), *noise]


def _read_of_what_the_mix_makes(t: dict[str, Tensor]) -> list[Tensor]:
    dx, _, _, dbias = gates_back(t, t["g"])
    return _behind(t, read_back(t, t["g"], dx, t["u"] * dbias.sum())[0])


def _combine_of_what_the_mix_makes(t: dict[str, Tensor]) -> list[Tensor]:
    dx, _, _, dbias = gates_back(t, t["g"])
    return _behind(t | {"f": t["f"] * dbias.sum()}, read_back(t, t["g"], dx)[0])


def _combine_of_what_the_read_makes(t: dict[str, Tensor]) -> list[Tensor]:
    d_new, d_pre = read_back(t, t["g"], gates_back(t, t["g"])[0])
    return _behind(t | {"post": t["post"] * d_pre}, d_new)


def _written_between(t: dict[str, Tensor]) -> list[Tensor]:
    dx = gates_back(t, t["g"])[0]
    t["post"].mul_(2)
    return _behind(t, read_back(t, t["g"], dx)[0])


def _read_elsewhere(t: dict[str, Tensor], which: int) -> list[Tensor]:
    dx = gates_back(t, t["g"])[0]
    d_new = read_back(t, t["g"], dx)[0]
    return [*_behind(t, d_new), (dx, d_new)[which]]


ONE_BACKWARD = {"shifted_boundary_backward": 1}
BACKWARD: dict[str, tuple[Program, dict[str, int]]] = {
    "read last": (lambda t: _behind(t, read_back(t, t["g"], gates_back(t, t["g"])[0])[0]), ONE_BACKWARD),
    "mix last": (lambda t: _behind(t, gates_back(t, t["g"], read_back(t, t["g"])[0])[0]), ONE_BACKWARD),
    "onto a gradient from outside": (
        lambda t: _behind(t, gates_back(t, t["g"], read_back(t, t["g"], t["x"] * 2)[0])[0]),
        ONE_BACKWARD,
    ),
    "with sums": (
        lambda t: _behind(t, t["x"] * 2 + operator.add(read_back(t, t["g"])[0], gates_back(t, t["g"])[0])),
        {"accumulate": 2} | ONE_BACKWARD,
    ),
    "exchanged and back": (
        lambda t: _behind(t, read_back(t, t["g"], gates_back(t, t["g"])[0].mT.mT)[0].mT.mT),
        ONE_BACKWARD,
    ),
    "made between of the mix's results": (_made_between, ONE_BACKWARD),
    "of other streams": (lambda t: _behind(t, read_back(t, t["x"], gates_back(t, t["g"])[0])[0]), {}),
    "two reads": (lambda t: _behind(t, read_back(t, t["g"], read_back(t, t["g"])[0])[0]), {}),
    "a read alone": (lambda t: _behind(t, read_back(t, t["g"])[0]), {}),
    "scaled between": (lambda t: _behind(t, read_back(t, t["g"], 2 * gates_back(t, t["g"])[0])[0]), {}),
    "scaled behind": (lambda t: _behind(t, 2 * read_back(t, t["g"], gates_back(t, t["g"])[0])[0]), {}),
    "the mix's gradient read elsewhere": (lambda t: _read_elsewhere(t, 0), {}),
    "the read's gradient read elsewhere": (lambda t: _read_elsewhere(t, 1), {}),
    "drawn between of the mix's results": (_drawn_between, {}),
    "read of what the mix makes": (_read_of_what_the_mix_makes, {}),
    "combine of what the mix makes": (_combine_of_what_the_mix_makes, {}),
    "combine of what the read makes": (_combine_of_what_the_read_makes, {}),
    "written between": (_written_between, {}),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_backward(case: str) -> None:
    function, counts = BACKWARD[case]
    assert fused(function) == counts


def test_the_graph_stays_in_order() -> None:
    """For the fusions that come after: they ask which of two nodes is first."""
    graph = _traced(_made_between).graph
    assert shifted_boundary_backward(graph) == 1
    graph.lint()
