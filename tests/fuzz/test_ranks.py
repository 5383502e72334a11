"""Programs of one rank of several are rewritten and judged as others are, and leave no process group behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed
from torch.distributed.tensor import Replicate

from mhc_compile import passes
from tests.fuzz import ranks
from tests.fuzz.__main__ import Choices
from tests.fuzz.grammar import compose
from tests.fuzz.judge import check
from tests.fuzz.plants import planted
from tests.fuzz.program import Program

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAIN = compose(lambda options: options[0])


def _of_ranks(form: str) -> Program:
    """The plain program in a group of two: with all of its weights gathered, or with its tokens shared out."""
    source = ranks.put_ranks(lambda options: form if form in options else options[0], PLAIN.source, ("bsnc",), "x")
    return replace(PLAIN, source=source, ranks=2)


@pytest.mark.parametrize("form", ["none", "tokens", "weights"])
def test_each_form_is_rewritten_and_judged(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _of_ranks(form)
    assert ("shared_out" in program.source, "gathered" in program.source) == (form == "tokens", form == "weights")
    verdict = check(program)
    assert (verdict.complaint, verdict.invalid) == (None, None)
    assert verdict.operators == {"generate_mix_and_aggregate": 1, "expand_combine": 1}
    monkeypatch.setattr(passes, "run", planted("transposed mixing"))
    assert check(program).complaint is not None
    assert not torch.distributed.is_initialized()


def test_each_form_is_drawn() -> None:
    programs = [program for program in map(compose, map(Choices, range(800))) if program.ranks > 1]
    forms = {name: sum(f"{name}(" in program.source for program in programs) for name in ("shared_out", "gathered")}
    assert min(forms.values()) > 3, forms
    assert sum(forms.values()) < len(programs), "no program only has a process group"


def test_all_ranks_hold_the_same() -> None:
    """A sum of the parts of all ranks is a part of the sum, whichever of both is reduced or gathered."""
    with ranks.group(2):
        mesh = ranks._MESHES[0]
        x = torch.arange(4.0, requires_grad=True)
        whole = ranks.GATHER(x, 0, mesh.get_group())
        (gradient,) = torch.autograd.grad(whole.square().sum(), x)
        assert whole.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
        assert gradient.tolist() == [0, 4, 8, 12]
        tokens = ranks.shared_out(x.detach(), 0)
        assert tokens.sum().full_tensor() == tokens.redistribute(mesh, [Replicate()]).to_local().sum() == 12
        found: list[object] = [None, None]
        torch.distributed.all_gather_object(found, {"rank": 0})
        assert found == [{"rank": 0}] * 2
