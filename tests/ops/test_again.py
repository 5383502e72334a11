"""Operators that are called again: the same results and gradients, and no shortcut where something has to see the call.

On a CPU, where no call is recorded, a program of the reference stands for one of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mhc_compile.ops as ops
from mhc_compile import kernels
from mhc_compile.command_line import environment
from mhc_compile.kernels.projection import parts_of
from mhc_compile.ops import _again
from mhc_compile.ops._again import Calls, tensors_of
from mhc_compile.ops._register import KERNELS, REFERENCES
from mhc_compile.ops._transforms import CALLS
from tests.ops.calls import Sizes, arguments, call, results

SIZES = Sizes(n=4, width=16, tokens=(3, 5))
FEW = {"sinkhorn_steps": 3}


class Programs:
    """Stands for `Calls`: each call has a program, which is counted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.runs = 0

    def program(self, args: Sequence[Any], scalars: dict[str, Any]) -> Callable[..., Any]:
        def run(tensors: Sequence[Tensor]) -> Any:
            self.runs += 1
            given = iter(tensors)
            return REFERENCES[self.name](*(next(given) if isinstance(a, Tensor) else a for a in args), **scalars)

        return run


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Programs]:
    """Programs of all operators with kernels, by name."""
    made: dict[str, Programs] = {}
    for name, calls in CALLS.items():
        made[name] = Programs(name)
        monkeypatch.setattr(calls, "program", made[name].program)
    return made


def _leaves(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone().requires_grad_() if isinstance(v, Tensor) else v for k, v in given.items()}


def _gradients(operator: str, given: dict[str, Any], skip: int = 0) -> list[Tensor | None]:
    """Those of the sum of all results but the first `skip`, weighed."""
    leaves = _leaves(given)
    outputs = [r for r in results(call(operator, leaves, FEW))[skip:] if r.requires_grad]
    weights = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype).view(r.shape) for r in outputs]
    total = torch.stack([(r * w).sum().double() for r, w in zip(outputs, weights, strict=True)]).sum()
    return list(torch.autograd.grad(total, tensors_of([*leaves.values()]), allow_unused=True))


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("operator", [name for name in KERNELS if not name.endswith("_backward")])
def test_results_and_gradients(operator: str, skip: int, request: pytest.FixtureRequest) -> None:
    given = arguments(operator, SIZES, torch.float32, scalars=FEW)
    if skip >= len(results(call(operator, given, FEW))):
        pytest.skip("it has one result")
    plain, expected = call(operator, given, FEW), _gradients(operator, given, skip)
    programs = request.getfixturevalue("programs")
    for got, wanted in zip(results(call(operator, given, FEW)), results(plain), strict=True):
        assert torch.equal(got, wanted)
    found = _gradients(operator, given, skip)
    assert [g is None for g in found] == [e is None for e in expected]
    assert all(torch.equal(g, e) for g, e in zip(found, expected, strict=True) if g is not None and e is not None)
    assert (programs[operator].runs, programs[f"{operator}_backward"].runs) == (2, 1)


