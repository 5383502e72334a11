"""One value of the program stays one value: writes into what a rewrite makes reach all that shares its memory.

Each program computes one sublayer, writes into one of its values or returns several tensors that share memory, and is
compared with eager: values, gradients, strides, and which results share memory. AOTAutograd runs the rewritten graphs,
since it has ways of its own with results that are views.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import mhc_compile.ops  # noqa: F401  (registers the operators that the passes insert)
from mhc_compile import passes
from mhc_compile.passes.beside import REASON
from mhc_compile.passes.report import Report

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
N, C = 4, 8
ROWS = N * N + 2 * N

Use = Callable[[Tensor], Any]


@torch.library.custom_op("mhc_test::double_in_place", mutates_args={"x"})
def double_in_place(x: Tensor) -> None:
    x.mul_(2.0)


@double_in_place.register_fake
def _(x: Tensor) -> None:
    return None


def _nested(h: Tensor) -> None:
    """A write within a checkpoint region."""
    checkpoint(lambda t: t.mul_(0.5).sum(), h, use_reentrant=False)


def _under_no_grad(h: Tensor) -> None:
    with torch.no_grad():
        h.add_(0.25)


def _set_item(h: Tensor) -> None:
    h[:, -1] = h[:, -1] * 0.5


def _set_slice(h: Tensor) -> None:
    h[..., :2] = 0.5


def _set_by_mask(h: Tensor) -> None:
    h[h > 0.3] = 0.1


# A write into a value of the program, [batch, tokens, ...], of which the views cover all where there is one token.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda h: h.add_(1.0),
    "select": lambda h: h.select(1, -1).add_(1.0),
    "narrow": lambda h: h.narrow(1, 0, 1).mul_(0.5),
    "split": lambda h: h.split(1, 1)[0].mul_(0.5),
    "chunk": lambda h: h.chunk(1, -1)[0].sub_(0.125),
    "unbind": lambda h: h.unbind(1)[0].add_(1.0),
    "setitem": _set_item,
    "set_slice": _set_slice,
    "set_by_mask": _set_by_mask,
    "copy_": lambda h: h.copy_(h.flip(-1)),
    "out": lambda h: torch.add(h, 1.0, out=h),
    "foreach": lambda h: torch._foreach_add_([h.select(1, 0)], 1.0),
    "index_put_": lambda h: h.index_put_((torch.tensor([0]),), torch.tensor(0.5)),
    "index_add_": lambda h: h.index_add_(1, torch.tensor([0]), torch.ones_like(h[:, :1])),
    "masked_fill_": lambda h: h.masked_fill_(h > 0.3, 0.1),
    "fill_of_view_of_view": lambda h: h.transpose(0, 1)[0].narrow(0, 0, 1).fill_(0.5),
    "view_as_one_row": lambda h: h.view(-1)[:3].add_(1.0),
    "detached": lambda h: h.detach().mul_(0.5),
    "data": lambda h: h.data.mul_(0.5),
    "no_grad": _under_no_grad,
    "custom_operator": lambda h: torch.ops.mhc_test.double_in_place(h.detach()),
    "nested": _nested,
    "relu_in_place": lambda h: F.relu(h, True),
    "relu_of_view": lambda h: F.relu(h.select(1, -1), inplace=True),
    "iadd": lambda h: h.select(1, 0).__iadd__(1.0),
}

# Results that share the memory of a value.
ALIASES: dict[str, Use] = {
    "itself": lambda h: (h, h),
    "detach": lambda h: (h.detach(), h),
    "detach alone": lambda h: h.detach(),
    "detach twice": lambda h: (h.detach(), h.detach()),
    "data": lambda h: (h, h.data),
    "select": lambda h: (h, h.select(1, -1)),
    "select alone": lambda h: h.select(1, -1),
    "two views": lambda h: (h.select(1, 0), h.narrow(1, 0, 1)),
    "detached view": lambda h: (h.select(1, 0).detach(), h),
    "unbind": lambda h: (*h.unbind(1), h),
    "view_as": lambda h: (h.view_as(h), h),
    "transpose": lambda h: (h.transpose(0, 1), h, h.detach()),
    "flat": lambda h: (h.reshape(-1), h),
    "copy": lambda h: (h.clone(), h, h.contiguous()),
    "cast": lambda h: (h.to(torch.float64), h.float(), h),
    "expand": lambda h: (h.unsqueeze(0).expand(2, *h.shape), h),
}

MODES: dict[str, Callable[[], Any]] = {
    "train": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
GATES = ("pre", "post", "res")
VALUES = ("h", "y", *GATES)
THOROUGH = pytest.mark.thorough


class Sublayer(nn.Module):
    """Streams [batch, tokens, n, C] -> [batch, tokens, n, C]; `uses` are called with its values once these are made."""

    def __init__(self, uses: dict[str, Use], layout: str = "plain") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.phi = nn.Parameter(torch.randn(ROWS, N * C, generator=generator) * 0.2)
        self.bias = nn.Parameter(torch.randn(ROWS, generator=generator) * 0.3)
        self.weight = nn.Parameter(torch.randn(C, C, generator=generator) * 0.3)
        self.uses, self.layout = uses, layout

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        used: list[Any] = []
        x = self.sublayer(x, self.uses, used)
        return self.sublayer(x, {}, used), used  # what the first wrote or returned is read by the second

    def sublayer(self, x: Tensor, uses: dict[str, Use], used: list[Any]) -> Tensor:
        def made(name: str, value: Tensor) -> Tensor:
            if name in uses:
                used.append(uses[name](value))
            return value

        flat = x.flatten(-2)
        mix = F.linear(flat, self.phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6) + self.bias
        res = mix[..., 2 * N :]
        p = torch.softmax(res.unflatten(-1, (N, N)), -1) + 1e-6
        for _ in range(2):
            p = p / (p.sum(-2, keepdim=True) + 1e-6)
            p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = made("res", p)
        pre, post = self.gates(mix)
        pre, post = made("pre", pre), made("post", post)
        h = made("h", (pre.unsqueeze(-1) * x).sum(-2))
        f = torch.tanh(h @ self.weight)
        return made("y", self.written(x, f, post, p))

    def gates(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(mix[..., :N]), 2 * torch.sigmoid(mix[..., N : 2 * N])

    def written(self, x: Tensor, f: Tensor, post: Tensor, p: Tensor) -> Tensor:
        if self.layout == "permuted":  # strides that the operator does not make
            return (x.transpose(-1, -2) @ p).transpose(-1, -2) + post[..., None] * f[..., None, :]
        return post.unsqueeze(-1) * f.unsqueeze(-2) + p.transpose(-1, -2) @ x


def _results(program: Callable[..., Any], model: nn.Module, x: Tensor, mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """All results of the program, and the gradients of what has any."""
    model.zero_grad()
    x = x.clone().requires_grad_(mode == "train")
    with MODES[mode]():
        out = torch.utils._pytree.tree_leaves(program(x))
    results = [value for value in out if isinstance(value, Tensor)]
    if mode != "train":
        return results, []
    weight = torch.linspace(-1, 1, 10**4, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for value in results:
        if value.requires_grad:
            total = total + (value.double().flatten() * weight[: value.numel()]).sum()
    total.backward()
    return results, [p.grad for p in (x, *model.parameters()) if p.grad is not None]


def _sharing(results: list[Tensor]) -> list[int]:
    """For each result the first that lies in the same memory."""
    places = [value.untyped_storage().data_ptr() for value in results]
    return [places.index(place) for place in places]


def assert_as_eager(model: nn.Module, tokens: int, mode: str, **options: Any) -> Report:
    report = Report()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        report.add(passes.run_recursively(gm))
        compiled: Callable[..., Any] = aot_eager(gm, inputs)
        return compiled

    program = torch.compile(model, backend=backend, **options)
    for count in (tokens, tokens + 2) if options.get("dynamic") else (tokens,):
        x = torch.randn(2, count, N, C, generator=torch.Generator().manual_seed(1))
        want, want_grads = _results(model, model, x, mode)
        got, got_grads = _results(program, model, x, mode)
        assert [v.shape for v in got] == [v.shape for v in want]
        for left, right in zip(got + got_grads, want + want_grads, strict=True):
            # the same sums in float32, in another order
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5 * max(1.0, float(right.detach().abs().max())))
        assert _sharing(got) == _sharing(want)
        assert [v.stride() for v in got] == [v.stride() for v in want]
        assert [v.requires_grad for v in got] == [v.requires_grad for v in want]
        for left, right in zip(got, want, strict=True):
            if mode != "inference" and not right._is_view() and not right.requires_grad:
                assert not left._is_view()
    assert report.errors == []
    return report


def _eager_takes(model: nn.Module, tokens: int, mode: str) -> bool:
    """Whether autograd takes the program: it forbids some writes into what its backward needs."""
    try:
        _results(model, model, torch.randn(2, tokens, N, C), mode)
    except RuntimeError:
        return False
    return True


# One token, which views cover, and any number of them.
TOKENS = [(1, False), pytest.param(3, True, marks=THOROUGH)]


@pytest.mark.parametrize("mode", ["no_grad", pytest.param("train", marks=THOROUGH)])
@pytest.mark.parametrize(("tokens", "dynamic"), TOKENS)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("value", ["h", "y", pytest.param("gates", marks=THOROUGH)])
def test_writes(value: str, name: str, tokens: int, dynamic: bool, mode: str) -> None:
    model = Sublayer(dict.fromkeys(GATES if value == "gates" else [value], _written(name)))
    if not _eager_takes(model, tokens, mode):
        pytest.skip("autograd refuses this write in eager code")
    assert_as_eager(model, tokens, mode, dynamic=dynamic)


class Copied(Sublayer):
    """A sublayer of a copy of the streams, into which `write` writes when all is computed."""

    def __init__(self, copy: Callable[[Tensor], Tensor], write: Use) -> None:
        super().__init__({})
        self.copy, self.write = copy, write

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        x = self.copy(x)
        y = self.sublayer(x, {}, [])
        self.write(x)
        return y, []


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "multiple": lambda x: x * 1.5,
    "sum": lambda x: x + 0.0,
    "cast": lambda x: x.double().float(),
    "permuted copy": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[..., :1, :].expand_as(x).clone(),
    "stacked": lambda x: torch.stack(x.unbind(-2), -2),
}
UNSEEN: dict[str, Use] = {
    "all": lambda x: x.data.mul_(2.0),
    "one token": lambda x: x.select(1, -1).data.add_(0.5),
    "a view of it": lambda x: x.data[0, :2, 1].fill_(1.0),
    "of its detached": lambda x: x.detach().data.add_(0.5),
}


@pytest.mark.parametrize("write", UNSEEN)
@pytest.mark.parametrize("copy", COPIES)
def test_writes_that_autograd_does_not_see(copy: str, write: str) -> None:
    """The backward pass of eager code reads what was written into the copy."""
    model = Copied(COPIES[copy], UNSEEN[write])
    x = torch.randn(2, 3, N, C, generator=torch.Generator().manual_seed(1))
    _, changed = _results(model, model, x, "train")
    other = Copied(COPIES[copy], lambda x: None)
    _, before = _results(other, other, x, "train")
    assert not torch.allclose(changed[1], before[1])
    assert_as_eager(model, 3, "train")


def test_unseen_writes_into_results() -> None:
    """No gradient of the site needs these."""
    report = assert_as_eager(Sublayer({"y": lambda y: y.data.mul_(2.0)}), 3, "train")
    assert len(report.rewritten) == 4


class LogitsWritten(Sublayer):
    """Autograd needs no logits, so that they may change once all is computed: here to what is made of `.data`."""

    def gates(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        self.mix: Any = mix
        return super().gates(mix)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.sublayer(x, {}, [])
        mix, self.mix = self.mix, None
        return y, [mix.copy_(2.0 * self.bias.data)]


def test_a_write_that_autograd_sees_may_read_data() -> None:
    report = assert_as_eager(LogitsWritten({}), 3, "train")
    assert len(report.rewritten) == 2, str(report)


@pytest.mark.parametrize("index", [0, (0, -1), slice(None, None, 2)], ids=["one", "two axes", "a step"])
@pytest.mark.parametrize("operation", [operator.iadd, operator.isub, operator.imul, operator.itruediv])
def test_parts_that_change_by_something_with_a_gradient(operation: Callable[[Any, Any], Any], index: Any) -> None:
    def change(y: Tensor) -> None:
        y[index] = operation(y[index], 2.0 + torch.tanh(y.sum()))

    assert_as_eager(Sublayer({"y": change}), 3, "train")


@pytest.mark.parametrize("name", [n if n == "masked_fill_" else pytest.param(n, marks=THOROUGH) for n in WRITES])
def test_writes_into_streams_of_other_strides(name: str) -> None:
    model = Sublayer({"y": _written(name)}, "permuted")
    if not _eager_takes(model, 3, "no_grad"):
        pytest.skip("eager code cannot view these streams so")
    assert_as_eager(model, 3, "no_grad")


def _written(name: str) -> Use:
    def write(target: Tensor) -> None:
        WRITES[name](target)

    return write


@pytest.mark.parametrize("mode", ["train", "no_grad", pytest.param("inference", marks=THOROUGH)])
@pytest.mark.parametrize("layout", ["plain", pytest.param("permuted", marks=THOROUGH)])
@pytest.mark.parametrize(("tokens", "dynamic"), TOKENS)
@pytest.mark.parametrize("name", ALIASES)
def test_aliases_among_results(name: str, tokens: int, dynamic: bool, layout: str, mode: str) -> None:
    assert_as_eager(Sublayer(dict.fromkeys(VALUES, ALIASES[name]), layout), tokens, mode, dynamic=dynamic)


def test_what_recognition_takes_for_two_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewriting has a look of its own at which tensors share memory, whatever was recognised."""
    monkeypatch.setattr(sys.modules["mhc_compile.passes.recognise"], "_before_multiples", lambda value: iter(()))
    for use in (WRITES["select"], ALIASES["select"]):
        torch._dynamo.reset()
        report = assert_as_eager(Sublayer({"h": use}), 1, "no_grad")
        told = [str(site.reason) for site in report.declined]
        assert any("shares memory with line" in reason for reason in told), str(report)


