"""Where the reading of a step ends: the answer of the code that reads, at the value where it stopped."""

from __future__ import annotations

from dataclasses import dataclass

from mhc_compile.passes.shadow import Value


@dataclass(frozen=True)
class Miss:
    """Why a value is not what it was read as, in words that follow "this"; gate is what it would have been read with.

    depth says how far the reading got. If there are several misses, the report has the one that got furthest.
    """

    value: Value
    gate: Value | None
    reason: str
    depth: int