def test_optional_arguments_and_scalars_may_be_left_out(programs: dict[str, Programs]) -> None:
    x, phi, scale, bias = (arguments("generate_mix", SIZES, torch.float32)[k] for k in ("x", "phi", "scale", "bias"))
    leaf = x.clone().requires_grad_()
    h_pre, h_post, h_res = ops.generate_mix(leaf, phi, scale, bias)
    (h_pre.sum() + h_post.square().sum() + h_res.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert programs["generate_mix"].runs == programs["generate_mix_backward"].runs == 1
    assert leaf.grad is not None


def test_a_second_derivative_is_refused(programs: dict[str, Programs]) -> None:
    given = _leaves(arguments("aggregate", SIZES, torch.float32))
    (dx,) = torch.autograd.grad(call("aggregate", given).square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="mhc::aggregate_backward cannot be differentiated again"):
        dx.sum().backward()  # type: ignore[no-untyped-call]


class Seen(TorchDispatchMode):
    """What a mode sees, as fake tensors, FLOP counters and selective checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _in_a_mode(x: Tensor, h: Tensor) -> None:
    with Seen() as seen:
        ops.aggregate(x, h)
    assert "mhc.aggregate.default" in seen.names


def _compiled(x: Tensor, h: Tensor) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *args: [torch.empty(3, 5, 16)]

    torch.compile(lambda x, h: ops.aggregate(x, h), backend=backend)(x, h)
    assert "mhc.aggregate.default" in seen or "mhc.aggregate" in seen


@pytest.mark.parametrize("run", [_in_a_mode, _compiled], ids=lambda run: run.__name__.strip("_"))
def test_what_sees_calls_still_does(run: Callable[[Tensor, Tensor], None], programs: dict[str, Programs]) -> None:
    x, h = arguments("aggregate", SIZES, torch.float32).values()
    run(x, h)
    assert programs["aggregate"].runs == 0


@pytest.mark.usefixtures("programs")
def test_transforms() -> None:
    """Below the last of them is a plain call."""
    x, h = arguments("aggregate", SIZES, torch.float32).values()
    weight = torch.randn(3, 5, 16)
    assert torch.equal(torch.vmap(ops.aggregate)(x, h), ops.aggregate(x, h))
    gradient = torch.vmap(torch.func.grad(lambda x, h, w: (ops.aggregate(x, h) * w).sum()))(x, h, weight)
    torch.testing.assert_close(gradient, h.unsqueeze(-1) * weight.unsqueeze(-2))


@pytest.mark.usefixtures("programs")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*deprecated")
def test_a_trace_has_the_operator() -> None:
    x, h = arguments("aggregate", SIZES, torch.float32).values()
    assert "mhc::aggregate" in str(torch.jit.trace(ops.aggregate, (x, h)).graph)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profile_names_the_operator(programs: dict[str, Programs]) -> None:
    x, h = arguments("aggregate", SIZES, torch.float32).values()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.aggregate(x, h)
    assert "mhc::aggregate" in {event.name for event in profile.events() or []}
    assert programs["aggregate"].runs == 1


def test_nodes_of_the_graph_are_named_after_operators(request: pytest.FixtureRequest) -> None:
    """As those of a call without a program: by this name anomaly detection says where a NaN came from."""
    given = _leaves(arguments("aggregate", SIZES, torch.float32))
    plain = call("aggregate", given)
    programs = request.getfixturevalue("programs")
    got = call("aggregate", given)
    assert programs["aggregate"].runs == 1
    assert got.grad_fn.name() == plain.grad_fn.name()


def test_a_call_on_a_cpu_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked from one with programs cannot use CUDA, and says so when it is asked."""

    def bad_fork() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "current_device", bad_fork)
    monkeypatch.setattr(CALLS["aggregate"], "_programs", {"another kind": None})
    x, h = arguments("aggregate", SIZES, torch.float32).values()
    torch.testing.assert_close(ops.aggregate(x, h), torch.einsum("abnc,abn->abc", x, h))


def test_precision_that_was_set_for_a_backend_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then refuses to say what holds for all of them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    before, usual = _again._kind([None], {}), torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="precision"):
            torch.get_float32_matmul_precision()
        kind = _again._kind([None], {})
        assert not kernels.products_are_exact()
        assert parts_of(torch.empty(3, 4, 16, dtype=torch.bfloat16), torch.empty(24, 64), None) == 2
        assert environment._settings()["float32_matmul_precision"] == "tf32 on CUDA, none on a CPU"
        assert ops.projection(torch.randn(3, 4, 16), torch.randn(24, 64))[0].shape == (3, 24)
    finally:
        torch.backends.cuda.matmul.fp32_precision = usual
    assert kind is not None
    assert kind != before
    assert kernels.products_are_exact()


def test_kinds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees ever new numbers of tokens keeps no more than some thousand of them."""
    from mhc_compile.kernels import replay

    def record(function: Any, args: Any, *rest: Any) -> Any:
        return function(*args), f"program {args[0]}"

    monkeypatch.setattr(_again, "_kind", lambda args, scalars: args[0])
    monkeypatch.setattr(_again, "_can_be_recorded", lambda args: True)
    monkeypatch.setattr(replay, "record", record)
    calls = Calls()
    for size in range(5000):
        for _ in range(2):
            assert calls.run([size], {}, lambda value: -value, [size]) == -size
        assert calls.program([size], {}) == f"program {size}"
        assert len(calls._programs) + len(calls._seen) <= _again._MOST
    assert calls.program([0], {}) is None