class PartsOfOneTensor(Sublayer):
    """h_pre and h_post are parts of one tensor, which is returned together with a detached part."""

    def gates(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        self.both = torch.sigmoid(mix[..., : 2 * N])
        pre, post = self.both.split(N, -1)
        return pre, post

    def forward(self, x: Tensor) -> Any:
        parts: list[Tensor] = []
        out = self.sublayer(x, {"post": lambda post: parts.append(post.detach())}, [])
        return out, self.both, parts


@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_parts_of_what_is_returned_as_well(mode: str) -> None:
    assert_as_eager(PartsOfOneTensor({}), 3, mode)


class GatesOfOneTensor(Sublayer):
    """Gates that are parts of one tensor. The operator makes each of them a tensor of its own."""

    def gates(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.sigmoid(torch.stack((mix[..., :N], mix[..., N : 2 * N])))
        return both[0], both[1]


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("returned", [("pre",), ("post",), ("pre", "post")], ids="-".join)
def test_a_part_that_is_returned_alone_needs_no_memory_in_common(returned: tuple[str, ...], mode: str) -> None:
    report = assert_as_eager(GatesOfOneTensor(dict.fromkeys(returned, lambda h: h)), 3, mode)
    told = [site.reason for site in report.declined if "shares memory" in str(site.reason)]
    assert bool(told) == (len(returned) > 1), str(report)


class AddedInPlace(Sublayer):
    """New streams in the memory of a product, whose views AOTAutograd does not repeat where sizes are symbolic."""

    def written(self, x: Tensor, f: Tensor, post: Tensor, p: Tensor) -> Tensor:
        return (p.transpose(-1, -2) @ x).add_(post.unsqueeze(-1) * f.unsqueeze(-2))


# Each makes something else, or nothing, of what it made.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.mT,
    "transposed, of two equal sizes": lambda y: y[:, :, :, :N].mT,
    "tokens first": lambda y: y.transpose(0, 1),
    "flat and transposed": lambda y: y.flatten(-2).mT,
    "part": lambda y: y[..., 2:, 1:],
    "split in two": lambda y: y.unflatten(-1, (2, C // 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_detached_result_beside_the_same_view(name: str) -> None:
    view = VIEWS[name]
    report = assert_as_eager(AddedInPlace({"y": lambda y: (view(y), view(y.detach()))}), 3, "train", dynamic=True)
    assert [site.op for site in report.declined] == ["expand_combine"], str(report)


def test_such_views_of_a_result_are_told() -> None:
    view = VIEWS["flat and transposed"]
    report = assert_as_eager(Sublayer({"y": lambda y: (view(y), view(y.detach()))}), 3, "train", dynamic=True)
    assert [site.reason for site in report.declined] == [REASON], str(report)


class DetachedBefore(AddedInPlace):
    """The product is detached, and returned, before the rest of the sum is added to it."""

    def written(self, x: Tensor, f: Tensor, post: Tensor, p: Tensor) -> Tensor:
        product = p.transpose(-1, -2) @ x
        self.before = product.detach()
        return product.add_(post.unsqueeze(-1) * f.unsqueeze(-2))

    def forward(self, x: Tensor) -> Any:
        return self.sublayer(x, {}, []), self.before


def test_a_result_that_was_detached_before_the_sum_was_whole() -> None:
    """Without gradients, and of symbolic sizes, torch.compile alone returns views where eager code does not."""
    report = assert_as_eager(DetachedBefore({}), 3, "train", dynamic=False)
    assert [site.op for site in report.declined] == ["expand_combine"], str(report)


@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_what_is_not_made_from_another_result_is_rewritten(mode: str) -> None:
    """Without gradients, at another place, or with views that make the same once more."""
    use = VIEWS["transposed"] if mode == "no_grad" else Tensor.contiguous
    other = VIEWS["tokens first"] if mode == "train" else use
    report = assert_as_eager(AddedInPlace({"y": lambda y: (use(y), other(y.detach()))}), 3, mode, dynamic=True)
    assert report.declined == []


class TwoSquares(Sublayer):
    """The mean square that is in the projection, twice more."""

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(-2)
        squares = [(flat * flat).mean(-1, keepdim=keep) for keep in (True, True, False, False)]
        out = self.sublayer(x, {}, [])
        for use in self.uses.values():
            use(squares[0])
        return out, [square.detach() for square in squares], squares


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("write", [None, "add_", "data"])
def test_equal_squares_are_tensors_of_their_own(write: str | None, mode: str) -> None:
    report = assert_as_eager(TwoSquares({} if write is None else {"square": WRITES[write]}), 3, mode)
    assert report.rewritten
