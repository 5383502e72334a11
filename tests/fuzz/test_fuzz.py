"""Random programs compute the same after rewriting; and the check sees a rewriting that is wrong."""

from __future__ import annotations

import os
import runpy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhc_compile import passes
from tests.fuzz import __main__ as fuzzer
from tests.fuzz import judge, watch
from tests.fuzz.__main__ import Choices, shrink
from tests.fuzz.grammar import compose
from tests.fuzz.judge import Verdict, check
from tests.fuzz.plants import OBSERVED, PLANTS, planted
from tests.fuzz.program import Program

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # After a graph break Dynamo looks at the .grad of the tensors that the second graph is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Dynamo instantiates autograd.Function while it traces one, which torch itself warns about.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # A program that writes into a view, or multiplies by a size, may make torch warn; that is the program's affair.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Drawn in parts, so that several workers share them; each draws programs of its own, always the same ones.
PARTS, PROGRAMS = 5, 20
FOUND = Path(__file__).parent / "found"


@st.composite
def programs(draw: Any) -> Program:
    program = compose(lambda options: draw(st.sampled_from(list(options))))
    # What Inductor makes takes as long as fifty other programs; `make fuzz` has it.
    return replace(program, inductor=False)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_is_rewritten_computes_the_same(part: int) -> None:
    seen: Counter[str] = Counter()

    def examine(program: Program) -> None:
        verdict = check(program)
        assert verdict.complaint is None, f"{verdict.complaint}\n{program}"
        seen["judged"] += verdict.invalid is None
        seen["rewritten"] += bool(verdict.operators)

    # A function of its own name has draws of its own when they are derived from it.
    examine.__name__ = examine.__qualname__ = f"examine_{part}"
    checks = [HealthCheck.too_slow, HealthCheck.large_base_example, HealthCheck.data_too_large]
    given(programs())(
        settings(max_examples=PROGRAMS, deadline=None, derandomize=True, database=None, suppress_health_check=checks)(
            examine
        )
    )()
    assert seen["judged"] >= PROGRAMS // 2
    assert seen["rewritten"] >= PROGRAMS // 5, "hardly anything was rewritten, so hardly anything was tested"


PLAIN = compose(lambda options: options[0])
WITH_NORM = Program(
    PLAIN.source.replace("F.linear(u,", "F.linear(F.rms_norm(u, (C,), self.channel, 1e-6),"), PLAIN.shape
)


@pytest.mark.parametrize("kind", PLANTS)
def test_a_wrong_rewriting_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check(WITH_NORM)
    assert right.complaint is None
    assert right.operators == {"generate_mix_and_aggregate": 1, "expand_combine": 1, "input norm": 1}
    monkeypatch.setattr(passes, "run", planted(kind))
    assert "in float64" in (check(WITH_NORM).complaint or "")


@pytest.mark.parametrize("kind", PLANTS)
def test_the_errors_alone_show_it_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of both graphs in float64: the rewritten program's error is larger than eager's.

    A dozen inputs show that. Those after them are for luck, and take a minute.
    """
    monkeypatch.setattr(judge, "INPUTS", judge.INPUTS[:1])
    monkeypatch.setattr(passes, "run", planted(kind))
    monkeypatch.setattr(watch, "same_in_float64", lambda *_: None)
    complaint = check(WITH_NORM).complaint or ""
    assert ("only one has" if kind == "gradient lost" else "rewritten") in complaint


def _with(old: str, new: str, **options: Any) -> Program:
    """The plain program with a few characters changed; of its results each is judged alone."""
    source = PLAIN.source.replace(old, new)
    assert source != PLAIN.source or old == new
    return Program(source, PLAIN.shape, **options)


READ = "u = (h_pre.unsqueeze(-1) * xs).sum(-2)\n"
STEP = "        m = m / (m.sum(-1, keepdim=True) + 1e-06)\n"
# Streams that are equal, and so many steps that what H_res' logits have for a gradient vanishes.
EQUAL = _with("h_res = m\n", (10 * (STEP + STEP.replace("-1", "-2")) + "        h_res = m\n").lstrip())
EQUAL = replace(EQUAL, source=EQUAL.source.replace("x = x\n", "x = x[:, :, :1].expand_as(x)\n").replace("1e-06", "0.0"))
# A program of the kind in which a plant is seen, and what the judge then says.
SHOWN = {
    "write lost": (_with(READ, READ + "        u.select(1, -1).mul_(0.5)\n"), "in float64"),
    "output copied": (_with("(out, *kept)", "(out, out[:1])"), "share memory in one only"),
    "output with other strides": (PLAIN, "strides"),
    "detached result attached": (_with("(out, *kept)", "(out, out.detach())"), "without gradient"),
    "rows not picked": (_with("f = torch", "u = u[[1, 0]]\n        f = torch"), "in float64"),
    "size of the first call": (_with("", "", dynamic=True, later=(((2, 5, 4, 6),),)), "in float64"),
    "noisy gradient": (EQUAL, "phi of gate 2"),
    "hang": (PLAIN, "hang"),
    "failure": (PLAIN, "the passes failed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBSERVED)
def test_what_one_kind_of_program_shows_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, complaint = SHOWN[kind]
    if "float64" not in complaint:
        monkeypatch.setattr(watch, "same_in_float64", lambda *_: None)
    assert check(program).complaint is None
    monkeypatch.setattr(judge, "LIMIT", 3 if kind == "hang" else judge.LIMIT)
    monkeypatch.setattr(passes, "run", planted(kind))
    assert complaint in (check(program).complaint or "")


@pytest.mark.parametrize("without_the_passes", [False, True])
@pytest.mark.parametrize(("end", "complaint"), [(os.abort, "crash: exit code -6"), (lambda: time.sleep(60), "hang")])
def test_the_next_program_is_judged_after_one_that_ends_its_process(
    end: Callable[[], None], complaint: str, without_the_passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [compose(Choices(seed)) for seed in range(3)]

    def check(program: Program) -> Verdict:
        if program == programs[1]:
            end()
        return Verdict()

    monkeypatch.setattr(fuzzer, "check", check)
    monkeypatch.setattr(fuzzer, "alone", lambda program: end() if without_the_passes else None)
    monkeypatch.setattr(fuzzer, "LIMIT_OF_INDUCTOR", 0.5)
    found = fuzzer.verdicts(0)
    seen = [next(found) for _ in range(3)]
    found.close()
    assert [seed for seed, _ in seen] == [0, 1, 2]
    ended = seen[1][1]
    assert [verdict for _, verdict in seen] == [Verdict(), ended, Verdict()]
    assert complaint in ((ended.invalid if without_the_passes else ended.complaint) or "")
    assert (ended.complaint is None) == without_the_passes


def test_what_inductor_alone_finds_wrong_in_its_caches_is_no_fault_of_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two runs is wrong, with the passes and without."""
    runs: dict[bool, int] = {True: 0, False: 0}

    def checked(program: Program, *, rewriting: bool) -> Verdict:
        runs[rewriting] += 1
        return Verdict(complaint="wrong" if runs[rewriting] == 2 else None)

    monkeypatch.setattr(judge, "_check", checked)
    verdict = check(replace(PLAIN, inductor=True))
    assert verdict.complaint is None
    assert verdict.invalid == "without the passes: wrong"


