"""How long each stage takes, in words."""

from __future__ import annotations

import re

from mhc_compile.passes.stages import Stages


def test_stages_in_order() -> None:
    stages = Stages()
    stages.done("record")
    stages.done("recognise")
    assert re.fullmatch(r"record \d+\.\d\d s, recognise \d+\.\d\d s", str(stages))
