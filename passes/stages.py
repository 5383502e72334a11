"""How long each stage of the passes takes, for the log."""

from __future__ import annotations

import time


class Stages:
    """Times since the last stage was done, by name: `record 0.12 s, recognise 0.30 s`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._times: list[str] = []

    def done(self, stage: str) -> None:
        """Note what ran since the last stage as this stage."""
        now = time.perf_counter()
        self._times.append(f"{stage} {now - self._last:.2f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._times)
