"""The grammar draws every kind of program; identities are identities."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.fuzz import around_gates, identities
from tests.fuzz.__main__ import Choices
from tests.fuzz.grammar import KINDS, PUT, compose
from tests.fuzz.mutated import MODELS, mutated, places
from tests.fuzz.other_streams import MAKERS

DRAWN = 300


def test_all_kinds_are_drawn() -> None:
    programs = [compose(Choices(seed)) for seed in range(DRAWN)]
    drawn = Counter(kind for program in programs for kind in program.features)
    others = ["without gradients", "without duck shapes", "marked sizes", "calls of other sizes"]
    others += ["calls with other gradients", "mutant of a model"]
    others += [kind for kind in MAKERS if kind]
    assert {kind for kind in (*KINDS, *others) if drawn[kind] < DRAWN // 100} == set()
    assert 0 < sum(program.inductor for program in programs) < DRAWN // 20


def test_the_same_choices_make_the_same_program() -> None:
    for seed in range(20):
        choices = Choices(seed)
        program = compose(choices)
        assert program == compose(Choices(1000, choices.made))
        ast.parse(program.source)


@pytest.mark.parametrize("kind", PUT)
def test_every_kind_changes_the_program(kind: str) -> None:
    """A program that is said to have a kind is another one without it."""
    for seed in range(3000):
        choices = Choices(seed)
        program = compose(choices)
        if kind in program.features and "def body" in program.source:
            break
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(PUT, kind, lambda *_: None)
        assert compose(Choices(seed)).source != program.source


@pytest.mark.parametrize("drop", around_gates.DROPOUTS)
def test_dropouts_draw_the_same_in_float64(drop: str) -> None:
    """So a reference in float64 drops what eager code drops."""
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = {"F": F, "torch": torch, "w": torch.ones(9, 5, 4, 8, dtype=dtype).transpose(1, 2)}
        torch.manual_seed(1)
        found.append(eval(drop.format(v="w", t="True"), values).double())
    assert len(found[0].unique()) == 2
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_change_is_the_one_of_the_zoo(name: str) -> None:
    module, model, given = MODELS[name]
    made = []
    for build in (getattr(module, model), mutated(name, 0)):
        torch.manual_seed(1)
        made.append(build(**given)(torch.ones(1, 2, 24)))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_changes_of_a_model_change_its_source(name: str) -> None:
    changed = places(name)
    assert len({(mutant.begin, mutant.new) for mutant in changed}) == len(changed) >= 30
    assert {"-1", "-2"} & {mutant.old for mutant in changed}, "no axis is changed"


def _values(pattern: str) -> dict[str, Any]:
    """Something for each name of a pattern."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5

    values: dict[str, Any] = {"torch": torch, "F": F, "N": 2, "_d": -1, "_s": [1, 3]}
    values |= {name: draw(2, 3, 4, 4) for name in ("_a", "_b", "_c")} | {"_w": draw(5, 4)}
    if "...n,...nc" in pattern:
        values["_a"] = draw(2, 3, 4)
    return values


@pytest.mark.parametrize(("pattern", "others"), [*identities.EQUAL, ("_a", identities.ANY)])
def test_identities_are_identities(pattern: str, others: tuple[str, ...]) -> None:
    values = _values(pattern)
    wanted = eval(pattern, values)
    for other in others:
        got = eval(other, values)
        for want, have in (
            zip([wanted], [got], strict=True) if isinstance(wanted, torch.Tensor) else zip(wanted, got, strict=True)
        ):
            torch.testing.assert_close(have, want, msg=lambda text, other=other: f"{other}: {text}")


def test_an_identity_is_found_inside_an_expression() -> None:
    line = identities.Line("u", "torch.tanh(F.linear(x, self.phi))")
    seen = set()
    for seed in range(200):
        copy = identities.Line(line.names, line.expression)
        identities.apply_identities(Choices(seed, [0]), [copy])
        seen.add(copy.expression)
    assert "torch.tanh(x @ self.phi.t())" in seen
    assert "-torch.tanh(-F.linear(x, self.phi))" in seen
    assert "torch.tanh(F.linear(x * 1, self.phi))" in seen
