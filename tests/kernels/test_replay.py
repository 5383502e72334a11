"""Calls that are done again without their host function: the same bits for other tensors, in new memory."""

from __future__ import annotations

import contextlib
import cProfile
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mhc_compile.ops as ops
from mhc_compile.kernels import replay
from mhc_compile.kernels.common import FUSED, launch
from mhc_compile.kernels.opaque import Opaque, Start, span
from mhc_compile.ops._again import Calls, tensors_of
from mhc_compile.ops._register import KERNELS
from mhc_compile.ops._transforms import CALLS
from tests.kernels.cases import CAPTURES, INTERPRETED, MARKS
from tests.ops.calls import RARE, Sizes, arguments, call, keywords, results

pytestmark = MARKS
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="an address is read on the host")

# Few half-steps, over which the interpreter takes its time.
FEW = {"sinkhorn_steps": 3}


def _at(address: int, like: Tensor) -> Tensor:
    """The tensor that begins at an address."""
    if not like.numel():
        return like
    memory = (ctypes.c_uint8 * (span(like) * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


def interpreted(launched: replay.Launched, device: torch.device) -> Start:
    """Launches in Triton's interpreter, with no tensor but those at the addresses."""

    def start(grid: tuple[int, int, int], values: Sequence[int]) -> None:
        args = list(launched.args)
        for place, address in zip(launched.places, values, strict=True):
            args[place] = _at(address, launched.args[place])
        launched.kernel[grid](*args, **FUSED, **launched.options)

    return start


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory full of NaN, or of 0xFF."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    memory = made.untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(memory, 0, (memory.nbytes(),)).fill_(0xFF)
    return made


def _program(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, replay.Program]:
    result, program = replay.record(function, args, interpreted, _empty)
    assert program is not None
    return result, program


def _assert_same(got: Any, expected: Any) -> None:
    for one, other in zip(results(got), results(expected), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


@interpreted_only
@pytest.mark.parametrize("without", [RARE, frozenset[str]()], ids=["usual", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", sorted(KERNELS))
def test_every_operator(operator: str, dtype: torch.dtype, without: frozenset[str]) -> None:
    sizes = Sizes(n=4, width=32, tokens=(3, 5))
    first, other = (arguments(operator, sizes, dtype, without=without, scalars=FEW) for _ in range(2))
    function = functools.partial(KERNELS[operator], **keywords(operator, first, FEW))
    result, program = _program(function, [*first.values()])
    _assert_same(result, function(*first.values()))
    kept = [tensor.clone() for tensor in results(result)]
    got = program(tensors_of([*other.values()]))
    _assert_same(got, function(*other.values()))
    # In memory of its own.
    _assert_same(result, kept)
    again = program(tensors_of([*other.values()]))
    _assert_same(again, got)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(results(again), results(got), strict=True) if a.numel())


def _host(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, ...]:
    """What a host function may do beside launches: views of views, copies, and torch's own operations."""
    rows = x.view(2, 6).T.contiguous()
    room = torch.zeros(6, 2)
    room[1:4] += factor * rows[1:4] * y.reshape(6, 2)[1:4]
    made = torch.empty_like(room).copy_(room)
    count = torch.zeros(6)
    count += made[:, 0]
    return made[2:, 1], torch.where(made > 0, made, 0.0).to(torch.bfloat16), count


@interpreted_only
def test_operations_of_torch() -> None:
    x, y = torch.randn(12), torch.randn(12)
    result, program = _program(_host, [x, y, 2.0])
    _assert_same(result, _host(x, y, 2.0))
    for _ in range(2):
        x, y = torch.randn(12), torch.randn(12)
        _assert_same(program([x, y]), _host(x, y, 2.0))


@interpreted_only
def test_arguments_that_were_one_tensor_may_be_two() -> None:
    x, y = torch.randn(12), torch.randn(12)
    for given in ((x, x), (x, x.view(12)), (x[:12], x)):
        _, program = _program(_host, [*given, 2.0])
        _assert_same(program([x, y]), _host(x, y, 2.0))
        _assert_same(program([y, x]), _host(y, x, 2.0))


@interpreted_only
def test_parts_of_larger_tensors() -> None:
    """Whose addresses have nothing to do with those that were recorded."""
    whole = torch.randn(100)
    _, program = _program(_host, [whole[8:20], whole[40:52], 2.0])
    x, y = torch.randn(24)[12:], torch.randn(12)
    _assert_same(program([x, y]), _host(x, y, 2.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(x.sum()),
        lambda x: x,
        lambda x: (x.view(3, 4), x + 1),
        lambda x: x.view(torch.int32) + 1,
    ],
    ids=["a number", "the argument", "a view of the argument", "another dtype"],
)
@interpreted_only
def test_what_cannot_be_done_again(function: Callable[..., Any]) -> None:
    x = torch.randn(12)
    result, program = replay.record(function, [x], interpreted, _empty)
    assert program is None
    _assert_same(result, function(x))


class _Doubled:
    """A kernel that wants its tensors at multiples of 16 bytes."""

    arg_names = ("x", "out")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda x, out, **options: out.copy_(x + x)


@interpreted_only
@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_kernel_that_was_given_a_copy(first: int) -> None:
    """A program would give it the original."""
    kernel = Opaque(_Doubled(), ["out"])

    def function(x: Tensor) -> Tensor:
        out = torch.empty(8)
        launch(kernel, (1,), x[first : first + 8], out)
        return out

    x, y = torch.randn(12), torch.randn(12)
    result, program = replay.record(function, [x], interpreted, _empty)
    assert torch.equal(result, 2 * x[first : first + 8])
    assert (program is None) == (first == 1)
    if program is not None:
        assert torch.equal(program([y]), 2 * y[first : first + 8])


@interpreted_only
def test_a_kernel_that_triton_has_to_launch() -> None:
    given = arguments("expand_combine", Sizes(n=2, width=16), torch.float32, without=RARE)
    function = functools.partial(KERNELS["expand_combine"])
    result, program = replay.record(function, [*given.values()], lambda launched, device: None, _empty)
    assert program is None
    _assert_same(result, function(*given.values()))


gpu_only = pytest.mark.skipif(INTERPRETED, reason="operators run kernels on CUDA")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calls]:
    """Those of all operators, of which none has been called yet."""
    for each in CALLS.values():
        monkeypatch.setattr(each, "_seen", set())
        monkeypatch.setattr(each, "_programs", {})
    return CALLS


def _programs_of(calls: Calls) -> list[Any]:
    return list(calls._programs.values())


@contextlib.contextmanager
def not_recorded(calls: Calls) -> Iterator[None]:
    """Without recording."""
    calls.run = lambda given, scalars, function, args: function(*args)  # type: ignore[method-assign]
    yield
    del calls.run  # type: ignore[method-assign]


@gpu_only
@pytest.mark.parametrize("without", [RARE, frozenset[str]()], ids=["usual", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [(3, 5), (2, 512)], ids=str)
@pytest.mark.parametrize("operator", sorted(KERNELS))
def test_third_calls(
    operator: str, tokens: tuple[int, ...], dtype: torch.dtype, without: frozenset[str], calls: dict[str, Calls]
) -> None:
    """The first, the recorded one and the one that is done again have the same bits."""
    sizes = Sizes(n=4, width=1280, tokens=tokens)
    first, other = (arguments(operator, sizes, dtype, without=without, device="cuda") for _ in range(2))
    with not_recorded(calls[operator]):
        expected = call(operator, other)
    for given in (first, first, other):
        got = call(operator, given)
    (program,) = _programs_of(calls[operator])
    assert program is not None
    _assert_same(got, expected)


def _sublayers(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    for _ in range(2):
        u, post, res = ops.generate_mix_and_aggregate(x, *parameters, input_norm_eps=1e-6)
        x = ops.expand_combine(u * 0.5, None, post, x, res)
    return x


@gpu_only
def test_training(calls: dict[str, Calls]) -> None:
    """Five steps with other numbers: the bits of the same steps without programs; then once more after a change."""
    torch.manual_seed(0)
    xs = [torch.randn(512, 4, 1280, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
    start = [torch.randn(24, 4 * 1280) * 0.01, torch.ones(3), torch.zeros(24)]

    def train() -> list[Tensor]:
        parameters = [p.clone().cuda().requires_grad_() for p in start]
        for x in xs:
            loss = _sublayers(x.clone().requires_grad_(), parameters).float().square().mean()
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.data -= g
        return parameters

    with contextlib.ExitStack() as stack:
        for each in calls.values():
            stack.enter_context(not_recorded(each))
        expected = train()
    for got, wanted in zip(train(), expected, strict=True):
        assert torch.equal(got, wanted)
    assert any(_programs_of(calls["generate_mix_and_aggregate_backward"]))


@gpu_only
def test_other_kinds_have_programs_of_their_own(calls: dict[str, Calls]) -> None:
    given = arguments("aggregate", Sizes(n=4, width=256, tokens=(40,)), torch.float32, device="cuda")
    x, h = given.values()
    for _ in range(3):
        ops.aggregate(x, h)
    wide = torch.randn(40, 4, 512, device="cuda")
    streams_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    kinds = [(x[:20], h[:20]), (x.bfloat16(), h), (wide[..., :256], h), (streams_first, h)]
    for args in kinds:
        for _ in range(3):
            got = ops.aggregate(*args)
        torch.testing.assert_close(got, torch.einsum("tnc,tn->tc", args[0].float(), args[1]).to(got.dtype))
    odd = torch.randn(40 * 4 * 256 + 1, device="cuda")[1:].view(40, 4, 256)
    for _ in range(3):
        torch.testing.assert_close(ops.aggregate(odd, h), torch.einsum("tnc,tn->tc", odd, h))
    assert sum(program is not None for program in _programs_of(calls["aggregate"])) == 5


@gpu_only
@CAPTURES
def test_in_a_cuda_graph_and_on_another_stream(calls: dict[str, Calls]) -> None:
    x, h = arguments("aggregate", Sizes(n=4, width=256, tokens=(40,)), torch.float32, device="cuda").values()
    for _ in range(3):
        expected = ops.aggregate(x, h)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = ops.aggregate(x, h)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.aggregate(x, h)
    captured.zero_()
    graph.replay()
    for got in (beside, captured):
        assert torch.equal(got, expected)


@gpu_only
def test_the_host_does_little(calls: dict[str, Calls], monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's calls of functions, which do not depend on the machine."""
    # To fill memory with NaN, as other tests do, is work of the host.
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, getattr(torch, name).__wrapped__)
    given = arguments("generate_mix_and_aggregate", Sizes(n=4, width=1280, tokens=(64,)), torch.bfloat16, without=RARE,
                      device="cuda")  # fmt: skip

    def functions() -> int:
        """The least of some calls: the interpreter's own work, such as its garbage collector's, is no part."""
        counts = []
        for _ in range(10):
            with cProfile.Profile() as profile:
                torch.ops.mhc.generate_mix_and_aggregate(*given.values())
            counts.append(sum(entry.callcount for entry in profile.getstats()))
        return min(counts)

    with not_recorded(calls["generate_mix_and_aggregate"]):
        before = functions()
    assert functions() < before / 3
