"""Programs that are nearly hyper-connections: whatever the passes do with them, the results stay eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.zoo import check
from tests.zoo.misses import MISSES
from tests.zoo.near import Sublayer

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # After a graph break Dynamo looks at the .grad of the tensors that the second graph is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

ORDINARY = (2, 3, 4, 6)
# Batch, length and width all equal the number of streams: only the origin of a dimension shows what it is.
ALL_EQUAL = (4, 4, 4, 4)
# As in decoding: a factor of the token is one number, and a sum over tokens has one summand.
ONE_TOKEN = (1, 1, 4, 6)

# Only the outputs are compared: eager raises in backward where streams that autograd has saved change in place.
FORWARD_ONLY = {
    "layer_changes_streams",
    "layer_changes_a_view_of_streams",
    "layer_sets_a_stream",
    "streams_changed_between_gates_and_reading",
    "streams_changed_through_older_view",
    # Its gradient overflows float32, in eager too.
    "sinkhorn_whose_clamp_binds_on_a_sunk_row",
}
# Here eager rounds to bfloat16 on the way.
LOWER_PRECISION = {name for name in MISSES if "bfloat16" in name or "autocast" in name or "rounded" in name}


# A miss in these pieces changes numbers, within the few of a token, and moves nothing: which sizes differ cannot matter
# to it, and where all are equal more goes unnoticed. One token matters to these above all.
NARROW = {"rms", "pre", "post", "start", "rows", "columns", "res"}


def _cases() -> list[Any]:
    return [
        pytest.param(
            name,
            shape,
            id=f"{name}-{label}",
            marks=[pytest.mark.thorough] if _says_little(name, shape) else [],
        )
        for label, shape in (("ordinary", ORDINARY), ("all-equal", ALL_EQUAL), ("one-token", ONE_TOKEN))
        for name in MISSES
    ]


def _says_little(name: str, shape: tuple[int, ...]) -> bool:
    is_narrow = bool(NARROW & vars(MISSES[name]).keys())
    return shape == (ORDINARY if is_narrow else ONE_TOKEN)


def _build(name: str, shape: tuple[int, ...]) -> tuple[Sublayer, torch.Tensor]:
    batch, length, n, width = shape
    return MISSES[name](n, width, length, batch), torch.randn(shape)


@pytest.mark.parametrize(("name", "shape"), _cases())
def test_results_are_eager_ones(name: str, shape: tuple[int, ...]) -> None:
    model, x = _build(name, shape)
    if name in FORWARD_ONLY:
        outcome = check.run(model, (x,), backward=False, exact=False, repeats=1, around=torch.no_grad())
        check.assert_equal_to_eager(outcome)
    elif name in LOWER_PRECISION:
        # A program that rounds less than eager does is right, and differs from eager by what eager rounds.
        check.assert_as_accurate(check.run(model, (x,), repeats=2))
    else:
        check.assert_equal_to_eager(check.run(model, (x,), exact=False, repeats=1))


EXTREMES = [
    name
    for name in MISSES
    if name not in FORWARD_ONLY
    and any(word in name for word in ("clamp", "sharp", "hard", "large_eps", "masked", "shift", "stops"))
]


@pytest.mark.parametrize("name", EXTREMES)
def test_results_are_eager_ones_where_clamps_take_hold(name: str) -> None:
    model, x = _build(name, ORDINARY)
    with torch.no_grad():
        model.scale.mul_(60.0)
    outcome = check.run(model, (x,), exact=False, repeats=2, backward=False)
    # exp of logits that are 60 times as large magnifies the rounding of the logits as much.
    check.assert_equal_to_eager(outcome, roundings=64.0 * 60)


class LengthInGate(Sublayer):
    def post(self, logits: torch.Tensor) -> Any:
        return logits.shape[1] * torch.sigmoid(logits)


class LengthInReading(Sublayer):
    def read(self, x: torch.Tensor, h_pre: torch.Tensor) -> Any:
        return (h_pre.unsqueeze(-1) * x).sum(2) / x.shape[1]


class LengthInWriting(Sublayer):
    def write(self, x: torch.Tensor, f: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor) -> Any:
        return h_post.unsqueeze(-1) * f.unsqueeze(-2) / x.shape[1] + h_res.mT @ x


@pytest.mark.parametrize("kind", [LengthInGate, LengthInReading, LengthInWriting])
def test_number_that_is_a_size(kind: type[Sublayer]) -> None:
    """A graph for many lengths must not keep the first length that it saw as a constant."""
    model = kind(4, 6, 3, 2)
    program, report = check.rewriting(model)
    for batch, length in ((2, 8), (2, 5), (3, 4), (2, 9)):
        x = torch.randn(batch, length, 4, 6)
        eager, rewritten = check.evaluate(model, model, (x,)), check.evaluate(program, model, (x,))
        for result, value in eager.items():
            # Float32 rounding of a few dozen operations in another order.
            assert check.error(rewritten[result], value) < 64 * torch.finfo(torch.float32).eps, (length, result)
    assert not report.errors


class ChangingNumbers(Sublayer):
    temperature = 1.0
    pre_eps = 1e-6

    def start(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits / self.temperature).softmax(-1) + 1e-6

    def pre(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits) + self.pre_eps


@pytest.mark.parametrize("attribute", ["temperature", "pre_eps"])
def test_number_that_changes_between_calls(attribute: str) -> None:
    model = ChangingNumbers(4, 6, 3, 2)
    program, _ = check.rewriting(model)
    x = torch.randn(ORDINARY)
    for number in (1.0, 0.7, 0.45, 0.3):
        setattr(model, attribute, number)
        eager, rewritten = check.evaluate(model, model, (x,)), check.evaluate(program, model, (x,))
        for result, value in eager.items():
            # Float32 rounding of a few dozen operations in another order.
            assert check.error(rewritten[result], value) < 64 * torch.finfo(torch.float32).eps, (number, result)


def test_float64_model() -> None:
    """Float64 stays float64 throughout, or is left alone."""
    model, x = Sublayer(4, 6, 3, 2).double(), torch.randn(ORDINARY, dtype=torch.float64)
    check.assert_equal_to_eager(check.run(model, (x,), exact=False, repeats=1))


def test_float16_model() -> None:
    model, x = Sublayer(4, 6, 3, 2).half(), torch.randn(ORDINARY).half()
    check.assert_as_accurate(check.run(model, (x,), repeats=2))


@pytest.mark.parametrize("shape", [ORDINARY, ALL_EQUAL])
def test_the_near_misses_start_from_something_found(shape: tuple[int, ...]) -> None:
    """Without this, every near miss might pass because nothing is ever rewritten."""
    batch, length, n, width = shape
    outcome = check.run(Sublayer(n, width, length, batch), (torch.randn(shape),), exact=False, repeats=1)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"]


class GatesOfOtherTokens(Sublayer):
    def read(self, x: torch.Tensor, h_pre: torch.Tensor) -> torch.Tensor:
        return (h_pre.transpose(0, 1).unsqueeze(-1) * x).sum(2)


def test_a_read_by_the_gates_of_other_tokens_is_apart_from_what_makes_them() -> None:
    """The operator that also reads the streams weighs each token by its own gates."""
    outcome = check.run(GatesOfOtherTokens(4, 6, 3, 3), (torch.randn(3, 3, 4, 6),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["aggregate", "expand_combine", "generate_mix"], str(outcome.report)
