"""An operator makes each row of logits once, and only those that it makes gates of or that the program reads."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import passes
from mhc_compile.testing import capture
from tests.zoo import check
from tests.zoo.common import random_parameter, random_phi
from tests.zoo.misses import MISSES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 3, 6
SHAPE = (2, 3, N, WIDTH)
Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Mixed(nn.Module):
    """h_pre and h_post by sigmoid, and h_res by `rows` logits in a way that no operator has."""

    def __init__(self, split: Split, rows: int = 2 * N) -> None:
        super().__init__()
        self.split = split
        self.phi = random_phi(2 * N + rows, N * WIDTH)
        self.scale, self.bias = random_parameter(3, mean=1.0), random_parameter(2 * N + rows)
        self.basis = random_parameter(rows, N, N)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        flat = x.flatten(-2)
        logits = F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6), self.phi)
        pre, post, res = self.split(logits)
        pre = torch.sigmoid(pre * self.scale[0] + self.bias[:N])
        post = 2 * torch.sigmoid(post * self.scale[1] + self.bias[N : 2 * N])
        weights = (res * self.scale[2] + self.bias[2 * N :]).softmax(-1)
        h_res = torch.einsum("btk,kij->btij", weights, self.basis)
        f = torch.tanh((pre.unsqueeze(-1) * x).sum(-2))
        return post.unsqueeze(-1) * f.unsqueeze(-2) + h_res.mT @ x


def _by_split(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.split([N, N, logits.shape[-1] - 2 * N], -1)


def _by_slices(logits: Tensor) -> tuple[Tensor, ...]:
    return logits[..., :N], logits[:, :, N : 2 * N], logits[..., 2 * N :]


def _by_narrow(logits: Tensor) -> tuple[Tensor, ...]:
    return logits.narrow(-1, 0, N), logits.narrow(2, N, N), logits.narrow(-1, 2 * N, logits.shape[-1] - 2 * N)


def _by_chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """The rows are as many as those of both other gates."""
    first, second = logits.chunk(2, -1)
    return *first.chunk(2, -1), second


def _of_other_shape(logits: Tensor) -> tuple[Tensor, ...]:
    flat = logits.reshape(-1, logits.shape[-1])
    return tuple(part.unflatten(0, logits.shape[:-1]) for part in flat.split([N, N, logits.shape[-1] - 2 * N], 1))


def _divided(logits: Tensor) -> tuple[Tensor, ...]:
    return _by_split(logits.to(torch.float32) / 2)


SPLITS = [_by_split, _by_slices, _by_narrow, _by_chunks, _of_other_shape, _divided]


def _projected(model: nn.Module, **options: bool) -> list[int]:
    """The rows of phi of every operator that makes logits."""
    return [int(k) for k in re.findall(r"phi=f32\[(\d+),", str(capture(model, torch.randn(SHAPE))))]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_rows_of_known_gates_are_not_projected_twice(split: Split, dynamic: bool) -> None:
    rows = 2 * N if split is _by_chunks or dynamic else 2
    outcome = check.run(Mixed(split, rows), (torch.randn(SHAPE),), dynamic=dynamic)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    site = outcome.report.rewritten[0]
    assert f"{rows} logits more" in site.detail
    assert _projected(Mixed(split, rows)) == [2 * N + rows]


def _also_as_a_whole(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = _by_split(logits)
    return pre, post, res + logits.mean()


def _cumulative(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, _ = _by_split(logits)
    return pre, post, logits.cumsum(-1)[..., 2 * N :]


def _flipped(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, _ = _by_split(logits)
    return pre, post, logits.flip(-1)[..., : 2 * N]


def _other_dimension(logits: Tensor) -> tuple[Tensor, ...]:
    """Tokens are taken apart, not rows."""
    pre, post, res = _by_split(logits)
    first, second = logits.split(1, 0)
    return pre, post, res + (first + second)[..., -1:]


def _to_another_shape(logits: Tensor) -> tuple[Tensor, ...]:
    """The last dimension has as many elements as before, but others."""
    pre, post, res = _by_split(logits)
    return pre, post, res + logits.mT.reshape(logits.shape)[..., -1:]


def _every_second(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, _ = _by_split(logits)
    return pre, post, logits[..., ::2]


def _one_row(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = _by_split(logits)
    return pre, post, res + logits[..., 0].unsqueeze(-1)


def _from_the_end(logits: Tensor) -> tuple[Tensor, ...]:
    return *_by_split(logits)[:2], logits[..., -2 * N :]


@torch.library.custom_op("tests_rows_read::mul", mutates_args=())
def mul(logits: Tensor) -> Tensor:
    return logits * logits.sum(-1, keepdim=True)


@mul.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits)


mul.register_autograd(
    lambda ctx, grad: (
        grad * ctx.saved_tensors[0].sum(-1, keepdim=True) + (grad * ctx.saved_tensors[0]).sum(-1, keepdim=True)
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _by_an_operator_of_that_name(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, _ = _by_split(logits)
    return pre, post, torch.ops.tests_rows_read.mul(logits)[..., 2 * N :]


NEAR_MISSES = [
    _by_an_operator_of_that_name,
    _also_as_a_whole,
    _cumulative,
    _flipped,
    _other_dimension,
    _to_another_shape,
    _every_second,
    _one_row,
    _from_the_end,
]


@pytest.mark.parametrize("split", NEAR_MISSES)
def test_what_reads_other_rows_gets_them(split: Split) -> None:
    model = Mixed(split)
    outcome = check.run(model, (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert _projected(model) == [4 * N]


def _own_rows_first(logits: Tensor) -> tuple[Tensor, ...]:
    rows = logits.shape[-1] - 2 * N
    return logits.narrow(-1, rows, N), logits.narrow(-1, rows + N, N), logits.narrow(-1, 0, rows)


def _own_rows_first_after_dots(logits: Tensor) -> tuple[Tensor, ...]:
    rows = logits.shape[-1] - 2 * N
    return logits[..., rows : rows + N], logits[..., rows + N :], logits[:, ..., :rows]


def _own_rows_first_after_dots_for_nothing(logits: Tensor) -> tuple[Tensor, ...]:
    rows = logits.shape[-1] - 2 * N
    return logits[:, :, ..., rows : rows + N], logits[:, :, ..., rows + N :], logits[..., :, :, :rows]


OWN_FIRST = [_own_rows_first, _own_rows_first_after_dots, _own_rows_first_after_dots_for_nothing]


@pytest.mark.parametrize("split", OWN_FIRST)
def test_rows_of_known_gates_that_come_last_are_not_projected_twice(split: Split) -> None:
    outcome = check.run(Mixed(split, 2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert "2 logits more" in outcome.report.rewritten[0].detail
    assert _projected(Mixed(split, 2)) == [2 * N + 2]


def _all_of_the_first_token(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = _own_rows_first(logits)
    return pre, post, res + logits[:, :1].mean(-1, keepdim=True)


def _from_a_symbolic_row(logits: Tensor) -> tuple[Tensor, ...]:
    pre, post, res = _own_rows_first(logits)
    return pre, post, res + logits.narrow(-1, logits.shape[0], 2 * N)


@pytest.mark.parametrize("split", [_all_of_the_first_token, _from_a_symbolic_row])
def test_what_reads_rows_of_gates_that_come_last_gets_them(split: Split) -> None:
    outcome = check.run(Mixed(split), (torch.randn(SHAPE),), dynamic=split is _from_a_symbolic_row)
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert f"{4 * N} logits more" in outcome.report.rewritten[0].detail


class Shown(Mixed):
    """The logits are a result; `change` may write into them after the gates were made."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shown: list[Tensor] = []

        def split(logits: Tensor) -> tuple[Tensor, ...]:
            shown.append(logits)
            return _by_slices(logits)

        self.split = split
        new = super().forward(x)
        return new, self.change(shown[0])

    def change(self, logits: Tensor) -> Tensor:
        return logits