def test_a_wrong_program_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "run", planted("gradient lost"))
    choices = Choices(0, given=[0] * 200)
    compose(choices)
    made = choices.made
    made[1] = made[-1] = 2  # another layout, and another seed
    program, verdict = shrink(0, made)
    assert verdict.complaint
    assert program == PLAIN


@pytest.mark.parametrize("file", sorted(FOUND.iterdir()), ids=lambda file: file.stem)
def test_programs_that_the_passes_once_failed_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the fuzzer printed them."""
    runpy.run_path(str(file), run_name="__main__")
    assert "complaint=None" in capsys.readouterr().out


def test_a_program_is_printed_as_one_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text(str(PLAIN), encoding="utf-8")
    runpy.run_path(str(file), run_name="__main__")
    assert "complaint=None" in capsys.readouterr().out


def test_a_cast_that_copies_in_bfloat16_copies_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the copy must not be written into the streams."""
    source = PLAIN.source.replace("xs = x\n", "xs = x.float()\n")
    source = source.replace("wide = flat\n", "wide = flat.float()\n        wide.mul_(0.75)\n")
    program = Program(source, PLAIN.shape, "bfloat16")
    verdict = check(program)
    assert verdict.complaint is None
    assert "expand_combine" in verdict.operators
    monkeypatch.setattr(watch, "is_cast", lambda *_: False)
    assert "in float64" in (check(program).complaint or "")


@pytest.mark.parametrize(("inputs", "heavy", "wrong"), [(1000, True, False), (1000, False, True), (12, True, True)])
def test_three_times_the_error_is_luck_where_few_of_a_thousand_inputs_make_it(
    inputs: int, heavy: bool, wrong: bool
) -> None:
    results = {"result 0": torch.ones(4)}
    sizes = [1.0 if heavy and at else 1e6 for at in range(inputs)]
    errors = [({"result 0": 1e12}, {"result 0": size}, {"result 0": 9 * size}) for size in sizes]
    assert bool(judge.judged(errors, results, judge.AGAIN)) == wrong


@pytest.mark.parametrize(("places", "wrong"), [({0}, False), ({0, 12}, True)])
def test_a_fault_of_few_inputs_shows_in_others_too(
    places: set[int], wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewritten program's error is far too large at these places of all inputs, of which a round has 12."""
    evaluate, seen = judge.evaluate, iter(range(1000))

    def evaluated(call: Any, module: Any, given: Any, program: Program, wide: bool, flipped: bool) -> Any:
        found = evaluate(call, module, given, program, wide, flipped)
        if call is not module and not wide and next(seen) in places:
            found.results["output 0"].add_(1e-3)
        return found

    monkeypatch.setattr(judge, "INPUTS", (12,))
    monkeypatch.setattr(judge, "evaluate", evaluated)
    assert ("output 0" in (check(PLAIN).complaint or "")) == wrong


def test_other_inputs_come_with_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may write over its inputs: all of its numbers would be the same ones again."""
    evaluate, seen = judge.evaluate, set[float]()

    def evaluated(call: Any, module: Any, *rest: Any) -> Any:
        if call is not module:  # the rewritten program, and float64
            seen.add(float(module.phi.detach().float().sum()))
        return evaluate(call, module, *rest)

    monkeypatch.setattr(judge, "INPUTS", (12,))
    monkeypatch.setattr(judge, "evaluate", evaluated)
    monkeypatch.setattr(judge, "judged", lambda errors, results, slack: {"output 0": "too large"})
    check(PLAIN)
    assert len(seen) >= 12
