"""The stages: how long each takes, in words, and what they leave behind."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest
from torch import fx

from mhc_compile import passes
from mhc_compile.passes.stages import Stages


def test_stages_in_order() -> None:
    stages = Stages()
    stages.done("record")
    stages.done("recognise")
    assert re.fullmatch(r"record \d+\.\d\d s, recognise \d+\.\d\d s", str(stages))


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_garbage_is_collected_afterwards_if_it_was_before(collecting: bool) -> None:
    graph = fx.Graph()
    graph.output(())
    assert passes.run(graph)[0] is None
    assert gc.isenabled() == collecting
