"""Forms whose gates stay the program's code: the program's graph computes the same before and after it is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from mhc_compile import passes
from mhc_compile.ops.expand_combine import reference as write_reference
from tests.passes.forms import GROUPS, Form
from tests.proofs.equality import Refuted
from tests.proofs.mutants import mutated
from tests.proofs.programs import copied, prove_same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Functions without a formula here, by a word of the form that has them.
WITHOUT_FORMULA = ("matrix_exp", "2409.19606", "image", "vmap")
READ = (
    "Gates for all tokens",
    "Gates of any other code",
    "The residual",
    "Writes without a post gate, and gates within one einsum",
)
FORMS = [form for group in READ for form in GROUPS[group] if not any(word in form.text for word in WITHOUT_FORMULA)]
# Formulas that have to be multiplied out take some seconds.
LONG = ("x + (H - I) x", "a blend of x and H x")


def _prove(form: Form) -> None:
    graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        before = copied(gm)
        passes.run_recursively(gm)
        places = [node for node in before.graph.nodes if node.op == "placeholder"]
        for node, value in zip(places, example_inputs, strict=True):
            node.meta["val"] = value
        graphs.append((before, gm))
        return gm.forward

    with torch.no_grad():
        torch.compile(form.build(), backend=backend)(*form.inputs())
    ((before, after),) = graphs
    assert any(getattr(node.target, "namespace", "") == "mhc" for node in after.graph.nodes)
    prove_same(before, after)


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, id=f.text, marks=pytest.mark.thorough if f.text in LONG else ()) for f in FORMS],
)
def test_a_rewritten_program_is_the_program(form: Form) -> None:
    _prove(form)


def test_another_program_is_refuted() -> None:
    with mutated(write_reference, "upcast(tokens_of(h_res), dtype).mT", "upcast(tokens_of(h_res), dtype)"):
        for form in GROUPS["Gates for all tokens"][:2]:
            with pytest.raises(Refuted):
                _prove(form)
