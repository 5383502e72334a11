"""What becomes of a corpus of drawn programs: any change of a plan shows."""

from __future__ import annotations

import pytest

from tests.passes.corpus import expected, outcome, program_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PARTS = 75
EXPECTED = expected()


@pytest.mark.parametrize("part", range(PARTS))
def test_plans(part: int) -> None:
    """If a change is meant, `python -m tests.passes.corpus` writes the file anew, and git shows what is other."""
    different = []
    for seed in sorted(EXPECTED)[part::PARTS]:
        program = program_of(seed)
        assert program is not None, f"the fuzzer draws another program for {seed}: write the corpus anew"
        found = outcome(program)
        if found != EXPECTED[seed]:
            lines = [f"- {line}" for line in EXPECTED[seed] if line not in found]
            lines += [f"+ {line}" for line in found if line not in EXPECTED[seed]]
            different.append("\n".join([f"{program.source}\n{seed}", *(lines or ["in another order"])]))
    assert not different, "\n\n".join(different)


def test_the_corpus_has_all_kinds() -> None:
    """Every operator that the first stage makes, sites that are left, fusions, and programs without any."""
    assert len(EXPECTED) >= 150, "draw it anew: python -m tests.passes.corpus 150"
    lines = [line for found in EXPECTED.values() for line in found]
    made = {line.partition(":")[0] for line in lines if " is left" not in line}
    assert made >= {"aggregate", "expand_combine", "generate_mix", "generate_mix_and_aggregate", "head", "mix_streams"}
    assert made >= {"projection", "sinkhorn", "fused"}
    assert sum(" is left" in line for line in lines) > 20
    assert any(not found for found in EXPECTED.values())
    assert not [line for line in lines if line.startswith("error")]
