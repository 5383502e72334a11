"""The forms of docs/forms.md in a row: each sublayer is recognised, and each write is fused with the read after it."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import mhc_compile
from tests.passes import test_own_gates as own
from tests.passes.forms import GROUPS, READ_FUSED, Form
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LENGTH = 2
# What is projected in place of the streams, so that the write cannot project what it writes.
NOT_FUSED = {
    "Hyper-Connections (arXiv 2409.19606): tanh, static + dynamic": "a layer norm of the streams",
    "gates under vmap": "the streams, by code that is not looked into",
    "the mean of rows that a matrix mixes, and a matrix times n equal outputs": "a layer norm of the streams",
    "the first, with the streams added as they are": "a layer norm of the streams",
    "the first, with matrices by Sinkhorn": "a layer norm of the streams",
    "a weight before the RMS": "the streams times a weight",
    "RMS of each stream": "a norm of each stream",
    "LayerNorm": "a layer norm of the streams",
}
# The gradient of what is read is mixed before it is that of what is written.
FORWARD_ONLY = {"streams that are mixed before they are read"}


class Chain(nn.Module):
    """Sublayers of one form, each of which reads what the one before it wrote."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList([form.build() for _ in range(LENGTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = 0.25 * x
        for sublayer in self.sublayers:
            assert isinstance(sublayer, own.Own | Sublayer)
            x = sublayer.body(x)
        return x


def _chained() -> dict[str, Form]:
    found = (form for forms in GROUPS.values() for form in forms if form.state in ("fused", "own gates"))
    return {form.text: form for form in found if isinstance(form.build(), own.Own | Sublayer)}


CHAINED = _chained()


@pytest.mark.parametrize("text", CHAINED)
def test_sublayers_in_a_row(text: str) -> None:
    form = CHAINED[text]
    model = Chain(form)
    used = _with_gradients(model, form)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in used)
    outcome = check.run(model, form.inputs(), repeats=2)
    check.assert_as_accurate(outcome)
    assert outcome.operators == sorted(LENGTH * list(form.operators)), str(outcome.report)
    fusions = mhc_compile.explain(model, *form.inputs()).fusions
    name = "boundary" if READ_FUSED in form.operators else "combine_and_read"
    wanted = {} if text in NOT_FUSED else {name: LENGTH - 1}
    if text not in FORWARD_ONLY:
        wanted |= {f"{one}_backward": count for one, count in wanted.items()}
    assert {name: count for name, count in fusions.items() if name != "accumulate"} == wanted


def _with_gradients(model: nn.Module, form: Form) -> set[str]:
    model(*form.inputs()).square().sum().backward()
    found = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def test_what_is_not_fused_is_a_form() -> None:
    assert {*NOT_FUSED, *FORWARD_ONLY} <= CHAINED.keys()