class Written(Shown):
    def change(self, logits: Tensor) -> Tensor:
        return logits.mul_(2)


class WrittenInPart(Shown):
    def change(self, logits: Tensor) -> Tensor:
        logits[..., N:].mul_(2)
        return logits[..., 2 * N :]


@pytest.mark.parametrize("kind", [Shown, Written, WrittenInPart])
def test_logits_that_leave_the_graph_or_are_written_are_whole(kind: type[Shown]) -> None:
    # Autograd does not allow these writes.
    model = kind(_by_split).requires_grad_(kind is Shown)
    outcome = check.run(model, (torch.randn(SHAPE),), backward=kind is Shown)
    check.assert_as_accurate(outcome)
    assert _projected(model) == [4 * N]


class OnlyGates(MISSES["split_same_twice"], MISSES["post_with_clipped_gradient"]):  # type: ignore[misc]
    """Two gates are made of the same rows, and operators make all of the gates."""


# Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_logits_that_nothing_reads_are_not_made() -> None:
    outcome = check.run(OnlyGates(n=N, width=WIDTH, length=3, batch=2), (torch.randn(SHAPE),))
    check.assert_as_accurate(outcome)
    assert outcome.operators == ["expand_combine", "generate_mix_and_aggregate"], str(outcome.report)
    assert _projected(OnlyGates(n=N, width=WIDTH, length=3, batch=2)) == [2 * N + N * N]


def test_symbolic_sizes_stay_symbolic() -> None:
    """Dynamo raises an error where a size that is marked has become a number."""

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        report = passes.run_recursively(gm)
        assert "6 logits more" in str(report)
        return gm

    x = torch.randn(SHAPE)
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x, axis)
    torch.compile(Mixed(_by_split), backend=backend)(x)
